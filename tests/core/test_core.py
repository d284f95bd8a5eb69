"""Methods: composition, refusals, settings of the mean, and their strings."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, replace
from typing import Any, ClassVar

import pytest

import fedstrata
from fedstrata.core.technique import Hooks, Technique, overrides
from fedstrata.core.types import Assignment, Into, Update, Work
from fedstrata.errors import UsageError
from fedstrata.techniques import TECHNIQUES, method
from fedstrata.techniques.fedavg import FedAvg, chain, parse


@dataclass(frozen=True, kw_only=True)
class Prox(Technique):
    """A stand-in with two settings."""

    mu: float = 0.01
    kind: str = "l2"
    name: ClassVar[str] = "prox"

    def local(self, view: Any) -> Hooks:
        return Hooks()


@dataclass(frozen=True, kw_only=True)
class Even(Technique):
    """A stand-in that wants uniform weights and its own server step."""

    name: ClassVar[str] = "even"
    defaults: ClassVar[Mapping[str, Any]] = {"weight": "uniform", "server_lr": 0.5}


@dataclass(frozen=True, kw_only=True)
class Heavy(Technique):
    """A stand-in that wants weights by examples, and refuses prox."""

    name: ClassVar[str] = "heavy"
    defaults: ClassVar[Mapping[str, Any]] = {"weight": "examples"}
    refuses: ClassVar[Mapping[str, str]] = {"prox": "two brakes"}


TABLE = {"fedavg": FedAvg, "prox": Prox, "even": Even, "heavy": Heavy}

TEXTS = {
    "fedavg": chain(),
    "fedavg()": chain(),
    "prox": chain(Prox()),
    "fedavg + prox": chain(Prox()),
    "prox(mu=0.5) + even": chain(Prox(mu=0.5), Even()),
    "prox(0.5, 'l1')": chain(Prox(mu=0.5, kind="l1")),
    "prox(mu=1)": chain(Prox(mu=1.0)),
    "even + fedavg(buffers='local', weight='examples') + prox": chain(
        Even(), Prox(), buffers="local", weight="examples"
    ),
    "  fedavg( server_lr = 2.5 )  ": chain(server_lr=2.5),
}


@pytest.mark.parametrize("text", TEXTS)
def test_parse(text: str):
    assert parse(text, TABLE) == TEXTS[text]


@pytest.mark.parametrize("text", TEXTS)
def test_a_method_is_its_string(text: str):
    """`parse(str(m)) == m`, and the string of what was parsed is a fixed point."""
    one = parse(text, TABLE)
    assert parse(str(one), TABLE) == one
    assert str(parse(str(one), TABLE)) == str(one)
    assert parse(str(one), TABLE).digest == one.digest


def test_strings_show_what_differs_from_the_defaults_only():
    assert str(chain()) == "fedavg"
    assert str(chain(Prox(), Even())) == "prox + even"
    assert str(chain(Prox(mu=0.5, kind="l1"), server_lr=2.0)) == "fedavg(server_lr=2.0) + prox(mu=0.5, kind='l1')"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "cannot be read"),
        ("prox +", "cannot be read"),
        ("prox - even", "cannot be read"),
        ("1 + prox", "cannot be read"),
        ("a.prox", "cannot be read"),
        ("(lambda: 0)()", "cannot be read"),
        ("prxo", "did you mean 'prox'"),
        ("prox(mi=1.0)", "known: kind, mu"),
        ("prox(kinds='l1')", "did you mean 'kind'"),
        ("prox(mu='much')", "does not fit"),
        ("prox(mu=True)", "does not fit"),
        ("prox(mu=open('x'))", "not a literal"),
        ("prox(mu=[i for i in (1, 2)])", "not a literal"),
        ("prox(1.0, mu=1.0)", "given twice"),
        ("prox(1.0, 'a', 3)", "at most 2"),
        ("prox(**{'mu': 1.0})", "'**'"),
        ("prox + prox", "twice"),
        ("fedavg + fedavg", "twice"),
        ("fedavg(weight='size')", "does not fit"),
        ("fedavg(server_lr=0)", "positive"),
        ("fedavg(server_lr=1e999)", "positive"),
        ("prox + heavy", "two brakes"),
        ("heavy + prox", "two brakes"),
        ("even + heavy", "different values of 'weight'"),
        ("prox(" + "-" * 3000 + "1.0)", "cannot be read"),
        ("(" * 5000, "cannot be read"),
        ("prox" + " + prox" * 3000, "10,000 characters"),
    ],
)
def test_refusals_are_one_sentence(text: str, says: str):
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # torch's compiler, where a test before used it, leaves a larger one behind
    try:
        with pytest.raises(UsageError) as error:
            parse(text, TABLE)
    finally:
        sys.setrecursionlimit(limit)
    assert says in str(error.value)
    assert "\n" not in str(error.value).strip()


def test_the_public_table_reads_strings_and_lets_methods_pass():
    assert method("fedavg(weight='uniform')") == chain(weight="uniform")
    one = chain(Prox())
    assert method(one) is one
    assert TECHNIQUES["fedavg"] is FedAvg
    with pytest.raises(UsageError, match=r"no method 'fedagv'.*'fedavg'"):
        method("fedagv")


def test_settings_of_the_mean():
    """FedAvg's own arguments win over a technique's wishes, which win over the plain defaults."""
    plain = chain()
    assert (plain.weight, plain.buffers, plain.server_lr) == ("examples", "average", 1.0)
    wish = chain(Even())
    assert (wish.weight, wish.buffers, wish.server_lr) == ("uniform", "average", 0.5)
    told = chain(Even(), weight="examples", server_lr=3)
    assert (told.weight, told.server_lr) == ("examples", 3.0)
    assert chain(Even(), Heavy(), weight="uniform").weight == "uniform"


def test_with_buffers():
    one = chain(Prox(), server_lr=2.0)
    assert one.with_buffers(None) is one
    assert one.with_buffers("drop").buffers == "drop"
    assert one.with_buffers("drop") == chain(Prox(), server_lr=2.0, buffers="drop")
    assert one.buffers == "average"


def test_the_digest_tells_methods_apart():
    """Sixteen hex digits of SHA-256; `printf fedavg | sha256sum` begins with 093126d47a689c67."""
    assert chain().digest == "093126d47a689c67"
    texts = [*TEXTS, "prox(mu=0.02)", "even + prox", "prox + even"]
    assert len({parse(t, TABLE).digest for t in texts}) == len({str(parse(t, TABLE)) for t in texts})
    assert parse("even + prox", TABLE).digest != parse("prox + even", TABLE).digest


def test_doors():
    """A technique is found only at the doors that it overrides, in the method's order."""
    one = chain(Even(), Prox())
    assert [t.name for t in one.at("local")] == ["prox"]
    assert list(one.at("apply")) == []
    assert overrides(Prox(), "local")
    assert not overrides(Prox(), "plan")


def test_a_silent_technique_lets_everything_pass():
    """Every door of the base class returns its input, or nothing."""
    silent = Technique()
    assignment = Assignment(0, 0, "", {}, {}, (), (), Work(), 0, "m")
    updates = [Update(0, 0, "m", 1, 1, {})]
    assert silent.plan(assignment, (), {}) is assignment
    assert silent.send({}, assignment) == {}
    assert silent.rescale(updates, [1.0], []) is updates
    delta, state = {}, {}
    given: Any = None
    assert silent.init({}, given) == {}
    assert silent.apply(state, delta, given)[0] is delta
    assert silent.apply(state, delta, given)[1] is state
    assert silent.local(given) == Hooks()


def test_nothing_can_be_changed_afterwards():
    for frozen, name in ((Prox(), "mu"), (chain(), "base"), (FedAvg(), "weight"), (Work(), "lr"), (Hooks(), "loss")):
        with pytest.raises(FrozenInstanceError):
            setattr(frozen, name, None)
    assert replace(Prox(), mu=1.0) == Prox(mu=1.0)


@pytest.mark.parametrize("server_lr", [0.0, -1.0, float("inf"), float("nan")])
def test_a_server_step_is_positive(server_lr: float):
    with pytest.raises(UsageError, match="server_lr"):
        chain(server_lr=server_lr)


@pytest.mark.parametrize("wrong", [{"weight": "exampels"}, {"buffers": "avrage"}])
def test_a_misspelt_setting_is_refused_in_python_too(wrong: dict[str, Any]):
    """A wrong `weight` must not quietly mean `uniform`."""
    with pytest.raises(UsageError, match=next(iter(wrong))):
        chain(**wrong)


def test_the_front_door_names_exist():
    """Everything in `__all__` is there, and named once."""
    assert len(fedstrata.__all__) == len(set(fedstrata.__all__))
    assert all(getattr(fedstrata, name) is not None for name in fedstrata.__all__)


def test_a_place_is_not_the_modules_name() -> None:
    assert Into("head") == Into("head")
    assert not Into("head") != Into("head")  # noqa: SIM202
    assert Into("head") != "head"
    assert not Into("head") == "head"  # noqa: SIM201
    assert len({Into("head"), "head", Into("head")}) == 2
    assert repr(Into("head")) == "Into('head')"
