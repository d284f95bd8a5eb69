"""Every task by its name, such as `regression(loss='huber')`."""

from __future__ import annotations

from fedstrata.core.spec import Registry, bind
from fedstrata.core.task import Task
from fedstrata.errors import UsageError
from fedstrata.tasks.classification import Classification
from fedstrata.tasks.dense import NextToken, Segmentation
from fedstrata.tasks.regression import Regression
from fedstrata.tasks.yes_no import Binary, Multilabel

TASKS: Registry = {
    "classification": Classification,
    "binary": Binary,
    "multilabel": Multilabel,
    "regression": Regression,
    "segmentation": Segmentation,
    "next_token": NextToken,
}


def build_task(text: str | Task) -> Task:
    """Read a task string such as `"classification(weights='balanced')"`; a Task is taken as it is.

    Raises:
        UsageError: for an unknown name (with the nearest known one) or a wrong argument.
    """
    if isinstance(text, Task):
        return text
    if not isinstance(text, str):
        raise UsageError(f"a task is a text or a fedstrata.Task, not {type(text).__name__}")
    build, arguments = bind("task", TASKS, text)
    task: Task = build(**arguments)
    return task
