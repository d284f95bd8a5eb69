"""What a run is made of: its models by architecture, its clients' data, the test set; checked to fit together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from fedstrata.core.method import Method
from fedstrata.core.rng import preserve_rng
from fedstrata.core.task import Task
from fedstrata.core.technique import Setting
from fedstrata.core.types import Examples, Stratum, Work
from fedstrata.data.client_data import ClientData, hold_out_examples, read_clients
from fedstrata.data.examples import as_examples, as_unlabelled
from fedstrata.data.pooling import pool_examples
from fedstrata.models.adapted import share_base
from fedstrata.models.copying import copy_model
from fedstrata.models.isolated_architectures import isolate_architectures
from fedstrata.models.stages import mark_stages
from fedstrata.models.strata import used_by_any
from fedstrata.server.compatibility import (
    check_classes,
    check_fit,
    check_module,
    check_ranks,
    check_trust,
    resolve_task,
)
from fedstrata.server.state import Architecture


@dataclass(frozen=True, eq=False)
class Setup:
    """Models and data of a run.

    Args:
        task: what is learnt, with numbers for all that depends on the data.
        models: by architecture; "" is the server's own. They are copies, which nobody trains.
        arch_of: client → the name of its architecture.
        clients: everybody's examples to train on.
        client_tests: the clients' own test examples, None for a client without any; None if nobody has any.
        test: the test set, if there is one; all clients' test examples where none is given.
        public: the server's unlabelled inputs, if it has any.
        trusted: labelled examples that the server trusts, if it has any.
        sample: a small batch of inputs.
        architectures: what each model holds, by names.
    """

    task: Task
    models: Mapping[str, nn.Module]
    arch_of: Callable[[int], str]
    clients: Sequence[Examples]
    client_tests: Sequence[Examples | None] | None
    test: Examples | None
    public: Examples | None
    trusted: Examples | None
    sample: Tensor
    architectures: Mapping[str, Architecture]

    @property
    def strata(self) -> tuple[Stratum, ...]:
        """Those of the server's own model."""
        return self.architectures[""].strata

    @property
    def known_of_models(self) -> dict[str, Any]:
        """What a `ClientContext` is told of the models."""
        held = self.architectures
        strata = {name: one.strata for name, one in held.items()}
        return {"archs": tuple(held), "strata": strata, "cuts": {name: one.cuts for name, one in held.items()}}

    def settings_of(self, method: Method, work: Work, augments: bool) -> dict[str, Setting]:
        """Architecture → what a method is about to run with."""
        return {
            name: Setting(
                model=module,
                strata=self.architectures[name].strata,
                work=work,
                sample=self.sample,
                public=self.public,
                augment=augments,
                arch=name,
                buffers=method.buffers,
                kept=method.kept(self.architectures[name].strata),
            )
            for name, module in self.models.items()
        }


def build_setup(
    method: Method,
    task: Task,
    batch_size: int,
    holdout: float | None,
    seed: int,
    model: nn.Module,
    clients: Sequence[Any] | ClientData,
    test: Any,
    archs: Mapping[str, nn.Module],
    arch_of: Callable[[int], str] | None,
    public: Any,
    trusted: Any = None,
) -> Setup:
    """Take up what a user gave, hold out test examples, copy the models, and check that everything fits.

    Raises:
        UsageError: one sentence for the first thing that does not.
    """
    for module in (model, *archs.values()):
        check_module(module)
    check_classes(method, task)
    check_trust(method, trusted)
    data = read_clients(clients, task.read_targets)
    if holdout is not None:
        data = hold_out_examples(data, holdout, seed, task.has_labels)
    examples, own = data.train, data.test
    given = data.everybodys_test() if test is None else test
    tested = None if given is None else as_examples(given, "the test set", task.read_targets)
    inputs = None if public is None else as_unlabelled(public)
    root = None if trusted is None else as_examples(trusted, "the trusted data", task.read_targets)
    models = {name: copy_model(m).cpu() for name, m in {"": model, **archs}.items()}
    of_client = arch_of or (lambda client: "")
    if method.branches:
        models, of_client = isolate_architectures(models, of_client, len(examples))
    share_base(models)
    with preserve_rng():  # a dataset's own transforms may draw random numbers
        sample = check_fit(task, models, of_client, examples, tested, batch_size, inputs, own, root)
        task = resolve_task(task, examples, models[""], sample)
    for module in models.values():
        mark_stages(module, sample)
    architectures = _architectures(models, sample)
    check_ranks(method, architectures)
    pooled = pool_examples(examples)  # now, since refusals name the client whose tensors do not fit
    return Setup(task, models, of_client, pooled, own, tested, inputs, root, sample, architectures)


def _architectures(models: Mapping[str, nn.Module], sample: Tensor) -> dict[str, Architecture]:
    """What each model holds; the server's strata are idle only where no sub-model uses them."""
    found = {name: Architecture.of(module, sample) for name, module in models.items()}
    found |= {name: found[name].cut_from(found[""], models[name], models[""]) for name in models if name}
    used = used_by_any(found[""].strata, *(a.strata for a in found.values()))
    return found | {"": replace(found[""], strata=used)}
