"""fedstrata: federated learning, layer by layer, for PyTorch.

import fedstrata as fs

data = fs.load_dataset("digits")
parts = fs.partition(data.train.labels(), "dirichlet(alpha=0.1)", clients=10, seed=0)
model = fs.build_model("cnn2", data.input_shape, data.classes)
history = fs.Federation(model, [data.train.select(p) for p in parts], data.test, method="fedavg").fit()
"""

from fedstrata._version import __version__
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
from fedstrata.strata import Stratum, partners, run_from, stages, strata, tap
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
