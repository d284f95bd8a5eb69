"""Clients that lie: of twenty, six send their change four times as large with the sign flipped, and six send NaN."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.core.tensors import Tensors
from fedstrata.server.trust import train_reference
from tests.engines.worlds import check_close, check_same, federation, run, staged

ALL = ("median", "trimmed_mean(share=0.45)", "krum(share=0.45)", "multi_krum(share=0.45)", "geometric_median")
"""Against six liars among the fourteen whose updates are numbers."""
SOME = ("median", "trimmed_mean(share=0.3)", "multi_krum(share=0.3)", "geometric_median")
"""Against six liars among twenty; Krum, which goes by one client's seventy digits a round, is not among them."""
SIMPLE = "synthetic(shape=(16,), classes=5, examples=8000, test_examples=2000, separation=0.6)"


FLIPPED = "signflip(scale=4, clients=(0, 1, 2, 3, 4, 5))"
BROKEN = "nan(clients=(6, 7, 8, 9, 10, 11))"


@cache
def world(name: str = "digits") -> tuple[Any, list[Any], Any]:
    data = fs.load_dataset(name)
    parts = fs.partition(data.train.labels(), "iid", clients=20, seed=0)
    return data, [data.train.select(p) for p in parts], data.test


def accuracy(name: str, faults: str | None = None, reduce: str | None = None, rounds: int = 20) -> float:
    data, clients, test = world(name)
    real = name == "digits"
    model = fs.build_model(f"mlp(hidden=({32 if real else 16},))", data.input_shape, data.classes, seed=0)
    how: dict[str, Any] = {"lr": 0.5, "batch_size": 32, "rounds": rounds}
    if not real:  # these are learnt sooner
        how = {"lr": 0.6, "batch_size": 400, "rounds": 10}
    method = fs.chain(reduce=reduce)
    how |= {"steps": 5, "eval_every": 60, "engine": "vmap"}  # many clients at once: what reducers get is the same
    fed = fs.Federation(model, clients, test, method=method, faults=faults, **how)
    try:
        reached = fed.fit().accuracy
    except fs.Diverged:
        return 0.0
    assert reached is not None
    refused = {r["client"] for record in fed.records for r in record.refused}
    assert len(refused) == (6 if BROKEN in (faults or "") else 0)  # NaN is refused whatever the reducer
    return reached


@cache
def clean(name: str) -> float:
    return accuracy(name)


@pytest.mark.slow
def test_the_clean_runs_are_good() -> None:
    assert clean("digits") > 0.95
    assert clean(SIMPLE) > 0.85


@pytest.mark.slow
def test_the_mean_fails() -> None:
    """Six of twenty: Σ = 14 − 6·4 = −10 turns the mean around; of fourteen, 8 − 6·4 = −16."""
    assert accuracy("digits", FLIPPED) < 0.5
    assert accuracy(SIMPLE, f"{FLIPPED} + {BROKEN}") < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ALL)
def test_they_hold_with_thirty_percent_flipped_and_thirty_percent_broken(reduce: str) -> None:
    assert accuracy(SIMPLE, f"{FLIPPED} + {BROKEN}", reduce) >= clean(SIMPLE) - 0.03


@pytest.mark.slow
@pytest.mark.parametrize("reduce", SOME)
def test_they_hold_on_real_digits_with_thirty_percent_flipped(reduce: str) -> None:
    assert accuracy("digits", FLIPPED, reduce) >= clean("digits") - 0.03


@pytest.mark.slow
@pytest.mark.parametrize("reduce", [None, *SOME])
def test_broken_clients_alone_harm_nobody(reduce: str | None) -> None:
    """NaN never reaches the mean: such updates are refused, so that FedAvg holds too."""
    assert accuracy("digits", BROKEN, reduce) >= clean("digits") - 0.03


FIFTH = (
    "median",
    "trimmed_mean(share=0.25)",
    "krum(share=0.25)",
    "multi_krum(share=0.25)",
    "geometric_median",
    "bulyan(share=0.2)",
    "norm_clip",
    "bulyan(share=0.2, per='stratum')",
)
"""Against four attackers among twenty: for Bulyan, 4·4 + 3 = 19 are enough."""
ATTACKS = ("signflip(scale=4, share=0.2)", "ipm(epsilon=10, share=0.2)", "gaussian(share=0.2)", "alie(share=0.2)")


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("reduce", FIFTH)
def test_they_go_on_learning_under_every_attack(reduce: str, attack: str) -> None:
    """Far above the mean, which under the first two attacks is at the level of guessing."""
    assert accuracy("digits", attack, reduce, rounds=10) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS[:2])
def test_the_mean_learns_nothing_under_an_attack(attack: str) -> None:
    """Σ = 16 − 4·4 = 0 stands still; 16 − 4·10 = −24 turns around."""
    assert accuracy("digits", attack) < 0.5


def test_running_statistics_are_guarded_too() -> None:
    """A liar's running statistics are a thousand times too large: the mean takes them, the median does not."""
    _, clients, test = world()
    results = {}
    for reduce in (None, "median"):
        net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10), torch.nn.BatchNorm1d(10))
        fed = fs.Federation(net, clients, test, method=fs.chain(reduce=reduce), rounds=2, batch_size=16)
        original = fed._engine.run

        def lying(assignments: Any, recall: Any, original: Any = original) -> Any:
            for update, memory in original(assignments, recall):
                if update.client < 6:
                    update.buffers["2.running_var"].mul_(1e6)
                yield update, memory

        fed._engine.run = lying  # type: ignore[method-assign]
        fed.fit()
        results[reduce] = float(fed.state.buffers["2.running_var"].max())
    assert results[None] > 1e4
    assert results["median"] < 1e3


def test_where_some_may_lie_all_count_alike_unless_said_otherwise() -> None:
    """A liar would claim a billion examples."""
    assert fs.method("fedavg").weight == "examples"
    assert fs.method("fedavg(reduce='geometric_median')").weight == "uniform"
    assert fs.method("fedavg(reduce='geometric_median', weight='examples')").weight == "examples"


@pytest.mark.parametrize("technique", ["ccvr", "feddf(noise=True)", "fedimpro(split=1)"])
def test_what_a_reducer_cannot_guard_is_refused(technique: str) -> None:
    name = technique.partition("(")[0]
    with pytest.raises(fs.UsageError, match=f"'{name}' and reduce='median' cannot be combined"):
        fs.method(f"fedavg(reduce='median') + {technique}")


def test_a_wrong_reducer_gets_one_sentence() -> None:
    with pytest.raises(fs.UsageError, match=r"below 0\.25"):
        fs.method("fedavg(reduce='bulyan(share=0.25)')")
    with pytest.raises(fs.UsageError, match="above 0"):
        fs.method("fedavg(reduce='norm_clip(limit=0)')")
    with pytest.raises(fs.UsageError, match="'model' or 'stratum'"):
        fs.method("""fedavg(reduce="krum(per='layer')")""")
    with pytest.raises(fs.UsageError, match="did you mean 'median'"):
        fs.method("fedavg(reduce='medain')")
    with pytest.raises(fs.UsageError, match="share"):
        fs.method("fedavg(reduce='trimmed_mean(share=0.5)')")


def test_a_method_with_a_reducer_reads_back() -> None:
    method = fs.method("fedavg(reduce='trimmed_mean(share=0.2)') + fedprox")
    assert fs.method(str(method)) == method
    assert fs.method(str(method)).digest == method.digest


def test_the_mean_by_name_is_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    _, clients, test = world()
    ends: list[Tensors] = []
    for reduce in (None, "mean"):
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        torch.nn.init.zeros_(model[1].weight), torch.nn.init.zeros_(model[1].bias)
        fed = fs.Federation(model, clients, test, method=fs.chain(reduce=reduce), rounds=2)
        fed.fit()
        ends.append(fed.state.params)
    assert all(torch.equal(ends[0][n], ends[1][n]) for n in ends[0])


GUARDED = ("scaffold", "feddyn", "fednova")
"""What these take from clients goes through the reducer, or is a median itself."""
AGAINST_ONE = ("median", "multi_krum(share=0.1)", "geometric_median", "bulyan(share=0.1)", "norm_clip")


@cache
def moved(method: str, faults: str | None) -> tuple[Tensors, Tensors]:
    """(what the server remembers, how far its parameters moved) after two rounds of twenty clients on digits."""
    data, clients, test = world()
    model = fs.build_model("mlp(hidden=(8,))", data.input_shape, data.classes, seed=0)
    fed = fs.Federation(model, clients, test, method=method, rounds=2, steps=3, lr=0.1, faults=faults)
    before = dict(fed.state.params)
    fed.fit()
    states = {f"{name}/{n}": t for name, state in fed.state.techniques.items() for n, t in state.items()}
    return states, {n: t - before[n] for n, t in fed.state.params.items()}


def length(tensors: Tensors) -> float:
    return sum(float(t.double().square().sum()) for t in tensors.values()) ** 0.5


@pytest.mark.parametrize(
    "reduce", ["median", "multi_krum(share=0.1)", "geometric_median", "bulyan(share=0.1)", "norm_clip"]
)
@pytest.mark.parametrize("technique", GUARDED)
def test_one_liar_cannot_move_a_guarded_technique(technique: str, reduce: str) -> None:
    """It sends a million times its change and its control variate: the mean follows it, and a reducer does not.

    Neither the parameters nor what the server remembers go further than some times what they go without it.
    """
    liar = "scale(1e6, slots=True, clients=(7,))"
    robust = f'fedavg(reduce="{reduce}") + {technique}'
    (state, change), (honest_state, honest) = moved(robust, liar), moved(robust, None)
    assert length(change) < 3 * length(honest)
    assert length(state) <= 3 * length(honest_state)
    plain_state, plain = moved(technique, liar)
    assert length(plain) > 1000 * length(honest)
    assert length(plain_state) >= 1000 * length(honest_state)


def test_a_guarded_sum_is_the_reducers_times_the_number_of_clients() -> None:
    """c ← c + (n/N)·median(c_k⁺ − c_k), and in the first round c_k = 0 = c; h ← −(α/N)·n·median(Δ_k)."""
    data, clients, test = world()
    for technique in ("scaffold", "feddyn(alpha=0.5)"):
        model = fs.build_model("mlp(hidden=(8,))", data.input_shape, data.classes, seed=0)
        settings: dict[str, Any] = {"rounds": 1, "steps": 3, "participation": 5}
        fed = fs.Federation(model, clients, test, method=f"fedavg(reduce='median') + {technique}", **settings)
        name = technique.partition("(")[0]
        original, seen = fed._engine.run, list[Tensors]()

        def overheard(
            assignments: Any, recall: Any, original: Any = original, seen: Any = seen, name: str = name
        ) -> Any:
            for update, memory in original(assignments, recall):
                seen.append({n: t.clone() for n, t in (update.slots.get(name) or update.delta).items()})
                yield update, memory

        fed._engine.run = overheard  # type: ignore[method-assign]
        fed.fit()
        assert len(seen) == 5
        factor = 5 / 20 * (1 if name == "scaffold" else -0.5)
        for n, found in fed.state.techniques[name].items():
            expected = torch.stack([one[n].double() for one in seen]).numpy()
            np.testing.assert_allclose(found.numpy(), factor * np.median(expected, axis=0), rtol=1e-5, atol=1e-9)


def test_fednova_beside_a_reducer_goes_by_the_median_of_steps() -> None:
    """Δ_k·a/a_k with a_k = τ_k and a their median: 3 of 1, 2, 3, 10 and 10⁶, whoever claims as many."""
    technique = fs.method("fednova").techniques[0]
    steps = (1, 2, 3, 10, 10**6)
    updates = [fs.Update(0, k, "", 1, t, {"x": torch.tensor([float(t)])}) for k, t in enumerate(steps)]
    work = fs.Assignment(0, 0, "", {}, {}, (), (), fs.Work(), 0, "")
    rescaled = technique.rescale_guarded(updates, [1.0] * 5, [work] * 5)
    assert [u.delta["x"].item() for u in rescaled] == pytest.approx([3.0] * 5)
    assert rescaled[2] is updates[2]


def test_sub_models_are_guarded_over_their_holders() -> None:
    """Three of six clients lack the second layer: its control variate is three times the median of the others'."""
    fed = federation(
        staged(),
        archs={"shallow": staged("first", "norm", "relu", "head")},
        arch_of=lambda client: "shallow" if client % 2 else "",
        participation=1.0,
        rounds=2,
        method="fedavg(reduce='median') + scaffold",
    )
    fed.fit()
    assert fed.records[-1].refused == []
    assert set(fed.state.techniques["scaffold"]) == set(fed.state.params)


@pytest.mark.parametrize("engine", ["processes", "vmap", "wire"])
def test_guarded_and_layer_wise_reducers_on_every_engine(engine: str) -> None:
    method = """fedavg(reduce="multi_krum(share=0.3, per='stratum')") + scaffold + fednova"""
    settings: dict[str, Any] = {"participation": 1.0, "method": method, "faults": "signflip(scale=4, share=0.2)"}
    reference = run(**settings)
    if engine == "vmap":
        check_close(run(**settings, engine=engine), reference, 1e-4)
    else:
        check_same(run(**settings, engine=engine), reference)


def trusting(faults: str | None = None, reduce: str = "fltrust", **settings: Any) -> fs.Federation:
    """Twenty clients on digits, and a server with a hundred test examples that it trusts."""
    data, clients, test = world()
    model = fs.build_model("mlp(hidden=(16,))", data.input_shape, data.classes, seed=0)
    root = test.select(torch.arange(100))
    method = settings.pop("method", f'fedavg(reduce="{reduce}")')
    how: dict[str, Any] = {"rounds": 1, "steps": 5, "lr": 0.5, "faults": faults, "trusted": root, **settings}
    return fs.Federation(model, clients, test, method=method, **how)


def test_fltrust_compares_with_training_on_trusted_examples() -> None:
    """Δ_0 is what a visit with the same steps changes on them: Σ TS_k ‖Δ_0‖/‖Δ_k‖ Δ_k / Σ TS_k, worked out again."""
    fed = trusting("signflip(clients=(3,))")
    before, original, seen = dict(fed.state.params), fed._engine.run, list[Any]()

    def overheard(assignments: Any, recall: Any) -> Any:
        for update, memory in original(assignments, recall):
            seen.append(np.concatenate([t.double().numpy().ravel() for t in update.delta.values()]))
            yield update, memory

    fed._engine.run = overheard  # type: ignore[method-assign]
    work, state = fed._work(0), fed.state
    reference = train_reference(fed._server, fed._context, state, work)
    assert reference is not None
    assert reference.steps == 5
    own = np.concatenate([t.double().numpy().ravel() for t in reference.delta.values()])
    fed.fit()
    scores = [max(0.0, float(d @ own) / np.linalg.norm(d) / np.linalg.norm(own)) for d in seen]
    assert scores[3] == 0
    assert min(scores[:3] + scores[4:]) > 0
    parts = [s * np.linalg.norm(own) / np.linalg.norm(d) * d for s, d in zip(scores, seen, strict=True)]
    expected = np.sum(parts, 0) / np.sum(scores)
    moved = np.concatenate([(fed.state.params[n] - p).double().numpy().ravel() for n, p in before.items()])
    np.testing.assert_allclose(moved, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("engine", ["processes", "wire"])
def test_fltrust_has_the_same_bits_on_every_engine_and_after_a_resume(engine: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rounds": 3, "faults": "signflip(scale=4, share=0.6)", "participation": 8}
    settings["reduce"] = "fltrust(per='stratum')"
    whole = trusting(**settings)
    whole.fit()
    stopped = trusting(**settings, out=tmp_path / "run", checkpoint_seconds=0)
    next(iter(stopped.rounds()))
    stopped.save()
    resumed = trusting(**settings, out=tmp_path / "run", checkpoint_seconds=0, resume=True, engine=engine)
    resumed.fit()
    check_same(resumed, whole)


@pytest.mark.slow
def test_fltrust_holds_where_liars_are_the_majority() -> None:
    """As in its paper, with sixty percent: no rule that looks at clients alone can."""
    found = {}
    for reduce in ("fltrust", "median"):
        try:
            found[reduce] = trusting("signflip(scale=4, share=0.6)", reduce, rounds=20).fit().accuracy or 0.0
        except fs.Diverged:
            found[reduce] = 0.0
    assert found["fltrust"] > 0.85 > 0.5 > found["median"]


def test_nobody_is_trusted() -> None:
    """Then nothing changes."""
    fed = trusting("signflip(share=1.0)")
    before = dict(fed.state.params)
    fed.fit()
    assert all(torch.equal(fed.state.params[n], p) for n, p in before.items())


def test_fltrust_beside_other_techniques() -> None:
    for technique in ("fedprox", "fednova", "feddyn", "fedpart(full_rounds=1, rounds_per_stratum=1)", "fedadam"):
        fed = trusting(method=f"fedavg(reduce='fltrust') + {technique}", rounds=3)
        fed.fit()
        assert fed.records[-1].refused == []
    with pytest.raises(fs.UsageError, match="'scaffold' and reduce='fltrust' cannot be combined"):
        fs.method("fedavg(reduce='fltrust') + scaffold")
    with pytest.raises(fs.UsageError, match="needs examples that the server trusts"):
        trusting(trusted=None)
    with pytest.raises(fs.UsageError, match="does not take inputs of shape"):
        trusting(trusted=(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)))
    with pytest.raises(fs.UsageError, match="the trusted data"):
        trusting(trusted=(torch.zeros(3, 1, 8, 8), torch.tensor([0, 12, 1])))
    with pytest.raises(fs.UsageError, match="the trusted data is empty"):
        trusting(trusted=(torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.int64)))


def test_running_statistics_of_trusted_clients() -> None:
    """A liar's are not among them."""
    _, clients, test = world()
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10), torch.nn.BatchNorm1d(10))
    for buffers in ("average", "local", "drop"):
        method = f"fedavg(reduce='fltrust', buffers='{buffers}')"
        fed = fs.Federation(net, clients, test, method=method, rounds=2, trusted=test, faults="signflip")
        fed.fit()
        assert fed.records[-1].refused == []
