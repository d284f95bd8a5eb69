"""Adapters on a frozen base: the same bits on every engine, only adapters on the wire, no other base after a resume."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tests.tiny_transformers import LORA, adapted_texts, minilm, write_bert, write_texts  # isort: skip  # skips without peft

import fedstrata as fs
from fedstrata import wire
from fedstrata.core.low_rank import adapters_of
from fedstrata.errors import UsageError
from fedstrata.models.adapted import base_digest, base_names
from fedstrata.run import open_run, resume_run
from fedstrata.runs import checkpoint
from tests.engines.worlds import check_same, records, tensors
from tests.small_runs import config


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return adapted_texts(tmp_path_factory.mktemp("world"))


def run(world: dict[str, Any], out: Path | None = None, **changes: Any) -> fs.Federation:
    made = open_run(config(**{**world, **changes}), out)
    made.fit()
    return made


@pytest.fixture(scope="module")
def reference(world: dict[str, Any]) -> fs.Federation:
    """One client after the other."""
    return run(world, engine="serial")


def sizes(fed: fs.Federation) -> tuple[int, int]:
    """Bytes of what trains, and of the frozen base."""
    base = base_names(fed.model)
    params = dict(fed.model.named_parameters())
    return sum(p.nbytes for n, p in params.items() if n not in base), sum(params[n].nbytes for n in base)


def test_something_is_learnt(world: dict[str, Any]) -> None:
    fed = run(world, engine="serial", method="fedavg", optimizer="adam", lr=0.02, rounds=8, participation=4)
    assert fed.records[-1].accuracy > fed.records[0].accuracy + 0.2
    assert fed.records[-1].accuracy > 0.6


@pytest.mark.parametrize("engine", ["wire", "processes"])
def test_the_same_bits(world: dict[str, Any], reference: fs.Federation, engine: str) -> None:
    check_same(run(world, engine=engine, workers=2 if engine == "processes" else 1), reference)


def test_only_adapters_travel(world: dict[str, Any]) -> None:
    """Up and down, in the first round as in the last: the numbers that train, and a head that names them."""
    fed = run(world, engine="serial", method="fedavg")
    own, base = sizes(fed)
    assert base > 5 * own
    for record in fed.records:
        assert len(record.clients) == 3
        assert 3 * own < record.bytes_up < 3 * (own + 1500)
        assert 3 * own < record.bytes_down < 3 * (own + 3500)
        assert record.active == [s.name for s in fed.strata if s.low_rank or s.classifies]


def test_full_training_of_the_same_model_sends_it_all(world: dict[str, Any]) -> None:
    """And it takes more operations and more memory: the base needs neither gradients nor their products."""
    adapted = run(world, engine="serial", method="fedavg", rounds=1)
    full = run({**world, "adapter": None}, engine="serial", method="fedavg", rounds=1)
    assert full.records[0].bytes_up > 5 * adapted.records[0].bytes_up
    assert full.records[0].flops > adapted.records[0].flops
    assert full.records[0].training_memory > adapted.records[0].training_memory


def test_the_base_stays_as_it_was(world: dict[str, Any]) -> None:
    before = open_run(config(**world, engine="serial"), None)
    start = tensors(before)
    after = run(world, engine="wire")
    assert before.state.base == after.state.base == base_digest(after.model)
    end, base = tensors(after), base_names(after.model)
    moved = {n.rpartition("/")[2] for n in start if n in end and not torch.equal(start[n], end[n])}
    assert moved.isdisjoint(base)
    assert any("lora_B" in n for n in moved)


def test_techniques_keep_no_state_of_the_base(world: dict[str, Any], reference: fs.Federation) -> None:
    assert reference.state.techniques["scaffold"].keys().isdisjoint(base_names(reference.model))


def test_a_message_lacks_the_base_and_is_put_together_in_order(world: dict[str, Any]) -> None:
    fed = open_run(config(**world, engine="serial"), None)
    asked = fed._server.open(fed.state, [0], fed._work(0))[0]
    message = wire.encode(asked)
    with pytest.raises(wire.NotHeld):
        wire.decode_assignment(message)
    whole = fed._context.in_order(wire.decode_assignment(message, None, fed._context.base))
    assert list(whole.params) == list(asked.params)
    assert all(torch.equal(whole.params[n], asked.params[n]) for n in asked.params)
    assert set(whole.to_send) == set(asked.params) - base_names(fed.model)
    lacking = wire.decode_assignment(message, None, lambda arch: dict(list(fed._context.base(arch).items())[1:]))
    with pytest.raises(UsageError, match="does not bring the parameters of this model"):
        fed._context.in_order(lacking)


def test_a_base_that_a_technique_has_changed_travels(world: dict[str, Any]) -> None:
    """As a residual in the base would: its names go down, once, to whoever does not hold them."""
    fed = open_run(config(**{**world, "method": "fedavg"}, engine="serial"), None)
    weight = adapters_of(fed.strata)[0].weight
    changed = fs.chain(Residual(weight=weight))
    runs = {}
    for engine in ("serial", "wire"):
        given = fed._given
        runs[engine] = fs.Federation(*given[:3], method=changed, rounds=3, engine=engine, batch_size=5, lr=0.2)
        runs[engine].fit()
    check_same(runs["wire"], runs["serial"])
    first, second, third = (record.bytes_down for record in runs["serial"].records)
    size = fed.state.params[weight].nbytes
    assert second > first + 4 * size
    assert third > first + 4 * size
    assert not torch.equal(runs["wire"].state.params[weight], fed.state.params[weight])


@dataclass(frozen=True, kw_only=True)
class Residual(fs.Technique):
    """Adds a little to a weight of the base in every round."""

    name: ClassVar[str] = "residual"
    weight: str

    def apply(self, state: Any, delta: Any, round: Any) -> Any:
        return {**delta, self.weight: torch.full_like(round.params[self.weight], 0.01)}, state


def test_sites_with_fewer_blocks_and_lower_ranks(world: dict[str, Any]) -> None:
    """What a client lacks is not sent, nor is the base; a block that some hold is averaged over these."""
    name = world["model"].removesuffix(")")
    archs = f"{name}, blocks=1) + lora(r=1, targets='query,value')*2; {world['model']} + {LORA}*2"
    changes = {"model": "", "adapter": None, "archs": archs, "method": "hetlora", "participation": 4, "rounds": 2}
    serial, wired = (run(world, engine=engine, **changes) for engine in ("serial", "wire"))
    check_same(wired, serial)
    own, _ = sizes(serial)
    numbers = 4 * (1 * 2 * 2 * 16 + 3 * 17)  # of the low ones: A and B of two layers, and the head
    assert 2 * (own + numbers) < serial.records[1].bytes_up < 2 * (own + numbers) + 4 * 1500
    assert (
        serial._server.owners(next(n for n in serial.state.params if "layer.1.attention.self.query.lora_A" in n)) == 2
    )
    assert len(serial.records[1].arch_accuracy) == 2
    for wrong in (0, 3):
        with pytest.raises(UsageError, match=f"blocks must be from 1 to the 2 that it has, not {wrong}"):
            fs.build_model(f"{name}, blocks={wrong})", (8,), 3)


def test_sites_that_share_with_their_own_depth_alone(world: dict[str, Any]) -> None:
    """Under `groupavg` models of several inputs stand side by side, each with a base that never travels."""
    archs = f"{world['model'].removesuffix(')')}, blocks=1) + {LORA}; {world['model']} + {LORA}"
    changes = {"model": "", "adapter": None, "archs": archs, "method": "groupavg", "participation": 4, "rounds": 2}
    serial, wired = (run(world, engine=engine, **changes) for engine in ("serial", "wire"))
    check_same(wired, serial)
    own, base = sizes(serial)
    assert len(base_digest(serial.model)) == 16
    assert all(r.bytes_down < 4 * (own + 3500) < 2 * base for r in serial.records)


def test_resumed(world: dict[str, Any], reference: fs.Federation, tmp_path: Path) -> None:
    fed = open_run(config(**world, engine="serial", checkpoint_seconds=0.0), tmp_path / "run")
    rounds = fed.rounds()
    next(rounds)
    rounds.close()
    again = resume_run(tmp_path / "run", engine="wire")
    again.fit()
    check_same(again, reference)
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["round"] == 3


def test_not_resumed_on_another_base(world: dict[str, Any], tmp_path: Path) -> None:
    """The model's files were replaced by others of the same form: refused, and nothing is written."""
    bert = write_bert(tmp_path / "bert")
    fed = open_run(
        config(**{**world, "model": f"hf('{bert}')"}, engine="serial", checkpoint_seconds=0.0), tmp_path / "run"
    )
    rounds = fed.rounds()
    next(rounds)
    rounds.close()
    before = checkpoint.paths(tmp_path / "run" / "checkpoints")
    write_bert(bert, seed=1)
    with pytest.raises(UsageError, match=r"was run with another base beneath its adapters: [0-9a-f]{16} instead of"):
        resume_run(tmp_path / "run")
    assert checkpoint.paths(tmp_path / "run" / "checkpoints") == before


def test_models_of_ours_with_adapters_train_many_at_once() -> None:
    """A perceptron's adapters by torch.func, too: as one client after the other, up to rounding."""
    from tests.engines.worlds import check_close

    data = fs.load_dataset("digits")
    parts = fs.partition(data.labels, "iid", 3, seed=0)
    made = []
    for engine in ("serial", "vmap"):
        model = fs.adapt(fs.build_model("mlp(hidden=(16, 16))", data.input_shape, 10, seed=0), "lora(r=2)", seed=1)
        fed = fs.Federation(model, data.train.split(parts), data.test, rounds=2, engine=engine, lr=0.1)
        fed.fit()
        made.append(fed)
    check_close(made[1], made[0])
    assert records(made[0])[0]["active"] == ["fc1.linear", "fc2.linear", "head"]


def test_a_class_per_token(tmp_path: Path) -> None:
    """Words of three kinds, told apart at every position; padding does not count, whatever stands there."""
    bert, texts = write_bert(tmp_path / "bert"), write_texts(tmp_path / "texts.tsv", rows=60)
    whole: Any = fs.load_dataset(f"text(path='{texts}')", tokenizer=str(bert)).train.x
    ids, mask = whole.tensors["input_ids"], whole.tensors["attention_mask"]
    y = (ids % 3).masked_fill(mask == 0, -100)
    found = []
    for noise in (0, 1):
        shown = {"input_ids": torch.where(mask == 0, noise * 7, ids), "attention_mask": mask}
        clients = [({n: t[rows] for n, t in shown.items()}, y[rows]) for rows in torch.arange(len(y)).chunk(3)]
        model = fs.build_model(f"hf('{bert}', head='tokens', dropout=0)", dict(whole.shape[1:]), 3, seed=0)
        fs.adapt(model, "lora(r=4)", seed=1)
        settings: dict[str, Any] = {"task": "next_token", "rounds": 4, "lr": 0.02, "optimizer": "adam", "batch_size": 5}
        found.append(fs.Federation(model, clients, clients[0], engine="serial", **settings).fit().records)
    first, last = (record.metrics["accuracy"] or 0.0 for record in (found[0][0], found[0][-1]))
    assert last > max(first, 0.6)
    assert [r.loss for r in found[1]] == pytest.approx([r.loss for r in found[0]], rel=1e-4)


def test_probes_measure_adapters(world: dict[str, Any], tmp_path: Path) -> None:
    fed = run(world, tmp_path / "run", engine="serial", method="fedavg", probe="all", rounds=2)
    row = fed.probes[-1]
    adapted = {s.name for s in fed.strata if s.low_rank or s.classifies}
    assert set(row["cosine"]) == set(row["weightdiv"]) == adapted
    assert {"cka", "gradnorm", "drift", "visits", "exchange", "rates"} <= row.keys()
    assert (tmp_path / "run" / "probes.jsonl").exists()
    page = fed.report(tmp_path / "page.html").read_text()
    assert "attention.self.query" in page


@pytest.mark.slow
def test_the_real_minilm(tmp_path: Path) -> None:
    """One round of two clients: 74,498 numbers each way, of 22.8 million."""
    texts = write_texts(tmp_path / "texts.tsv", rows=30)
    settings = {"model": f"hf('{minilm()}')", "adapter": "lora(r=8, alpha=16, targets='query,value')", "clients": 2}
    settings |= {"dataset": f"text(path='{texts}')"}
    fed = open_run(config(**settings, partition="iid", rounds=1, engine="serial", method="fedavg"), None)
    fed.fit()
    own, base = sizes(fed)
    assert own == 4 * (6 * 2 * 2 * 8 * 384 + 3 * 384 + 3)
    assert base > 90_000_000
    record = fed.records[0]
    assert len(record.clients) * own < record.bytes_up < len(record.clients) * (own + 8000)
    assert record.bytes_down < len(record.clients) * (own + 12_000)
