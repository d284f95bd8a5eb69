"""fedstrata: federated learning, layer by layer, for PyTorch.

import fedstrata as fs

data = fs.load_dataset("digits")
parts = fs.partition(data.train.labels(), "dirichlet(alpha=0.1)", clients=10, seed=0)
model = fs.build_model("cnn2", data.input_shape, data.classes)
history = fs.Federation(model, [data.train.select(p) for p in parts], data.test, method="fedavg").fit()
"""

import importlib.util
from typing import TYPE_CHECKING, Any

from fedstrata._version import __version__

if TYPE_CHECKING:
    from fedstrata.core.method import Method
    from fedstrata.core.task import Metric, Task
    from fedstrata.core.technique import Batch, ClientView, Hooks, RoundView, Setting, Technique, Times
    from fedstrata.core.tensors import Tensors
    from fedstrata.core.types import Assignment, Examples, Into, LowRank, Slots, Stratum, Update, Work
    from fedstrata.data.datasets import load_dataset
    from fedstrata.data.examples import Dataset, MapExamples, TensorExamples
    from fedstrata.data.partitions import partition
    from fedstrata.errors import Diverged, FedstrataError, UsageError
    from fedstrata.federation import Federation
    from fedstrata.models.adapters import adapt
    from fedstrata.models.registry import build_model
    from fedstrata.models.stages import partners, run_from, stages, tap, with_stages
    from fedstrata.models.strata import strata
    from fedstrata.runs.callbacks import Callback
    from fedstrata.runs.records import Costs, History, Record
    from fedstrata.techniques import method
    from fedstrata.techniques.fedavg import FedAvg, chain
    from fedstrata.tracking.tracker import Tracker

__all__ = [
    "Assignment",
    "Batch",
    "Callback",
    "ClientView",
    "Costs",
    "Dataset",
    "Diverged",
    "Examples",
    "FedAvg",
    "Federation",
    "FedstrataError",
    "History",
    "Hooks",
    "Into",
    "LowRank",
    "MapExamples",
    "Method",
    "Metric",
    "Record",
    "RoundView",
    "Setting",
    "Slots",
    "Stratum",
    "Task",
    "Technique",
    "TensorExamples",
    "Tensors",
    "Times",
    "Tracker",
    "Update",
    "UsageError",
    "Work",
    "__version__",
    "adapt",
    "build_model",
    "chain",
    "load_dataset",
    "method",
    "partition",
    "partners",
    "run_from",
    "stages",
    "strata",
    "tap",
    "with_stages",
]

_HOMES = {
    "core.method": "Method",
    "core.task": "Metric Task",
    "core.technique": "Batch ClientView Hooks RoundView Setting Technique Times",
    "core.tensors": "Tensors",
    "core.types": "Assignment Examples Into LowRank Slots Stratum Update Work",
    "data.datasets": "load_dataset",
    "data.examples": "Dataset MapExamples TensorExamples",
    "data.partitions": "partition",
    "errors": "Diverged FedstrataError UsageError",
    "federation": "Federation",
    "models.adapters": "adapt",
    "models.registry": "build_model",
    "models.stages": "partners run_from stages tap with_stages",
    "models.strata": "strata",
    "runs.callbacks": "Callback",
    "runs.records": "Costs History Record",
    "techniques": "method",
    "techniques.fedavg": "FedAvg chain",
    "tracking.tracker": "Tracker",
}
"""Module → its public names, imported when they are first asked for (PEP 562)."""


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names.split():
            globals()[name] = getattr(importlib.import_module(f"fedstrata.{module}"), name)
            return globals()[name]
    if not name.startswith("_") and importlib.util.find_spec(f"fedstrata.{name}"):  # a module: fs.probes, fs.compare
        return importlib.import_module(f"fedstrata.{name}")
    raise AttributeError(f"module 'fedstrata' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
