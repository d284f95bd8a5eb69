"""Secure aggregation: Flower's own mod on the clients, and the server sees their sum alone."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.flower.worlds import data, grid, plan, silos, sites  # isort: skip  # skips without flwr

from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp.mod import LocalDpMod
from flwr.common.secure_aggregation.crypto.shamir import create_shares

import fedstrata as fs
from fedstrata import wire
from fedstrata.flower import client_app, server
from fedstrata.flower.mods import CONFIGS
from fedstrata.flower.secure_aggregation import MODULUS, Exchange
from tests.engines.worlds import mlp, staged
from tests.flower.worlds import Loopback, context

SECURE: dict[str, Any] = {"model": mlp, "secure": True, "participation": 5, "rounds": 2}


def masked(**settings: Any) -> tuple[Any, Loopback]:
    """A federation under secure aggregation, and its grid."""
    mods = settings.pop("mods", [secaggplus_mod])
    given = {**SECURE, **settings}
    made = grid(5, model=given["model"], mods=mods)
    return silos(made, **given), made


def plain(**settings: Any) -> fs.Federation:
    given = {**SECURE, "secure": False, **settings}
    return silos(grid(5, model=given["model"]), **given)  # type: ignore[no-any-return]


def close(found: Any, reference: Any, atol: float = 3e-6) -> None:
    for name, tensor in reference.state.params.items():
        torch.testing.assert_close(found.state.params[name], tensor, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "method",
    ["fedavg", "fedavg(weight='uniform')", "fedprox + fedlc + fednlr", "fedavgm", "moon", "fedpart(full_rounds=1)"],
)
def test_the_mean_is_that_of_plain_updates(method: str) -> None:
    """Up to the steps in which numbers are sent, 2/2²² of the clip, over the least weight of five clients."""
    found, reference = masked(method=method)[0], plain(method=method)
    assert not any(record.refused for record in found.records)
    close(found, reference)
    start = dict(mlp().named_parameters())
    assert max((reference.state.params[n] - w).abs().max() for n, w in start.items()) > 0.01
    assert [r.train_loss for r in found.records] == pytest.approx([r.train_loss for r in reference.records], rel=1e-4)


def test_node_numbers_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's are random numbers of 64 bits; all nodes are waited for together."""
    made = grid(5, model=mlp, mods=[secaggplus_mod])
    numbers = [2**63 - 7, 12, 2**40, 5, 2**62]
    made.contexts = {
        number: context(number, old.node_config) for number, old in zip(numbers, made.contexts.values(), strict=True)
    }
    made.online = set(numbers)
    asked: list[int] = []
    pull = made.pull_messages
    monkeypatch.setattr(made, "pull_messages", lambda ids: (asked.append(len(list(ids))), pull(ids))[1])
    close(silos(made, **{**SECURE, "rounds": 1}), plain(rounds=1))
    assert asked[-4:] == [5] * 4


def test_the_server_sees_no_update() -> None:
    """What clients send looks like noise: every number is equally likely, whatever the update is."""
    found: list[np.ndarray[Any, Any]] = []
    made = grid(5, model=mlp, mods=[secaggplus_mod])
    pull = made.pull_messages

    def note_loss(numbers: Any) -> Any:
        replies = list(pull(numbers))
        for reply in replies:
            if not reply.has_error() and CONFIGS in reply.content.config_records:
                assert not any(len(record) for record in reply.content.array_records.values())
                for part in reply.content.config_records[CONFIGS].get("masked_params", []):  # type: ignore[union-attr]
                    found.append(np.load(io.BytesIO(part), allow_pickle=False).ravel())
        return replies

    made.pull_messages = note_loss  # type: ignore[method-assign]
    silos(made, **SECURE)
    numbers = np.concatenate(found)
    weights = sum(p.numel() for p in mlp().parameters())
    assert len(numbers) == 2 * 5 * (weights + 1)
    # A mean of n uniform numbers lies within 5/√(12 n) of the middle.
    assert abs(numbers.mean() / MODULUS - 0.5) < 5 / np.sqrt(12 * len(numbers))
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 5 / np.sqrt(len(numbers))


def stage_of(message: Message) -> Any:
    return message.content.config_records[CONFIGS]["stage"]


@pytest.mark.parametrize("stage", ["setup", "share_keys", "collect_masked_vectors"])
def test_who_drops_out_is_left_out(stage: str) -> None:
    """At any stage before the vectors are in; the sum is then that of the others."""
    made = grid(5, model=mlp, mods=[secaggplus_mod])

    def fails(message: Message, answer: Any) -> Message:
        if stage_of(message) == stage:
            return Message(Error(2, "broken"), reply_to=message)
        return answer()  # type: ignore[no-any-return]

    for node in (100, 102)[: 1 if stage == "setup" else 2]:
        made.faults[node] = fails
    quorum = {"secure_quorum": 0.6}
    found = silos(made, **{**SECURE, **quorum, "rounds": 1})
    gone = {row["client"] for row in found.records[0].refused}
    assert gone == ({0} if stage == "setup" else {0, 2})
    assert all("broken" in row["why"] for row in found.records[0].refused)
    others = grid(5, model=mlp)
    for client in gone:
        others.faults[100 + client] = lambda message, answer: Message(Error(2, "broken"), reply_to=message)
    close(found, silos(others, **{**SECURE, "secure": False, "rounds": 1}))


def test_few_masked_vectors_are_here_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is added to the sum as it comes, whoever never comes."""
    monkeypatch.setattr(server, "AHEAD", 2)
    monkeypatch.setattr(server, "AHEAD_BYTES", 1)
    made = grid(5, model=mlp, mods=[secaggplus_mod])
    made.faults[100] = lambda message, answer: None if stage_of(message) == "collect_masked_vectors" else answer()
    fetched: list[int] = []
    pull = made.pull_messages

    def note_loss(numbers: Any) -> Any:
        replies = list(pull(numbers))
        fetched.append(sum("masked_params" in r.content.config_records.get(CONFIGS, {}) for r in replies))
        return replies

    made.pull_messages = note_loss  # type: ignore[method-assign]
    found = silos(made, **{**SECURE, "rounds": 1, "timeout": 1.0})
    assert [row["client"] for row in found.records[0].refused] == [0]
    assert (max(fetched), sum(fetched)) == (2, 4)
    others = grid(5, model=mlp)
    others.faults[100] = lambda message, answer: Message(Error(2, "broken"), reply_to=message)
    close(found, silos(others, **{**SECURE, "secure": False, "rounds": 1}))


def test_who_drops_out_at_the_very_end_is_still_in_the_sum() -> None:
    made = grid(5, model=mlp, mods=[secaggplus_mod])
    lost: list[Any] = []

    def fails(message: Message, answer: Any) -> Message:
        if stage_of(message) == "unmask":
            lost.append(message)
            return Message(Error(2, "broken"), reply_to=message)
        return answer()  # type: ignore[no-any-return]

    made.faults[103] = fails
    close(silos(made, **{**SECURE, "rounds": 1}), plain(rounds=1))
    assert len(lost) == 1


def test_too_few_are_no_round() -> None:
    """Two of five held out where four are needed: nothing is opened, and the model stays."""
    made = grid(5, model=mlp, mods=[secaggplus_mod])
    for node in (100, 101, 102):
        made.faults[node] = lambda message, answer: (
            Message(Error(2, "broken"), reply_to=message) if stage_of(message) != "setup" else answer()
        )
    found = silos(made, **{**SECURE, "rounds": 1})
    assert len(found.records[0].refused) == 5
    assert "2 of 5 clients stayed to the end, too few to see the sum" in {r["why"] for r in found.records[0].refused}
    for name, tensor in mlp().named_parameters():
        assert torch.equal(found.state.params[name], tensor)


@pytest.mark.parametrize("part", [b"garbage", b"", "text", 7])
def test_a_vector_that_is_none(part: Any) -> None:
    made = grid(5, model=mlp, mods=[secaggplus_mod])

    def spoils(message: Message, answer: Any) -> Message:
        stage = stage_of(message)  # the mod takes it out
        reply: Message = answer()
        if stage == "collect_masked_vectors":
            record = reply.content.config_records[CONFIGS]
            record["masked_params"] = [part] * len(record["masked_params"])  # type: ignore[arg-type]
        return reply

    made.faults[101] = spoils
    found = silos(made, **{**SECURE, "rounds": 1})
    assert [row["client"] for row in found.records[0].refused] == [1]
    assert "masked" in found.records[0].refused[0]["why"]
    assert all(tensor.isfinite().all() for tensor in found.state.params.values())


def test_a_header_that_promises_too_much_is_refused_before_memory_is_taken() -> None:
    """An array of 2⁴⁰ numbers, in a hundred bytes."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<i8", "fortran_order": False, "shape": (2**40,)})
    exchange = Exchange((1, 2, 3), 2, 1.0, 1.0)
    with pytest.raises(fs.UsageError, match="does not have the model's shapes"):
        exchange.take_masked(1, {"masked_params": [buffer.getvalue()]}, [])
    assert not exchange.masked


@pytest.mark.parametrize("header", ["-" * 9000 + "1", "{[]: 1}", "(" * 3000, "{1: 2, 'a': 3, None: 4}", ""])
def test_a_header_is_never_evaluated(header: str) -> None:
    """numpy's own reader fails on these with MemoryError, TypeError or RecursionError, which would end a run."""
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(8)
    exchange = Exchange((1, 2, 3), 2, 1.0, 1.0)
    with pytest.raises(fs.UsageError, match="does not have the model's shapes"):
        exchange.take_masked(1, {"masked_params": [data]}, [])


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0,), (12, 1, 5, 7)])
def test_arrays_are_read_as_numpy_writes_them(shape: tuple[int, ...]) -> None:
    weight, values = np.array([7]), np.arange(math.prod(shape)).reshape(shape)
    parts = []
    for array in (weight, values):
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        parts.append(buffer.getvalue())
    exchange = Exchange((1, 2, 3), 2, 1.0, 1.0)
    exchange.take_masked(1, {"masked_params": parts}, [shape])
    assert all(np.array_equal(a, b) for a, b in zip(exchange.total, (weight, values), strict=True))
    with pytest.raises(fs.UsageError, match="does not have the model's shapes"):
        exchange.take_masked(2, {"masked_params": [parts[0], parts[1][:-8]]}, [shape if values.size else (3,)])


def test_one_client_gives_one_share_of_a_secret() -> None:
    """A thousand shares from one hand would take a million times as long as one, and count as a thousand hands."""
    exchange = Exchange((1, 2, 3), 2, 1.0, 1.0)
    exchange.shared, exchange.masked = {1: {}, 2: {}, 3: {}}, [1, 2, 3]
    exchange.total = [np.zeros(1, np.int64)]
    many = {"nids": [1] * 1000, "shares": [bytes(20)] * 1000}
    with pytest.raises(fs.UsageError, match="1 of 3 clients stayed to the end"):
        exchange.open_sum({1: (many, None)})  # type: ignore[dict-item]


def test_shares_of_unlike_length_are_not_combined(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one's would decide how much is done for all."""
    monkeypatch.setattr("flwr.common.secure_aggregation.crypto.shamir.combine_shares", lambda shares: 1 / 0)
    exchange = Exchange((1, 2, 3), 2, 1.0, 1.0)
    exchange.masked = [1]
    with pytest.raises(fs.UsageError, match="do not fit together"):
        list(exchange._masks(1, [bytes(4000), bytes(52)], [(1,)]))


def test_a_public_key_of_another_kind() -> None:
    """It fits no key agreement, and the run goes on without the sum."""
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    pem = PrivateFormat.PKCS8, NoEncryption()
    secret = ec.generate_private_key(ec.SECP384R1()).private_bytes(Encoding.PEM, *pem)
    public = ed25519.Ed25519PrivateKey.generate().public_key()
    exchange = Exchange(
        (1, 2, 3), 2, 1.0, 1.0, keys={2: [public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)]}
    )
    exchange.masked = [2]
    with pytest.raises(fs.UsageError, match="do not fit together"):
        list(exchange._masks(1, create_shares(secret, 2, 3), [(1,)]))


def test_both_sides_must_want_it() -> None:
    found = silos(grid(5, model=mlp, mods=[secaggplus_mod]), **{**SECURE, "secure": False, "rounds": 1})
    why = {row["why"] for row in found.records[0].refused}
    assert why == {"it says: this site sends updates only under secure aggregation: the server needs secure=true"}
    found = silos(grid(5, model=mlp), **{**SECURE, "rounds": 1})
    assert len(found.records[0].refused) == 5
    assert {row["why"] for row in found.records[0].refused} == {
        "it says: secure aggregation needs Flower's mod here too: client_app(…, mods=[secaggplus_mod])"
    }
    assert all(torch.equal(found.state.params[n], p) for n, p in mlp().named_parameters())


def test_noise_and_masks_together() -> None:
    """The mod of differential privacy comes after the mask's in the list, and before it on the way out."""
    found, _ = masked(mods=[secaggplus_mod, LocalDpMod(0.01, 0.0, 1.0, 0.5)], rounds=1)
    moved = torch.cat([(found.state.params[n] - p).flatten() for n, p in mlp().named_parameters()]).norm()
    assert 0.001 < moved <= 0.01 + 1e-4
    with pytest.raises(fs.UsageError, match="secaggplus_mod must be the first mod"):
        masked(mods=[LocalDpMod(0.01, 0.0, 1.0, 0.5), secaggplus_mod])


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"method": "scaffold"}, "'scaffold' looks at clients one by one"),
        ({"method": "fednova"}, "'fednova' looks at clients one by one"),
        ({"method": "feddf"}, "'feddf' looks at clients one by one"),
        ({"method": "fedavg(reduce='median')"}, "'median' looks at clients one by one"),
        ({"archs": {"small": mlp}}, "all clients have the same model"),
        ({"secure_clip": 0.0}, "secure_clip"),
        ({"secure_quorum": 0.5}, "secure_quorum = 0.5 does not fit: input should be greater than 0.5"),
    ],
)
def test_what_needs_more_than_the_sum_is_refused_at_once(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(fs.UsageError, match=why):
        plan(**{**SECURE, **settings}).with_config({})


def test_too_few_clients_to_hide_in(tmp_path: Any) -> None:
    with pytest.raises(fs.UsageError, match="between 3 and 1,023 clients per round, not 2"):
        masked(participation=2, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_running_statistics_are_refused() -> None:
    found, _ = masked(model=staged, rounds=1)
    assert len(found.records[0].refused) == 5
    assert all("running statistics would leave this site as is" in row["why"] for row in found.records[0].refused)


def test_several_clients_at_a_node() -> None:
    app = client_app(mlp, data, mods=[secaggplus_mod])
    made = Loopback(app, [{"partition-id": "0,1", "num-partitions": 3}, {"partition-id": 2, "num-partitions": 3}])
    with pytest.raises(fs.UsageError, match="has several clients, and secure aggregation needs one for each"):
        silos(made, **{**SECURE, "participation": 3})


def test_numbers_beyond_the_clip_are_cut() -> None:
    found, _ = masked(secure_clip=0.001, rounds=1, method="fedavg(weight='uniform')")
    moved = max((found.state.params[n] - p).abs().max() for n, p in mlp().named_parameters())
    assert 0.0009 < moved <= 0.001 + 1e-6


def test_the_records_are_configs() -> None:
    """The name that the mod gives its record is Flower's, and must not change behind our back."""
    from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS

    assert CONFIGS == RECORD_KEY_CONFIGS


def altered(stage: str, change: Any) -> Any:
    """A node whose reply to a stage is changed on its way."""

    def fault(message: Message, answer: Any) -> Message:
        now = stage_of(message)  # the mod takes it out
        reply: Message = answer()
        if now == stage:
            change(reply.content)
        return reply

    return fault


def without(client: int, **settings: Any) -> Any:
    """The same federation in the clear, with a client that fails."""
    world = grid(5, model=mlp)
    world.faults[100 + client] = lambda message, answer: Message(Error(2, "broken"), reply_to=message)
    return silos(world, **{**SECURE, "secure": False, "rounds": 1, **settings})


@pytest.mark.parametrize(("field", "value"), [("round", 7), ("method", "0" * 16), ("steps", 10**6)])
def test_an_update_that_is_refused_is_not_in_the_sum(field: str, value: Any) -> None:
    def lies(content: Any) -> None:
        record = content.config_records["fedstrata"]
        record["message"] = wire.encode(replace(wire.decode_update(record["message"]), **{field: value}))

    made = grid(5, model=mlp, mods=[secaggplus_mod])
    made.faults[101] = altered("collect_masked_vectors", lies)
    found = silos(made, **{**SECURE, "rounds": 1})
    assert [row["client"] for row in found.records[0].refused] == [1]
    close(found, without(1))


def test_masks_that_do_not_cancel_are_noticed() -> None:
    """A vector of random numbers in the right shapes: nothing of the round is used."""

    def randomised(content: Any) -> None:
        record, rng = content.config_records[CONFIGS], np.random.default_rng(0)
        parts = [np.load(io.BytesIO(part)) for part in record["masked_params"]]
        buffers = [io.BytesIO() for _ in parts]
        for buffer, part in zip(buffers, parts, strict=True):
            np.save(buffer, rng.integers(0, MODULUS, part.shape))
        record["masked_params"] = [buffer.getvalue() for buffer in buffers]

    made = grid(5, model=mlp, mods=[secaggplus_mod])
    made.faults[101] = altered("collect_masked_vectors", randomised)
    found = silos(made, **{**SECURE, "rounds": 1})
    assert {row["why"] for row in found.records[0].refused} == {
        "the masks do not cancel: somebody did not keep to the protocol"
    }
    assert all(torch.equal(found.state.params[n], p) for n, p in mlp().named_parameters())


def shorter(content: Any) -> None:
    content.config_records[CONFIGS]["ctxts"] = content.config_records[CONFIGS]["ctxts"][:1]


def floats(content: Any) -> None:
    record = content.config_records[CONFIGS]
    record["ctxts"] = [0.5] * len(record["dsts"])


def long(content: Any) -> None:
    record = content.config_records[CONFIGS]
    record["ctxts"] = [b"x" * 10**6] * len(record["dsts"])


@pytest.mark.parametrize("change", [shorter, floats, long])
def test_shares_that_are_none_leave_their_sender_out(change: Any) -> None:
    made = grid(5, model=mlp, mods=[secaggplus_mod])
    made.faults[101] = altered("share_keys", change)
    found = silos(made, **{**SECURE, "rounds": 1})
    assert [row["client"] for row in found.records[0].refused] == [1]
    close(found, without(1))


@pytest.mark.parametrize("said", [{"nids": 5}, {"shares": 3.5}, {"nids": ["x"], "shares": [b"y"]}])
def test_answers_to_the_last_stage_that_are_none(said: dict[str, Any]) -> None:
    made = grid(5, model=mlp, mods=[secaggplus_mod])
    made.faults[101] = altered("unmask", lambda content: content.config_records[CONFIGS].update(said))
    close(silos(made, **{**SECURE, "rounds": 1}), plain(rounds=1))


def test_a_sum_of_too_few_is_not_opened() -> None:
    """One of five is there: the sum would be its own change."""
    made = grid(5, model=mlp, mods=[secaggplus_mod])
    early = made.get_node_ids

    def only_one() -> Any:
        return [102] if any(m.metadata.message_type == "query" for m in made.sent) and made.replies == {} else early()

    made.get_node_ids = only_one  # type: ignore[method-assign]
    found = silos(made, **{**SECURE, "rounds": 1})
    assert "1 clients are there, too few to hide in: 4 are needed" in {r["why"] for r in found.records[0].refused}
    assert not [m for m in made.sent if m.metadata.message_type == "train"]


def test_clients_without_examples_do_not_count() -> None:
    def some(partition: int) -> Any:
        x, y = data(partition)
        return (x[:0], y[:0]) if partition > 1 else (x, y)

    made = Loopback(client_app(mlp, some, mods=[secaggplus_mod]), sites(4))
    with pytest.raises(fs.UsageError, match="between 3 and 1,023 clients per round, not 2"):
        silos(made, **{**SECURE, "participation": 1.0})


def ask_site(configs: dict[str, Any]) -> str:
    """What a site answers to a stage, if it refuses."""
    app = client_app(mlp, data, mods=[secaggplus_mod])
    made = Loopback(app, sites(1))
    content = RecordDict({CONFIGS: ConfigRecord(configs)})
    (number,) = made.push_messages([Message(content, 100, "train")])
    (reply,) = made.pull_messages([number])
    record = reply.content.config_records.get("fedstrata") if reply.has_content() else None
    return "" if record is None else str(record["head"])


@pytest.mark.parametrize(("clients", "threshold", "sound"), [(1, 1, False), (5, 2, False), (2, 2, False), (5, 3, True)])
def test_a_site_takes_no_part_where_it_could_be_unmasked(clients: int, threshold: int, sound: bool) -> None:
    rules = Exchange(tuple(range(clients)), threshold, 1.0, 1.0).setup()[0]
    assert ("hide nothing" in ask_site(rules)) is not sound


def test_a_site_gives_no_shares_of_both_secrets() -> None:
    assert "would unmask it" in ask_site({"stage": "unmask", "active_nids": [1, 2, 3], "dead_nids": [3]})


class Scaled(nn.Module):
    """A model with a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.temperature = mlp(), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(x) * self.temperature  # type: ignore[no-any-return]


def test_a_parameter_without_dimensions() -> None:
    close(masked(model=Scaled, rounds=1)[0], plain(model=Scaled, rounds=1))


def test_who_has_lost_parameters_keeps_its_memory() -> None:
    """It is left out of the round, and then goes on with what it remembers, as if it had never been asked."""
    made = grid(5, model=mlp, mods=[secaggplus_mod])
    settings = {**SECURE, "method": "moon + fedpart(full_rounds=1)", "rounds": 4}

    def loses(message: Message, answer: Any) -> Message:
        if message.metadata.group_id == "3" and stage_of(message) == "collect_masked_vectors":
            state = made.contexts[101].state
            for name in [name for name in state if "held" in name]:
                del state[name]
        return answer()  # type: ignore[no-any-return]

    made.faults[101] = loses
    found = silos(made, **settings)
    assert [[row["client"] for row in record.refused] for record in found.records] == [[], [], [1], []]
    assert "the parameters that it held" in found.records[2].refused[0]["why"]
    world = grid(5, model=mlp)
    world.faults[101] = lambda message, answer: (
        Message(Error(2, "broken"), reply_to=message) if message.metadata.group_id == "3" else answer()
    )
    close(found, silos(world, **{**settings, "secure": False}), atol=1e-5)


@pytest.mark.parametrize("other", [{"secure": False}, {"secure_clip": 2.0}])
def test_a_run_does_not_go_on_in_another_way(other: dict[str, Any], tmp_path: Any) -> None:
    masked(out=tmp_path / "run", rounds=1)
    assert "secure aggregation" in (tmp_path / "run" / "summary.json").read_text()
    with pytest.raises(fs.UsageError, match="secure"):
        masked(out=tmp_path / "run", rounds=1, resume=True, **other)
    assert masked(out=tmp_path / "run", rounds=1, resume=True)[0].done
