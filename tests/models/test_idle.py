"""Layers that never run, and which one is the classifier: in the strata, in schedules, techniques and probes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.diagnosis.evidence import classifier_name as last_stratum
from fedstrata.diagnosis.evidence import stratum_depths
from fedstrata.diagnosis.remedies import RemedyBuilder
from fedstrata.errors import UsageError
from fedstrata.models.strata import classifier, strata
from fedstrata.models.summary import describe_model
from fedstrata.probes.measures import neuron_drift
from fedstrata.runs.reader import SavedRun
from tests.small_runs import fedstrata

INPUTS, HIDDEN, CLASSES = 4, 6, 3


class Net(nn.Module):
    """Two layers and a head; `aux` is defined before or after it, and is what a subclass makes of it."""

    def __init__(self, before: bool = False) -> None:
        super().__init__()
        if before:
            self.aux = nn.Linear(HIDDEN, CLASSES)
        self.first, self.second = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES)
        if not before:
            self.aux = nn.Linear(HIDDEN, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))

    def forward(self, x: Tensor) -> Any:
        return self.head(self.features(x))


class InTraining(Net):
    """The auxiliary head helps in training."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        out: Tensor = self.head(h)
        return out + 0.3 * self.aux(h) if self.training else out


class Both(InTraining):
    """The same, but it runs in evaluation, too, for nothing."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        out, more = self.head(h), self.aux(h)
        return out + 0.3 * more if self.training else out


class Beside(Net):
    """The auxiliary head runs, after the classifier or before it, and what it gives is kept aside."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.early = early

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        if self.early:
            self.aside = self.aux(h)
        out: Tensor = self.head(h)
        if not self.early:
            self.aside = self.aux(h)
        return out


class Two(Net):
    """Both heads give the logits together."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        return self.head(h) + self.aux(h)


class Second(Net):
    """In training there is a second output, as of networks with auxiliary classifiers."""

    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        return (self.head(h), self.aux(h)) if self.training else self.head(h)


class Read(Net):
    """The head's weight is read, but the module is not called."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.features(x), self.head.weight, self.head.bias)


class Skips(nn.Module):
    """A Sequential of which one member is skipped."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(INPUTS, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, CLASSES)]
        self.body = nn.Sequential(*(nn.Linear(*size) for size in sizes))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.body[1](torch.tanh(self.body[0](x))))
        out: Tensor = self.body[3](x)
        return out


def build_seeded(make: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return make()


def frozen() -> Net:
    model: Net = build_seeded(Net)
    model.aux.requires_grad_(False)
    return model


def clients(count: int = 3, rows: int = 12) -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(2)
    return [
        (torch.randn(rows, INPUTS, generator=rng), torch.randint(CLASSES, (rows,), generator=rng)) for _ in range(count)
    ]


def federation(model: nn.Module, **settings: Any) -> fs.Federation:
    data = clients()
    return fs.Federation(model, data, data[0], **{"rounds": 3, "batch_size": 6, "engine": "serial", **settings})


SAMPLE = torch.randn(2, INPUTS, generator=torch.Generator().manual_seed(3))
IDLE: dict[str, Any] = {
    "after": (Net, ["aux"]),
    "before": (lambda: Net(before=True), ["aux"]),
    "frozen": (frozen, ["aux"]),
    "a member of a Sequential": (Skips, ["body.2"]),
    "beside, early": (lambda: Beside(early=True), ["aux"]),
    "beside, late": (lambda: Beside(early=False), ["aux"]),
    "in training only": (InTraining, []),
    "used in training only": (Both, []),
}


@pytest.mark.parametrize("kind", IDLE)
def test_the_classifier_is_the_last_layer_whose_results_are_the_outputs(kind: str) -> None:
    make, idle = IDLE[kind]
    model = build_seeded(make)
    before = copy.deepcopy(model.state_dict())
    grads = [p.requires_grad for p in model.parameters()]
    found = strata(model, SAMPLE)
    assert [s.name for s in found if s.idle] == idle
    last = classifier(found)
    assert last is not None
    assert last.name == ("body.3" if isinstance(model, Skips) else "head")
    assert [p.requires_grad for p in model.parameters()] == grads
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert model.training
    assert "aside" not in vars(model)


@pytest.mark.parametrize("make", [Two, Read])
def test_there_is_no_classifier_where_the_outputs_do_not_come_from_one_layer(make: Any) -> None:
    found = strata(build_seeded(make), SAMPLE)
    assert classifier(found) is None
    assert [s.name for s in found if s.idle] == ([] if make is Two else ["aux"])


def test_scalars_and_norm_layers_may_follow_the_classifier() -> None:
    class Tempered(Net):
        def __init__(self) -> None:
            super().__init__()
            self.temperature, self.norm = nn.Parameter(torch.ones(())), nn.BatchNorm1d(CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.head(self.features(x))) * self.temperature

    last = classifier(strata(Tempered(), SAMPLE[:1]))  # one row cannot be normalised in training, two are tried
    assert last is not None
    assert last.name == "head"


def test_a_model_that_cannot_be_differentiated_is_judged_by_its_calls() -> None:
    class Writes(Net):
        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                raise RuntimeError("no gradients, please")
            out: Tensor = super().forward(x)
            return out

    found = strata(Writes(), SAMPLE)
    assert [s.name for s in found if s.idle] == ["aux"]
    assert [s.name for s in found if s.classifies] == ["head"]


# Runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["serial", "vmap"])
@pytest.mark.parametrize("kind", [kind for kind in IDLE if "training" not in kind])
def test_idle_strata_have_no_turns(kind: str, engine: str) -> None:
    """A cycle is one full round and one for each of the three strata that train; a note names what does not."""
    make, idle = IDLE[kind]
    fed = federation(build_seeded(make), method="fedpart(full_rounds=1, rounds_per_stratum=1)", rounds=5, engine=engine)
    used = ["body.0", "body.1", "body.3"] if kind == "a member of a Sequential" else ["first", "second", "head"]
    records = list(fed.rounds())
    assert [r.active for r in records] == [used, *([name] for name in used), used]
    assert len(fed.notes) == 1
    assert fed.notes[0].startswith("idle layers")
    assert f": {', '.join(idle)};" in fed.notes[0]
    assert fed.summary()["notes"] == list(fed.notes)


class Detached(Net):
    """The head learns on features of a backbone that does not."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.norm, self.way = nn.BatchNorm1d(HIDDEN), way
        del self.aux

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.way != "no_grad"):
            h = self.norm(self.features(x))
        out: Tensor = self.head(h.detach() if self.way == "detach" else h)
        return out


@pytest.mark.parametrize("way", ["no_grad", "detach"])
def test_a_note_does_not_say_that_a_detached_layer_goes_unused(way: str) -> None:
    """The outputs depend on it, and its running statistics move; its parameters do not."""
    fed = federation(build_seeded(lambda: Detached(way)))
    (note,) = fed.notes
    assert note == (
        "idle layers, which no gradient of the outputs reaches, because they never run, their results are not used or "
        "they are detached: first, second; their parameters are not trained"
    )
    before = {**fed.state.params, **fed.state.buffers}
    before = {name: tensor.clone() for name, tensor in before.items()}
    fed.fit()
    after = {**fed.state.params, **fed.state.buffers}
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert {"norm.running_mean", "norm.running_var", "head.weight", "head.bias"} <= moved
    assert not any(name.startswith(("first", "second", "norm.weight", "norm.bias")) for name in moved)


@pytest.mark.parametrize("engine", ["serial", "vmap"])
@pytest.mark.parametrize("kind", ["in training only", "used in training only"])
def test_what_only_training_uses_has_its_turn(kind: str, engine: str) -> None:
    method = "fedpart(full_rounds=0, rounds_per_stratum=1)"
    fed = federation(build_seeded(IDLE[kind][0]), method=method, rounds=4, engine=engine)
    assert [r.active for r in fed.rounds()] == [["first"], ["second"], ["head"], ["aux"]]
    assert fed.notes == ()


def test_what_never_runs_travels_and_is_averaged_as_ever() -> None:
    """Its change is zero, and the run's other numbers are those of a model without it."""
    with_aux, without = build_seeded(Net), build_seeded(Net)
    del without.aux
    one, other = (federation(model, method="fedavg") for model in (with_aux, without))
    pairs = list(zip(one.rounds(), other.rounds(), strict=True))
    assert all(a.loss == b.loss and a.bytes_up > b.bytes_up for a, b in pairs)
    assert torch.equal(one.state.params["aux.weight"], with_aux.aux.weight)


def test_fedpart_is_told_of_a_pattern_that_names_only_what_never_runs() -> None:
    with pytest.raises(UsageError, match="fedpart's strata: none that trains is called 'aux'"):
        federation(build_seeded(Net), method="fedpart(strata=('head', 'aux'))")


def test_layers_that_only_sub_models_run_are_not_idle() -> None:
    """An early exit, which the server's model holds and does not run."""

    class Exits(nn.Module):
        def __init__(self, deep: bool) -> None:
            super().__init__()
            self.first, self.exit = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, CLASSES)
            if deep:
                self.second, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, CLASSES)
            self.deep = deep

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            out: Tensor = self.head(torch.tanh(self.second(x))) if self.deep else self.exit(x)
            return out

    deep, shallow = build_seeded(lambda: Exits(True)), build_seeded(lambda: Exits(False))
    ways: dict[str, Any] = {"archs": {"shallow": shallow}, "arch_of": lambda client: "shallow" if client else ""}
    fed = federation(deep, method="fedpart(full_rounds=0, rounds_per_stratum=1)", rounds=4, **ways)
    assert fed.notes == ()
    assert [r.active for r in fed.rounds()] == [["first"], ["second"], ["head"], ["exit"]]
    assert federation(deep, method="fedavg").notes[0].startswith("idle layers")
    assert ": whole_0.exit;" in federation(deep, method="groupavg", **ways).notes[0]  # groups share nothing


MOON = "moon(mu=1)"


@pytest.mark.parametrize("method", [MOON, "ccvr(samples=5)", "fednlr", "heteroavg + inco", f"{MOON} + fedpart"])
@pytest.mark.parametrize("kind", [kind for kind in IDLE if kind != "frozen" and "training" not in kind])
def test_methods_give_what_they_give_without_the_idle_layer(kind: str, method: str) -> None:
    """Its name apart, a model with a layer that nothing comes of is the model without it."""
    model, bare = build_seeded(IDLE[kind][0]), Net()
    del bare.aux
    names = {"first": "body.0", "second": "body.1", "head": "body.3"} if isinstance(model, Skips) else {}
    for name in ("first", "second", "head"):
        getattr(bare, name).load_state_dict(model.get_submodule(names.get(name, name)).state_dict())
    one, other = (federation(m, method=method, rounds=4) for m in (model, bare))
    one.fit()
    other.fit()
    for name in ("first", "second", "head"):
        mine, theirs = (p.state.params[f"{n}.weight"] for p, n in ((one, names.get(name, name)), (other, name)))
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
    assert [r.loss for r in one.records] == pytest.approx([r.loss for r in other.records], abs=1e-6)


@pytest.mark.parametrize("make", [InTraining, Both])
@pytest.mark.parametrize("method", [MOON, "ccvr(samples=5)", "fednlr"])
def test_methods_work_beside_a_head_of_training(make: Any, method: str) -> None:
    federation(build_seeded(make), method=method).fit()


@pytest.mark.parametrize("make", [Two, Read])
def test_who_needs_a_classifier_asks_for_a_name(make: Any) -> None:
    with pytest.raises(UsageError, match=r"no single last layer was found in this model: name .*moon\(stage=…\)"):
        federation(build_seeded(make), method="moon")
    federation(build_seeded(make), method="moon(stage='second')").fit()
    with pytest.raises(UsageError, match=r"no single last layer was found in this model: let it end .*nn\.Linear"):
        federation(build_seeded(make), method="ccvr")


@pytest.mark.parametrize(("make", "when"), [(Net, "training"), (InTraining, "evaluation")])
def test_moon_is_refused_a_stage_that_does_not_run_before_anything_is_trained(make: Any, when: str) -> None:
    with pytest.raises(UsageError, match=f"moon's stage: the model's module 'aux' does not run in {when}"):
        federation(build_seeded(make), method="moon(stage='aux')")
    federation(build_seeded(make), method="moon(stage='aux', mu=0)").fit()


def test_of_a_second_output_in_training_the_first_is_meant() -> None:
    """In evaluation the model returns one tensor."""
    run = federation(build_seeded(Second))
    assert run.fit().accuracy is not None


# What is measured and told ----------------------------------------------------------------------------------


class Holder(nn.Module):
    """A last stage that holds a layer and passes everything on."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = nn.Linear(CLASSES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return x


def staged_model() -> nn.Sequential:
    parts = [("first", nn.Linear(INPUTS, HIDDEN)), ("act", nn.Tanh()), ("second", nn.Linear(HIDDEN, HIDDEN))]
    model = nn.Sequential()
    for name, part in [*parts, ("head", nn.Linear(HIDDEN, CLASSES)), ("rest", Holder())]:
        model.add_module(name, part)
    return model


def test_probes_leave_idle_layers_out_and_find_the_features_before_the_classifier() -> None:
    fed = federation(
        build_seeded(staged_model), probe="divergence proxy weightdiv cosine gradnorm drift embedding", rounds=2
    )
    fed.fit()
    used = ["first", "second", "head"]
    for row in fed.probes:
        assert all(list(row[name]) == used for name in ("divergence", "proxy", "weightdiv", "cosine"))
        assert list(row["gradnorm"]["alone"]) == used
        assert row["drift"]["held"].keys() <= {"first", "act", "second"}
        assert "missed" not in row
    assert len(fed.probes[-1]["embedding"]["points"]) == 36


def test_the_embedding_is_of_any_models_features() -> None:
    fed = federation(build_seeded(Net), probe="embedding", rounds=1)
    fed.fit()
    assert "embedding" in fed.probes[-1]
    fed = federation(build_seeded(Two), probe="embedding", rounds=1)
    fed.fit()
    assert "no single last layer" in fed.probes[-1]["missed"]["embedding"]


def test_neurons_are_those_below_the_classifier() -> None:
    model = build_seeded(staged_model)
    x = torch.randn(8, INPUTS)
    drift = neuron_drift(model, [model], [{0}], x, torch.arange(8) % 2)
    assert drift.held.keys() | drift.missing.keys() <= {"first", "act", "second"}


def test_a_norm_layer_at_the_beginning_is_measured_too() -> None:
    model = nn.Sequential(nn.LayerNorm(INPUTS), nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, CLASSES))
    x = torch.randn(8, INPUTS)
    drift = neuron_drift(model, [model], [{0, 1}], x, torch.arange(8) % 2)
    assert list(drift.held) == ["0", "1"]


def test_facts_and_files_tell_which_layers_are_idle(tmp_path: Path) -> None:
    federation(build_seeded(Net), out=tmp_path / "run", probe="divergence", rounds=1).fit()
    facts = json.loads((tmp_path / "run" / "facts.json").read_text())
    marks = {row["name"]: (row["idle"], row["classifies"]) for row in facts["model"]["strata"]}
    assert marks == {"first": (False,) * 2, "second": (False,) * 2, "head": (False, True), "aux": (True, False)}
    assert "# idle layers" in (tmp_path / "run" / "run.toml").read_text()


def test_flops_are_those_of_one_pass() -> None:
    """Looking at what runs takes several; the count of one example's forward pass must not know of them."""
    found = describe_model(build_seeded(Net), (INPUTS,))
    flops = {"first": 2 * INPUTS * HIDDEN, "second": 2 * HIDDEN * HIDDEN, "head": 2 * HIDDEN * CLASSES, "aux": 0}
    assert {s.name: s.flops for s in found.strata} == flops


def test_the_command_shows_a_model_of_the_zoo_without_idle_layers(capsys: pytest.CaptureFixture[str]) -> None:
    assert fedstrata("model", "show", "cnn2", "--input", "1,8,8") == 0
    assert "idle" not in capsys.readouterr().out


class Chooses(Net):
    """Which of two layers runs depends on the row."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        return torch.cat([(self.aux if row.sum() > 0 else self.head)(h[i : i + 1]) for i, row in enumerate(x)])


class ChoosesOnce(Net):
    """Which of two layers runs depends on the batch."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.aux if x.sum() > 0 else self.head)(self.features(x))
        return out


@pytest.mark.parametrize("make", [Chooses, ChoosesOnce])
def test_what_only_some_inputs_use_is_not_idle(make: Any) -> None:
    x = torch.ones(2, INPUTS) * torch.tensor([[1.0], [-2.0]])
    found = strata(build_seeded(make), x)
    assert not any(s.idle for s in found)
    assert classifier(found) is None
    x, y = clients()[0]
    data = [(x.abs(), y), (-x.abs(), y)]  # the first client's inputs alone would not show it
    assert fs.Federation(build_seeded(make), data, engine="serial").notes == ()


class Experts(Net):
    """One of two layers for each row, or for the batch, by the first number; then the head for all."""

    def __init__(self, split: int) -> None:
        super().__init__()
        self.split, self.aux = split, nn.Linear(HIDDEN, HIDDEN)

    def features(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return torch.tanh(
            torch.cat([self.route(*both) for both in zip(x.split(self.split), h.split(self.split), strict=True)])
        )

    def route(self, x: Tensor, h: Tensor) -> Tensor:
        out: Tensor = (self.aux if x[0, 0] > 0 else self.second)(h)
        return out


class Sometimes(Experts):
    """But for some inputs an expert adds to what the head gives."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        out: Tensor = self.head(h)
        return out + self.aux(h)[:, :CLASSES] if x[0, 0] > 0 else out


class RowByRow(Net):
    """The head is called for every row: there is no one place where the features of all are."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.head(row) for row in self.features(x).split(1)])


class Unrolled(Net):
    """The head is called at every step, and the last one counts."""

    def forward(self, x: Tensor) -> Tensor:
        steps = [self.head(self.features(x * t)) for t in range(3)]
        return steps[-1]


def routed_rows() -> Tensor:
    """Only the last row goes to the second expert."""
    x = SAMPLE[:1].repeat(4, 1)
    x[:, 0] = torch.tensor([-1.0, -1.0, -1.0, 1.0])
    return x


@pytest.mark.parametrize("split", [1, 100])
def test_the_classifier_of_a_mixture_of_experts_comes_after_all_of_them(split: int) -> None:
    """An expert that only a later row uses is called for the first time after the head was."""
    model, x = build_seeded(lambda: Experts(split)), routed_rows()
    found = strata(model, x)
    assert not any(s.idle for s in found)
    assert [s.name for s in found if s.classifies] == ["head"]
    data = [(rows.repeat(6, 1), torch.arange(6) % CLASSES) for rows in x.split(1)]
    for method in ("moon", "ccvr(samples=5)"):
        fs.Federation(model, data, method=method, rounds=2, engine="serial").fit()


def test_a_layer_is_the_last_one_only_if_it_is_so_for_all_inputs() -> None:
    found = strata(build_seeded(lambda: Sometimes(100)), routed_rows())
    assert not any(s.idle for s in found)
    assert classifier(found) is None


def test_the_last_call_of_the_classifier_gives_all_outputs() -> None:
    """What goes into it is looked at there: in a model that calls it row by row, that would be the last row's."""
    assert classifier(strata(build_seeded(RowByRow), SAMPLE)) is None
    assert [s.name for s in strata(build_seeded(Unrolled), SAMPLE) if s.classifies] == ["head"]


def saved_run(*rows: dict[str, Any]) -> SavedRun:
    facts = {"model": {"strata": [{"stage": row["name"], **row} for row in rows], "fields": []}}
    return SavedRun("run", {"rounds": 5}, (), (), facts)


def test_a_diagnosis_knows_the_classifier() -> None:
    """From what a run tells of it; from a run that was made before it was told, as the last stratum."""
    first, head, aux = {"name": "first"}, {"name": "head"}, {"name": "aux"}
    assert last_stratum(saved_run(first, head)) == "head"
    assert last_stratum(saved_run()) is None
    marks: list[dict[str, Any]] = [{"idle": False, "classifies": False}, {"idle": False, "classifies": True}]
    saved = saved_run(first | marks[0], head | marks[1], aux | {"idle": True, "classifies": False})
    assert last_stratum(saved) == "head"
    assert stratum_depths(saved) == {"first": 0, "head": 1}
    remedy = RemedyBuilder(saved).add_fedpart("why")
    assert remedy is not None
    assert remedy.settings["rounds"] == 5 + 2 * 2  # the idle layer has no turn
    assert last_stratum(saved_run(first | marks[0], aux | marks[0])) is None  # several layers give the outputs
