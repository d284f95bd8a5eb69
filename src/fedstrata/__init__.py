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
from fedstrata.strata import Stratum, partners, run_from, stages, strata, tap

if TYPE_CHECKING:
    from fedstrata.core import (
        Assignment,
        Batch,
        ClientView,
        Hooks,
        Into,
        RoundView,
        Setting,
        Slots,
        Technique,
        Times,
        Update,
        Work,
    )
    from fedstrata.data.datasets import load_dataset
    from fedstrata.data.examples import Dataset, Examples, MapExamples, TensorExamples
    from fedstrata.data.partition import partition
    from fedstrata.errors import Diverged, FedstrataError, UsageError
    from fedstrata.federation import Federation
    from fedstrata.history import Costs, History, Record
    from fedstrata.methods import FedAvg, Method, chain
    from fedstrata.models import build_model
    from fedstrata.techniques import method
    from fedstrata.tensors import Tensors

__all__ = [
    "Assignment",
    "Batch",
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
    "MapExamples",
    "Method",
    "Record",
    "RoundView",
    "Setting",
    "Slots",
    "Stratum",
    "Technique",
    "TensorExamples",
    "Tensors",
    "Times",
    "Update",
    "UsageError",
    "Work",
    "__version__",
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
]

_HOMES = {
    "core": "Assignment Batch ClientView Hooks Into RoundView Setting Slots Technique Times Update Work",
    "data.datasets": "load_dataset",
    "data.examples": "Dataset Examples MapExamples TensorExamples",
    "data.partition": "partition",
    "errors": "Diverged FedstrataError UsageError",
    "federation": "Federation",
    "history": "Costs History Record",
    "methods": "FedAvg Method chain",
    "models": "build_model",
    "techniques": "method",
    "tensors": "Tensors",
}
"""Module → its public names, imported when they are first asked for (PEP 562).

What comes from `strata` is imported above, for the function has its module's name, and the module would hide it.
"""


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
