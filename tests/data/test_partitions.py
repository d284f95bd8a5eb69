"""Partitions: every example once, sizes as asked, the same clients for the same seed, and bounded work."""

from __future__ import annotations

import sys
import time
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedstrata.core.spec import signature, summary
from fedstrata.data.partitions import PARTITIONS, describe, dirichlet_shares, partition
from fedstrata.errors import UsageError

DIGITS = torch.arange(1437) % 10  # about as many as the digits dataset has to train on

quick = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def label_sets(draw: st.DrawFn) -> np.ndarray:
    """1 to 8 classes of 1 to 60 examples each, numbered with gaps, in mixed order: often very skewed."""
    sizes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=8))
    values = np.repeat(np.arange(len(sizes)) * draw(st.sampled_from([1, 7])), sizes)
    return np.random.default_rng(draw(st.integers(0, 99))).permutation(values)


def check_parts(parts: list[Tensor], clients: int, examples: int) -> None:
    assert len(parts) == clients
    assert all(part.dtype == torch.int64 and part.dim() == 1 and len(part) for part in parts)
    assert all(bool((part.diff() > 0).all()) for part in parts)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(examples))


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def holdings(parts: list[Tensor], labels: np.ndarray) -> list[int]:
    return [len(np.unique(labels[part.numpy()])) for part in parts]


def entropy(parts: list[Tensor], labels: Tensor) -> float:
    """Mean over the clients of the entropy of their classes."""
    shares = describe(parts, labels, 10).counts.double()
    return float(torch.special.entr(shares / shares.sum(0)).sum(0).mean())


# -- properties


@quick
@given(label_sets(), st.data(), st.integers(0, 2**63))
def test_iid_is_exhaustive_and_even(labels: np.ndarray, data: st.DataObject, seed: int) -> None:
    clients = data.draw(st.integers(1, len(labels)))
    parts = partition(labels, "iid", clients, seed)
    check_parts(parts, clients, len(labels))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert same(parts, partition(labels, "iid", clients, seed))


@quick
@given(label_sets(), st.integers(1, 6), st.sampled_from([0.05, 0.5, 10.0]), st.integers(0, 99))
def test_dirichlet_is_exhaustive_and_keeps_min_size(labels: np.ndarray, clients: int, alpha: float, seed: int) -> None:
    assume(clients <= len(labels))
    spec = f"dirichlet(alpha={alpha}, min_size=1)"
    try:
        parts = partition(labels, spec, clients, seed)
    except UsageError:
        assert clients > 1, "one client always gets everything"
        return
    check_parts(parts, clients, len(labels))
    assert same(parts, partition(labels, spec, clients, seed))


@quick
@given(label_sets(), st.integers(1, 12), st.integers(1, 8), st.booleans(), st.integers(0, 99))
def test_shards_give_each_client_its_classes_or_refuse(
    labels: np.ndarray, clients: int, classes: int, balanced: bool, seed: int
) -> None:
    """It succeeds exactly where an answer exists: S ≤ C ≤ N·S ≤ Σ min(n_c, N)."""
    sizes = np.unique(labels, return_counts=True)[1]
    possible = classes <= len(sizes) <= clients * classes <= np.minimum(sizes, clients).sum()
    spec = f"shards(classes={classes}, balanced={balanced})"
    if not possible:
        with pytest.raises(UsageError):
            partition(labels, spec, clients, seed)
        return
    parts = partition(labels, spec, clients, seed)
    check_parts(parts, clients, len(labels))
    assert holdings(parts, labels) == [classes] * clients
    assert same(parts, partition(labels, spec, clients, seed))


@quick
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data(), st.integers(0, 99))
def test_natural_is_the_groups_or_a_choice_of_them(sizes: list[int], data: st.DataObject, seed: int) -> None:
    examples = sum(sizes)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(examples))
    groups = list(order.split(sizes))
    labels = [0] * examples
    everyone = [group.sort().values for group in groups]
    assert same(partition(labels, "natural", 0, seed, groups), everyone)
    assert same(partition(labels, "natural", len(groups), seed, groups), everyone)
    clients = data.draw(st.integers(1, len(groups)))
    chosen = partition(labels, "natural", clients, seed, groups)
    places = [[tuple(g.tolist()) for g in everyone].index(tuple(part.tolist())) for part in chosen]
    assert len(places) == clients
    assert places == sorted(set(places))
    assert same(chosen, partition(labels, "natural", clients, seed, groups))


@pytest.mark.parametrize("spec", ["iid", "dirichlet", "shards", "shards(balanced=True)"])
def test_only_the_seed_matters(spec: str) -> None:
    """Neither global generator is read or moved, and labels may come as a tensor, an array or a list."""
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = partition(DIGITS, spec, 10, 3)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])
    assert same(first, partition(DIGITS.numpy(), spec, 10, 3))
    assert same(first, partition(DIGITS.tolist(), spec, 10, 3))
    assert same(first, partition(DIGITS.to(torch.uint8) * 20, spec, 10, 3)), "names of classes do not matter"
    assert not same(first, partition(DIGITS, spec, 10, 4))


def test_each_part_owns_its_storage() -> None:
    """A view would drag the whole partition along whenever one client's part is pickled."""
    assert all(part.untyped_storage().nbytes() == 8 * len(part) for part in partition(DIGITS, "iid", 10))


# -- Dirichlet


def test_dirichlet_works_on_digits_for_every_seed() -> None:
    for seed in range(200):
        parts = partition(DIGITS, "dirichlet(alpha=0.1)", 10, seed)
        assert min(len(part) for part in parts) >= 10


@pytest.mark.parametrize(
    ("examples", "classes", "clients", "alpha"),
    [(50_000, 10, 20, 0.05), (50_000, 100, 20, 0.05), (50_000, 10, 100, 0.1), (1437, 10, 20, 0.1)],
)
def test_dirichlet_works_at_the_settings_of_the_papers(examples: int, classes: int, clients: int, alpha: float) -> None:
    for seed in range(5):
        check_parts(partition(np.arange(examples) % classes, f"dirichlet({alpha})", clients, seed), clients, examples)


def test_smaller_alpha_is_more_skewed() -> None:
    def mean(alpha: float) -> float:
        spec = f"dirichlet(alpha={alpha}, min_size=1)"
        return float(np.mean([entropy(partition(DIGITS, spec, 10, s), DIGITS) for s in range(10)]))

    skewed, middle, even = mean(0.1), mean(1.0), mean(100.0)
    assert skewed < 1.2 < middle < 2.1 < even < np.log(10)


def test_rounding_favours_no_client() -> None:
    """With a huge alpha every class is cut at the same places; sizes must not drift over 100 classes."""
    labels = np.arange(100 * 55) % 100
    sizes = np.array([len(part) for part in partition(labels, "dirichlet(alpha=1e12)", 10)])
    assert abs(sizes - 550).max() < 30


@pytest.mark.parametrize("alpha", [5e-324, 1e-300, 1e-6, 1e-3, 1.0, 1e6, 1e308])
def test_shares_are_finite_for_every_alpha(alpha: float) -> None:
    shares = dirichlet_shares(np.random.default_rng(0), alpha, (50, 7))
    assert np.isfinite(shares).all()
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    if alpha <= 1e-6:
        assert (shares.max(axis=1) > 0.999).all()
    if alpha >= 1e6:
        np.testing.assert_allclose(shares, 1 / 7, atol=1e-2)


@pytest.mark.parametrize("alpha", [0.1, 1.0, 3.0])
def test_shares_have_the_moments_of_a_dirichlet(alpha: float) -> None:
    """Mean 1/N and variance (N − 1)/(N²(Nα + 1)), over 40,000 rows with N = 4."""
    shares = dirichlet_shares(np.random.default_rng(1), alpha, (40_000, 4))
    np.testing.assert_allclose(shares.mean(axis=0), 0.25, atol=0.01)
    np.testing.assert_allclose(shares.var(axis=0), 3 / (16 * (4 * alpha + 1)), rtol=0.04)


@pytest.mark.parametrize(
    ("labels", "spec", "clients", "words"),
    [
        (DIGITS, "dirichlet(alpha=1e-6)", 11, "smaller min_size, a larger alpha or fewer clients"),
        (DIGITS, "dirichlet(alpha=0.01)", 100, "never got more than 0 examples"),
        (np.arange(100_000) % 100, "dirichlet(alpha=0.001, min_size=50)", 1000, "draws over 1000 clients"),
    ],
)
def test_a_hopeless_case_ends_soon(labels: Any, spec: str, clients: int, words: str) -> None:
    start = time.process_time()
    with pytest.raises(UsageError, match=words):
        partition(labels, spec, clients)
    assert time.process_time() - start < 5  # seconds of the CPU; it takes about one


def test_tiny_alpha_gives_whole_classes() -> None:
    parts = partition(DIGITS, "dirichlet(alpha=1e-6)", 3)
    assert sum(holdings(parts, DIGITS.numpy())) == 10


# -- shards


def test_shards_are_unbalanced_unless_asked() -> None:
    labels = np.arange(10_000) % 10
    loose = [len(part) for part in partition(labels, "shards(classes=2)", 20)]
    even = [len(part) for part in partition(labels, "shards(classes=2, balanced=True)", 20)]
    assert set(even) == {500}  # 10 classes of 1,000, each held by 4 clients: 250 a piece, two pieces a client
    assert max(loose) > 3 * min(loose)


def test_balanced_shards_follow_the_sizes_of_the_classes() -> None:
    """900 + 100 examples, 10 clients of one class: 9 of them hold the big one, so all have 100."""
    labels = np.repeat([0, 1], [900, 100])
    assert {len(part) for part in partition(labels, "shards(classes=1, balanced=True)", 10)} == {100}


def test_shards_mix_classes_freely() -> None:
    """No two classes are tied to each other: over many clients, every pair occurs."""
    labels = np.arange(5_000) % 5
    pairs = {tuple(np.unique(labels[part])) for part in partition(labels, "shards", 200)}
    assert len(pairs) == 10


def test_every_class_at_every_client() -> None:
    parts = partition(DIGITS, "shards(classes=10)", 7)
    assert holdings(parts, DIGITS.numpy()) == [10] * 7


# -- refusals and speed


@pytest.mark.parametrize(
    ("spec", "clients", "words"),
    [
        ("iid", 0, "at least 1 client, not 0"),
        ("natural", -1, "at least 1 client, not -1"),
        ("iid", 1438, "1437 examples cannot be divided among 1438 clients"),
        ("dirichlet(alpha=0.0)", 10, "alpha must be a finite number above 0, not 0.0"),
        ("dirichlet(alpha=-1)", 10, "above 0"),
        ("dirichlet(alpha=1e999)", 10, "finite"),
        ("dirichlet(alpha='x')", 10, "does not fit"),
        ("dirichlet(min_size=0)", 10, "min_size must be at least 1"),
        ("dirichlet(min_size=200)", 10, "need 2000 examples, and there are 1437"),
        ("shards(classes=0)", 10, "classes must be 1 to 10"),
        ("shards(classes=11)", 10, "classes must be 1 to 10"),
        ("shards(classes=2)", 4, "at least 3 classes per client or 5 clients"),
        ("shards(classes=2)", 1000, "too few examples"),
        (
            "natural",
            10,
            r"no natural clients; femnist \(its writers\), shakespeare .*heart-disease \(its hospitals\) have them",
        ),
        ("dirichle", 10, "did you mean 'dirichlet'"),
        ("iid(alpha=1)", 10, "has no argument 'alpha'"),
        (42, 10, "not int"),
    ],
)
def test_refusals(spec: Any, clients: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        partition(DIGITS, spec, clients)


def test_nan_is_refused() -> None:
    from fedstrata.data.partitions import PartitionRequest, dirichlet

    with pytest.raises(UsageError, match="not nan"):
        dirichlet(PartitionRequest(DIGITS.numpy(), 10, np.random.default_rng(0)), alpha=float("nan"))


@pytest.mark.parametrize(
    "labels", [[], [0.5, 1.0], torch.zeros(3, 2, dtype=torch.int64), ["a", "b"], [[1], [1, 2]], [2**70, 1]]
)
def test_bad_labels_are_refused(labels: Any) -> None:
    with pytest.raises(UsageError, match="labels to partition"):
        partition(labels, "iid", 1)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(UsageError, match="seed must be 0 or more"):
        partition(DIGITS, "iid", 10, -1)


@pytest.mark.parametrize(
    ("groups", "clients", "words"),
    [
        ([[0, 1], [1, 2]], 0, "share examples"),
        ([[0, 1], [4]], 0, "outside the 4"),
        ([[0, 1], [-1]], 0, "outside the 4"),
        ([[0, 1], []], 0, "client 1 has no examples"),
        ([[0, 1], [2, 3]], 3, "has 2 natural clients, not 3"),
    ],
)
def test_bad_groups_are_refused(groups: list[list[int]], clients: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        partition([0, 0, 0, 0], "natural", clients, 0, [torch.tensor(g) for g in groups])


def test_a_million_labels_over_many_clients() -> None:
    labels = np.arange(1_000_000) % 10
    start = time.process_time()
    parts = partition(labels, "iid", 100_000)
    assert time.process_time() - start < 6  # seconds of the CPU; it takes well under two
    assert len(parts) == 100_000
    assert {len(part) for part in parts} == {10}


def test_the_table_shows_itself() -> None:
    assert {name: signature(function) for name, function in PARTITIONS.items()} == {
        "iid": "",
        "dirichlet": "alpha=0.1, min_size=10",
        "shards": "classes=2, balanced=False",
        "natural": "",
    }
    assert all(summary(function).endswith(".") for function in PARTITIONS.values())


# -- describe


def test_describe_counts() -> None:
    """Labels 0 0 1 | 1 1 | 3 at three clients: sizes 3, 2, 1; 2, 1 and 1 classes, 4/3 on average."""
    labels = [0, 0, 1, 1, 1, 3]
    parts = [torch.tensor([0, 1, 2]), torch.tensor([3, 4]), torch.tensor([5])]
    numbers = describe(parts, labels, 4)
    assert numbers.counts.tolist() == [[2, 0, 0], [1, 2, 0], [0, 0, 0], [0, 0, 1]]
    assert (numbers.smallest, numbers.median, numbers.largest) == (1, 2.0, 3)
    assert numbers.classes_per_client == pytest.approx(4 / 3)
    assert (numbers.clients, numbers.examples) == (3, 6)
    expected = "3 clients, 6 examples; 1 to 3 per client, median 2; 1.3 classes per client on average"
    assert str(numbers) == expected


def test_describe_refuses_what_it_cannot_count() -> None:
    with pytest.raises(UsageError, match="0 to 4 for 5 classes"):
        describe(partition(DIGITS, "iid", 3), DIGITS, 5)
    with pytest.raises(UsageError, match="no clients"):
        describe([], DIGITS, 10)


# -- partitioner objects


class Table(dict[str, list[int]]):
    """As much of a `datasets.Dataset` as is needed here."""

    @classmethod
    def from_dict(cls, columns: dict[str, Any]) -> Table:
        return cls({name: list(column) for name, column in columns.items()})

    def rows(self, which: list[int]) -> Table:
        return Table({name: [column[i] for i in which] for name, column in self.items()})


class EveryOther:
    """A partitioner as flwr-datasets has them: client i gets the rows i, i + n, i + 2n, …"""

    def __init__(self, num_partitions: int, take: slice = slice(None), share: bool = False) -> None:
        self.num_partitions, self.take, self.share = num_partitions, take, share
        self.dataset: Any = None

    def is_dataset_assigned(self) -> bool:
        return self.dataset is not None

    def load_partition(self, partition_id: int) -> Table:
        rows = list(range(len(self.dataset["label"])))[self.take]
        first = 0 if self.share else partition_id
        return self.dataset.rows(rows[first :: self.num_partitions])


@pytest.fixture
def fake_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("datasets")
    module.Dataset = Table  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


@pytest.mark.usefixtures("fake_datasets")
def test_a_partitioner_object_is_used_and_left_untouched() -> None:
    partitioner = EveryOther(3)
    for clients in (3, 0):
        parts = partition(DIGITS, partitioner, clients)
        check_parts(parts, 3, 1437)
        assert parts[1][:3].tolist() == [1, 4, 7]
    assert partitioner.dataset is None


@pytest.mark.usefixtures("fake_datasets")
@pytest.mark.parametrize(
    ("partitioner", "clients", "words"),
    [
        (EveryOther(3), 4, "makes 3 clients, and 4 were asked for"),
        (EveryOther(3, share=True), 3, "share examples"),
        (EveryOther(3, take=slice(0, 2)), 3, "client 2 has no examples"),
        (EveryOther(0), 0, "there are none"),
        (EveryOther(-3), 0, "there are none"),
    ],
)
def test_a_bad_partitioner_is_refused(partitioner: EveryOther, clients: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        partition(DIGITS, partitioner, clients)


@pytest.mark.usefixtures("fake_datasets")
def test_a_partitioner_that_leaves_examples_out_warns() -> None:
    with pytest.warns(UserWarning, match="EveryOther leaves out 437 of 1437 examples"):
        parts = partition(DIGITS, EveryOther(3, take=slice(0, 1000)), 3)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(1000))


@pytest.mark.usefixtures("fake_datasets")
def test_a_partitioner_that_has_a_dataset_is_refused() -> None:
    partitioner = EveryOther(3)
    partitioner.dataset = Table()
    with pytest.raises(UsageError, match="already has a dataset"):
        partition(DIGITS, partitioner, 3)


@pytest.mark.usefixtures("fake_datasets")
def test_a_failing_partitioner_gives_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: EveryOther, partition_id: int) -> Table:
        raise KeyError("no column\n 'colour'")

    monkeypatch.setattr(EveryOther, "load_partition", fail)
    with pytest.raises(UsageError, match=r"the partitioner EveryOther failed: .*colour") as caught:
        partition(DIGITS, EveryOther(3), 3)
    assert "\n" not in str(caught.value)


def test_without_datasets_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"pip install 'fedstrata\[flower\]'"):
        partition(DIGITS, EveryOther(3), 3)


@pytest.mark.filterwarnings("ignore")
def test_the_real_partitioners() -> None:
    real = pytest.importorskip("flwr_datasets.partitioner")
    for partitioner in (
        real.IidPartitioner(10),
        real.DirichletPartitioner(10, partition_by="label", alpha=0.5),
        real.LinearPartitioner(10),
        real.NaturalIdPartitioner("label"),
    ):
        parts = partition(DIGITS, partitioner, 10)
        check_parts(parts, 10, 1437)
        assert same(parts, partition(DIGITS, partitioner, 0))
    with pytest.raises(UsageError, match="failed"):
        partition(DIGITS, real.DirichletPartitioner(10, partition_by="no such column", alpha=0.5), 10)
