"""Faults in clients' data: what a client sees, batch by batch, of the same examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.core.parts import Parts
from fedstrata.faults import parse_faults
from fedstrata.faults.fault import FaultSetting
from fedstrata.faults.plan import choose_clients
from fedstrata.tasks.registry import build_task
from tests.engines.worlds import federation, flat, pictures, points, run

X = torch.arange(24.0).view(6, 4)
Y = torch.tensor([0, 1, 2, 3, 0, 1])
LAST = torch.tensor([5, 0, 3])


def spoilt(fault: str, x: Any = X, y: Tensor = Y, task: str = "classification", classes: int = 4) -> Any:
    """A client's examples under a fault."""
    (made,) = parse_faults(fault)
    setting = FaultSetting(build_task(task), x, lambda: classes, seed=3)
    made.check(setting)
    return made.spoil(fs.TensorExamples(x, y), 7, setting)


def test_labels() -> None:
    """C − 1 − c; c + 1, and 0 for the last; or the client's own labels in another order, the same at every look."""
    assert spoilt("labelflip").batch(LAST)[1].tolist() == [2, 3, 0]
    assert spoilt("labelflip").labels().tolist() == [3, 2, 1, 0, 3, 2]
    assert spoilt("labelflip('next')").labels().tolist() == [1, 2, 3, 0, 1, 2]
    shuffled = spoilt("labelflip('shuffle')")
    assert shuffled.labels().tolist() != Y.tolist()
    assert sorted(shuffled.labels().tolist()) == sorted(Y.tolist())
    assert shuffled.batch(LAST)[1].tolist() == shuffled.labels()[LAST].tolist()
    assert torch.equal(shuffled.batch(LAST)[0], X[LAST])
    assert spoilt("labelflip", y=Y % 2, task="binary", classes=2).labels().tolist() == [1, 0, 1, 0, 1, 0]
    with pytest.raises(fs.UsageError, match="'labelflip' needs labels of classes, and the task 'regression' has none"):
        spoilt("labelflip", task="regression")


def test_inputs() -> None:
    assert torch.equal(spoilt("inputs(gain=255)").batch(LAST)[0], X[LAST] * 255)
    assert torch.equal(spoilt("inputs(gain=-1, offset=1)").batch(LAST)[0], 1 - X[LAST])
    assert spoilt("inputs(gain=0, offset=2)").batch(LAST)[0].unique().tolist() == [2.0]
    assert spoilt("inputs").labels().tolist() == Y.tolist()
    many = fs.TensorExamples(torch.zeros(10_000, 4), torch.zeros(10_000, dtype=torch.int64))
    (fault,) = parse_faults("inputs(gain=1, noise=0.5)")
    torch.manual_seed(0)
    noise = fault.spoil(many, 0, FaultSetting(build_task("classification"), X, lambda: 1)).batch(torch.arange(10_000))
    assert abs(noise[0].std().item() - 0.5) < 0.01
    assert X.equal(torch.arange(24.0).view(6, 4))  # nobody wrote into the examples


def test_missing_inputs() -> None:
    """Half of four columns, the same in every row, others for other clients."""
    x, _ = spoilt("missing(rate=0.5)").batch(torch.arange(6))
    lost = x.isnan()
    assert lost.sum(1).tolist() == [2] * 6
    assert (lost == lost[0]).all()
    assert torch.equal(x[~lost], X[~lost])
    filled, _ = spoilt("missing(rate=0.5, fill=-9)").batch(torch.arange(6))
    assert torch.equal(filled == -9, lost)
    assert torch.equal(spoilt("missing(rate=0)").batch(LAST)[0], X[LAST])
    fed = run(participation=1.0, rounds=1, faults="missing(clients=(2,))")
    assert fed.records[0].refused == [{"client": 2, "why": "it holds NaN or infinite numbers"}]


def test_a_backdoor() -> None:
    """Half of the examples bear a mark of two pixels, and the label of the target; the others are as they are."""
    x, y = torch.rand(10, 3, 5, 5), torch.arange(10) % 4
    seen, labels = spoilt("backdoor(target=2, size=2, value=7)", x, y).batch(torch.arange(10))
    marked = seen[:, 0, 4, 4] == 7
    assert marked.sum() == 5
    assert (seen[marked][:, :, 3:, 3:] == 7).all()
    assert (labels[marked] == 2).all()
    assert torch.equal(labels[~marked], y[~marked])
    assert torch.equal(seen[~marked], x[~marked])
    seen[:, :, 3:, 3:] = x[:, :, 3:, 3:]
    assert torch.equal(seen, x)
    table, _ = spoilt("backdoor(size=1, poison=1, value=-5)").batch(LAST)
    assert torch.equal(table[:, :3], X[LAST][:, :3])
    assert table[:, 3].tolist() == [-5.0] * 3
    (fault,) = parse_faults("backdoor(target=2, size=2, value=7)")
    test = fault.tell_success(fs.TensorExamples(x, y), FaultSetting(build_task("classification"), x, lambda: 4))
    assert test is not None
    assert len(test) == int((y != 2).sum())
    tried, wanted = test.batch(torch.arange(len(test)))
    assert (tried[:, :, 3:, 3:] == 7).all()
    assert wanted.tolist() == [2] * len(test)
    assert torch.equal(tried[:, :, :3], x[y != 2][:, :, :3])


def test_inputs_of_several_parts() -> None:
    """Real numbers are hit, tokens are not; where there are only tokens, nothing can be."""
    parts = Parts({"tokens": torch.arange(12).view(6, 2), "numbers": X})
    seen, _ = spoilt("inputs(gain=2)", parts).batch(LAST)
    assert torch.equal(seen.tensors["numbers"], 2 * X[LAST])
    assert torch.equal(seen.tensors["tokens"], parts.tensors["tokens"][LAST])
    for fault in ("inputs", "missing", "backdoor"):
        with pytest.raises(fs.UsageError, match="these are whole ones"):
            spoilt(fault, X.long())


def test_several_faults_at_one_client() -> None:
    """From left to right: (2x + 1)·10, and labels that are moved on twice."""
    clients = flat(8, 8)
    faults = "inputs(2, 1, clients=(1,)) + inputs(10, clients=(1,)) + labelflip('next', clients=(1,)) "
    fed = federation(clients=clients, participation=1.0, faults=f"{faults} + labelflip('next', clients=(1,))")
    x, y = fed.clients[1].batch(torch.arange(8))
    assert torch.equal(x, (clients[1][0] * 2 + 1) * 10)
    assert torch.equal(y, (clients[1][1] + 2) % 4)
    assert torch.equal(fed.clients[0].batch(torch.arange(8))[0], clients[0][0])
    assert [len(data) for data in fed.clients[-2:]] == [8, 8]


def test_any_form_of_data() -> None:
    """A dataset, a function that makes one, images that are augmented, held-out examples: seen wrongly, all of them."""

    class Own(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, row: int) -> Any:
            return torch.full((6,), row / 12), row % 4

    for data in (Own(), lambda: points(12, 1)):
        clients = [points(12, 0), data, points(12, 2)]
        honest, hit = (run(clients=clients, participation=1.0, faults=f) for f in (None, "labelflip(clients=(1,))"))
        assert any(not torch.equal(hit.state.params[n], p) for n, p in honest.state.params.items())
    net = nn.Sequential(nn.Flatten(), nn.Linear(108, 4))
    clients = [pictures(12, seed) for seed in range(3)]
    settings = {"augment": "flip", "holdout": 0.25, "faults": "inputs(gain=255, clients=(1,))", "participation": 1.0}
    fed = run(net, clients, pictures(20, 9), **settings)
    assert fed.client_tests is not None
    own = fed.client_tests[1]
    assert own is not None
    assert own.batch(torch.arange(1))[0].max() <= 1  # what a client is judged by is as it is


def test_who_is_hit() -> None:
    """The share, rounded down, but one at least; each fault another client; named ones, and others than these."""
    faults = parse_faults("signflip(share=0.3) + nan(share=0.01) + labelflip(clients=(4, 2)) + drop(share=0)")
    hit = choose_clients(faults, 12, range(12), seed=0)
    assert [len(clients) for clients in hit] == [3, 1, 2, 0]
    assert len(frozenset().union(*hit)) == 6
    assert hit[2] == {2, 4}
    again, other = (choose_clients(faults, 12, range(12), seed=seed) for seed in (0, 1))
    assert hit == again != other
    assert choose_clients(faults[:1], 12, [c for c in range(12) if c not in (2, 4)], seed=0)[0] == hit[0]
    assert all(
        c % 2 for c in choose_clients(faults[:1], 12, range(1, 12, 2), seed=0)[0]
    )  # who has no examples is not hit
    several = choose_clients(parse_faults("signflip(share=0.7) + nan(share=0.7)"), 10, range(10), seed=0)
    assert [len(clients) for clients in several] == [7, 7]
    assert several[0] | several[1] == {*range(10)}  # nobody is hit twice as long as somebody is not hit at all
    many = choose_clients(parse_faults("signflip(share=0.29)"), 100, range(100), seed=0)
    assert len(many[0]) == 29


def test_how_far_a_backdoor_got() -> None:
    """The share of other classes' test examples that are taken for the target once they bear the mark."""
    data = fs.load_dataset("digits")
    parts = fs.partition(data.train.labels(), "iid", clients=5, seed=0)
    clients = [data.train.select(part) for part in parts]
    found = {}
    for faults in ("backdoor(target=3, poison=0.0, share=0.2)", "backdoor(target=3, share=0.4)"):
        model = fs.build_model("mlp(hidden=(32,))", data.input_shape, data.classes, seed=0)
        fed = fs.Federation(model, clients, data.test, rounds=6, epochs=3, lr=0.3, eval_every=3, faults=faults)
        fed.fit()
        assert [sorted(record.attack_success) for record in fed.records] == [[], [], ["backdoor"]] * 2
        found[faults] = fed.records[-1].attack_success["backdoor"]
        with torch.no_grad():
            x, y = data.test.batch(torch.arange(len(data.test)))
            others = x[y != 3].clone()
            others[:, :, -3:, -3:] = 1.0
            mine = (fed.model(others).argmax(1) == 3).double().mean().item()
        assert fed.records[-1].attack_success["backdoor"] == pytest.approx(mine, abs=1e-9)
    clean, hit = found.values()
    assert clean is not None
    assert hit is not None
    assert clean < 0.3 < 0.9 < hit


def test_facts_show_what_clients_see() -> None:
    """Inputs times 255: so is their deviation on the client's card, whoever else is hit."""
    plain, spoilt = (federation(faults=faults)._facts()["cards"] for faults in (None, "inputs(255.0, clients=(0,))"))
    assert spoilt[0]["std"] == pytest.approx([255 * x for x in plain[0]["std"]], rel=1e-3)
    assert spoilt[1] == plain[1]
