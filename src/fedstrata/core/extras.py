"""What is only needed for some things, and installed by name: `pip install 'fedstrata[report]'`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedstrata.errors import UsageError


@dataclass(frozen=True)
class Extra:
    """A row of the table.

    Args:
        help: what it is for.
        packages: its packages, as Python imports them → as they are installed.
    """

    help: str
    packages: Mapping[str, str]

    @property
    def distributions(self) -> tuple[str, ...]:
        """Its packages as they are installed."""
        return tuple(dict.fromkeys(self.packages.values()))


EXTRAS: Mapping[str, Extra] = {
    "augment": Extra("augmentation of images", {"kornia": "kornia"}),
    "hf": Extra("transformers, pre-trained ones too", {"transformers": "transformers"}),
    "peft": Extra("adapters", {"peft": "peft"}),
    "ray": Extra("clients on a Ray cluster", {"ray": "ray"}),
    "flower": Extra(
        "federations across sites, and flwr-datasets' partitioners",
        {"flwr": "flwr", "flwr_datasets": "flwr-datasets", "datasets": "flwr-datasets", "cryptography": "cryptography"},
    ),
    "report": Extra("figures for papers", {"matplotlib": "matplotlib"}),
    "probes": Extra("Wasserstein distances between features", {"ot": "pot"}),
    "tensorboard": Extra("TensorBoard events", {"tensorboard": "tensorboard"}),
    "wandb": Extra("runs in Weights & Biases", {"wandb": "wandb"}),
    "mlflow": Extra("runs in MLflow", {"mlflow": "mlflow-skinny", "sqlalchemy": "sqlalchemy", "alembic": "alembic"}),
    "tune": Extra("searches for settings", {"optuna": "optuna"}),
    "notebook": Extra(
        "tables, plots and pages in notebooks", {"pandas": "pandas", "matplotlib": "matplotlib", "IPython": "ipython"}
    ),
}
"""Extras by name, as in pyproject.toml."""


def extra_of(package: str) -> str | None:
    """The extra that brings a package, by the name under which it is imported; None if none does."""
    return next((name for name, extra in EXTRAS.items() if package in extra.packages), None)


def missing(package: str, what: str) -> UsageError:
    """The error for a package that is not installed; `what` says for what it is needed, as in "a picture needs"."""
    extra = extra_of(package)
    assert extra is not None, package
    return UsageError(f"{what} the package {EXTRAS[extra].packages[package]}: pip install 'fedstrata[{extra}]'")
