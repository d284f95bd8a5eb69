"""What to try, as settings that a run of this kind accepts: whatever would be refused is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from fedstrata.config.identity import AT_SITES
from fedstrata.config.schema import RunConfig, Settings, validate_values
from fedstrata.core.method import Method
from fedstrata.core.spec import bind, non_default_fields, parameters, parse_call, text_of
from fedstrata.diagnosis.evidence import absent_clients, is_remote, trained_strata
from fedstrata.diagnosis.findings import Remedy
from fedstrata.errors import UsageError
from fedstrata.models.registry import MODELS, build_model
from fedstrata.runs.reader import SavedRun
from fedstrata.tasks.registry import build_task
from fedstrata.techniques import method
from fedstrata.techniques.quotes import quote_gains

ACAR = "FedDyn: Acar et al., ICLR 2021"
BLANCHARD = "Krum: Blanchard et al., NeurIPS 2017"
CHAN = "InCo: Chan et al., ICLR 2024"
CHEN_ROLORA = "RoLoRA: Chen et al., NeurIPS 2025"
CUI = "Class-balanced loss: Cui et al., CVPR 2019"
DEEPER = "Unlocking the Potential of FL for Deeper Models"
HE = "Residual networks: He et al., CVPR 2016"
HSIEH = "The Non-IID Data Quagmire: Hsieh et al., ICML 2020"
HSU = "FedAvgM: Hsu et al., 2019"
IOFFE = "Batch normalisation: Ioffe and Szegedy, ICML 2015"
KARIMIREDDY = "SCAFFOLD: Karimireddy et al., ICML 2020"
LI_BN = "FedBN: Li et al., ICLR 2021"
LI_MOON = "MOON: Li et al., CVPR 2021"
LI_PROX = "FedProx: Li et al., MLSys 2020"
LI_RS = "FedRS: Li and Zhan, KDD 2021"
LUO = "CCVR: Luo et al., NeurIPS 2021"
MCMAHAN = "FedAvg: McMahan et al., AISTATS 2017"
PILLUTLA = "RFA: Pillutla et al., IEEE TSP 2022"
SINGHAL = "FedEx-LoRA: Singhal et al., ACL 2025"
SUN_FFA = "FFA-LoRA: Sun et al., ICLR 2024"
TANG = "FedImpro: Tang et al., ICLR 2024"
WANG_NLR = "FedNLR: Wang et al., KDD 2024"
WANG_PART = "FedPart: Wang et al., NeurIPS 2024"
YIN = "Coordinate-wise median: Yin et al., ICML 2018"
ZHANG = "FedLC: Zhang et al., ICML 2022"

SHALLOW = ("resnet34", "resnet26", "resnet18", "resnet14", "resnet10", "resnet8", "cnn8", "cnn4")
"""What a network may be replaced by, from deep to shallow; of its own kind."""


class RemedyBuilder:
    """Builds remedies for one run: each is checked against the run's method and model, and None if it does not fit."""

    def __init__(self, saved: SavedRun) -> None:
        self.config = saved.config
        self.facts = saved.facts
        self.remote, self.absent = is_remote(saved), absent_clients(saved)

    @cached_property
    def own(self) -> Method | None:
        """The run's method; None for one that this version does not know."""
        try:
            return method(str(self.config.get("method", "fedavg")))
        except UsageError:
            return None

    @cached_property
    def model(self) -> tuple[str, dict[str, Any]] | None:
        """The name and the arguments of a model from the zoo; None for a model of the user's own."""
        text = self.config.get("model")
        try:
            call = parse_call(str(text or ""))
            return call.name, bind("model", MODELS, call)[1]
        except UsageError:
            return None

    @property
    def replaceable(self) -> bool:
        """Whether another model of the zoo can replace this one: it has a name, and all clients have all of it."""
        return self.model is not None and not self.config.get("archs")

    @property
    def width(self) -> Any:
        """What the model calls its width; None where it has none."""
        if self.model is None:
            return None
        name, given = self.model
        known = parameters(MODELS[name])
        return given.get("width", known["width"][1]) if "width" in known else None

    def add_technique(self, technique: str, why: str, paper: str, **settings: Any) -> Remedy | None:
        """The run's method with one more technique; None if it has that already, or if run and technique do not fit."""
        try:
            added = method(technique)
            if any(one.needs_classes for one in added.techniques) and not self.facts.get("has_classes", True):
                return None
            names = {one.name for one in added.techniques}
            if self.own is None or names & {one.name for one in self.own.techniques}:
                return None
            gains = quote_gains(one.name for one in (*self.own.techniques, *added.techniques))
            quoted = f"{why}; measured: {gains}" if gains else why
            return self._build(str(method(f"{self.own} + {technique}")), settings, quoted, paper)
        except UsageError:
            return None

    def change_settings(self, why: str, paper: str, **settings: Any) -> Remedy | None:
        """Other settings; None if the run has them already, or if they do not fit."""
        if all(self.config.get(name) == value for name, value in settings.items()):
            return None
        return self._build(None, settings, why, paper)

    def change_buffers(self, policy: Any, why: str) -> Remedy | None:
        """Another policy for running statistics, also in a method that names its own."""
        if self.own is None or self.own.buffers == policy:
            return None
        text = None if self.own.base.buffers is None else str(self.own.with_buffers(policy))
        return self._build(text, {"buffers": policy}, why, LI_BN if policy == "local" else HSIEH)

    def change_reducer(self, reduce: str, why: str, paper: str) -> Remedy | None:
        """The run's method with a rule in the mean's place; None if it has one already, or if they do not fit."""
        if self.own is None or self.own.reducer is not None:
            return None
        try:
            return self._build(str(self.own.with_reducer(reduce)), {}, why, paper)
        except UsageError:
            return None

    def leave_out(self, clients: Sequence[int]) -> Remedy | None:
        """The run without some of its clients, beside those that it does without already."""
        together = ",".join(map(str, sorted(self.absent | {*clients})))
        if self.remote:
            sites = "the site of client" if len(clients) == 1 else "the sites of clients"
            numbers = ", ".join(map(str, clients))
            return self.advise(f"ask {sites} {numbers} to stand aside until somebody has looked at the data there")
        why = f"leaves {'it' if len(clients) == 1 else 'them'} out until somebody has checked the data there"
        return self.change_settings(why, "", without=together)

    def balance_classes(self, why: str) -> Remedy | None:
        """The task with balanced weights, where it has weights and none are given."""
        try:
            task = build_task(str(self.config.get("task") or "classification"))
        except UsageError:
            return None
        if getattr(task, "weights", 0) is not None:
            return None
        balanced = {**non_default_fields(task), "weights": "balanced"}
        return self._build(None, {"task": text_of(task.name, balanced)}, why, CUI)

    def advise(self, why: str) -> Remedy:
        """What no setting can do, in words."""
        return Remedy(None, {}, why, "")

    def advise_model(self, why: str, paper: str) -> Remedy | None:
        """What to change in a model of the user's own, in words; None for a model from the zoo."""
        return Remedy(None, {}, why, paper) if self.model is None else None

    def change_model(self, why: str, paper: str, **arguments: Any) -> Remedy | None:
        """The model with those of the arguments that it takes; in words only for a model of the user's own."""
        if self.model is None:
            return Remedy(None, {}, why, paper)
        name, given = self.model
        known = parameters(MODELS[name])
        now = {key: given.get(key, default) for key, (_, default) in known.items()}
        new = {key: value for key, value in arguments.items() if key in known and now[key] != value}
        if not new or not self.replaceable:
            return None
        return self._build(None, {"model": text_of(name, {**given, **new})}, why, paper)

    def restore_model(self, why: str, paper: str, **arguments: Any) -> Remedy | None:
        """As `change_model`, but None for a model of the user's own, which may have these arguments already."""
        return None if self.model is None else self.change_model(why, paper, **arguments)

    def widen_model(self, why: str, paper: str = DEEPER) -> Remedy | None:
        """The model at twice its width."""
        return self.change_model(why, paper, width=None if self.width is None else 2 * self.width)

    def use_shallower_model(self, most: float, why: str, paper: str = DEEPER) -> Remedy | None:
        """The deepest shallower network of the same kind whose receptive field is at most so many times the image."""
        if self.model is None:
            return Remedy(None, {}, why, paper)
        for text in self._shallower_models() if self.replaceable else ():
            if self._reach(text) <= most:
                return self._build(None, {"model": text}, why, paper)
        return None

    def enlarge_images(self, why: str, paper: str = DEEPER) -> Remedy | None:
        """Images of twice the size, where the dataset can give them."""
        shape, text = self.facts.get("input_shape", []), self.config.get("dataset")
        if len(shape) != 3 or text is None:
            return None
        try:
            call = parse_call(str(text))
        except UsageError:
            return None
        return self._build(
            None, {"dataset": text_of(call.name, {**dict(call.kwargs), "resolution": 2 * shape[1]})}, why, paper
        )

    def augment(self, why: str, paper: str = DEEPER) -> Remedy | None:
        """Random resized crops, where inputs are images that nothing is done to yet."""
        images = len(self.facts.get("input_shape", [])) == 3
        return (
            self.change_settings(why, paper, augment="rrc")
            if images and self.config.get("augment", "none") == "none"
            else None
        )

    def lower_rate(self, factor: float, why: str, paper: str = MCMAHAN) -> Remedy | None:
        """A smaller learning rate."""
        return self.change_settings(why, paper, lr=self.rate(factor))

    def rate(self, factor: float) -> float:
        """The learning rate times a factor, to two digits."""
        return float(f"{factor * float(self.config.get('lr', 0.1)):.2g}")

    def add_fedimpro(self, why: str) -> Remedy | None:
        """FedImpro, cut after the first stage that is not a stem: early cuts did best in our runs."""
        strata = trained_strata(self.facts)
        stages = [name for name in dict.fromkeys(stratum["stage"] for stratum in strata) if name != "stem"]
        if self.model is None or len(stages) < 2:
            return None
        return self.add_technique(f"fedimpro(split={stages[0]!r})", why, TANG)

    def add_fedpart(self, why: str) -> Remedy | None:
        """FedPart, with rounds enough for a cycle."""
        cycle = 5 + 2 * len(trained_strata(self.facts))
        short = int(self.config.get("rounds", cycle)) < cycle
        return self.add_technique("fedpart", why, WANG_PART, **({"rounds": cycle} if short else {}))

    def _build(self, text: str | None, settings: Mapping[str, Any], why: str, paper: str) -> Remedy | None:
        """A remedy that a run's configuration accepts."""
        if self.remote and (AT_SITES & settings.keys() or not settings.keys() <= Settings.model_fields.keys()):
            return None
        beside = {name: self.config[name] for name in ("fleet", "deadline") if self.config.get(name) is not None}
        try:
            validate_values(RunConfig, {**beside, **settings, **({} if text is None else {"method": text})})
        except UsageError:
            return None
        return Remedy(text, dict(settings), why, paper)

    def _shallower_models(self) -> Iterator[str]:
        """Shallower networks with the same arguments, and with a small stem where they have one."""
        name, given = self.model or ("", {})
        family = name.rstrip("0123456789")
        for other in SHALLOW:
            if other.rstrip("0123456789") == family and int(other[len(family) :]) < int(name[len(family) :]):
                small = {"stem": "3x3", "maxpool": False} if family == "resnet" else {}
                yield text_of(other, {**given, **small})

    def _reach(self, text: str) -> float:
        """How many times the image's side the largest receptive field is; it does not depend on the width."""
        from fedstrata.models.receptive import receptive_fields

        call = parse_call(text)
        shape = tuple(self.facts["input_shape"])
        narrow = text_of(call.name, {**dict(call.kwargs), "width": 1})
        return relative_reach([f.as_dict() for f in receptive_fields(build_model(narrow, shape, 2, seed=0), shape)])


def relative_reach(fields: Any) -> float:
    """The largest receptive field against the input's side, of convolutions; 0 where there are none."""
    return max((seen / side for f in fields for seen, side in zip(f["field"], f["input"], strict=True)), default=0.0)
