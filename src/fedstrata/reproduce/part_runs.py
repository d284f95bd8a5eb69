"""Runs that a part makes itself: their configuration, and a federation with a technique that only looks on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedstrata.config.schema import RunConfig, Settings, validate_settings
from fedstrata.core.method import Method
from fedstrata.core.rng import derive
from fedstrata.core.technique import Technique
from fedstrata.federation import Federation
from fedstrata.models.registry import build_model
from fedstrata.reproduce.parts import PartResources
from fedstrata.run import deal
from fedstrata.techniques import method


def build_config(settings: Mapping[str, Any], seed: int, resources: PartResources, **others: Any) -> RunConfig:
    """The configuration of a part's run; with as many workers as the resources allow, unless its settings say."""
    own = {"seed": seed, "data_dir": resources.data_dir}
    return validate_settings(RunConfig, {"workers": resources.workers, **settings["run"], **own, **others})


def build_federation(config: RunConfig, onlooker: Technique) -> Federation:
    """The federation of a configuration, without evaluation, with one more technique, which only looks on."""
    dataset, parts = deal(config)
    model = build_model(config.model, dataset.input_shape, dataset.classes, seed=derive(config.seed, "model"))
    chosen = method(config.method)
    settings = {name: getattr(config, name) for name in Settings.model_fields}
    clients = dataset.train.split(parts)
    return Federation(model, clients, **{**settings, "method": Method((*chosen.techniques, onlooker), chosen.base)})
