"""Flower's engine on a grid in this process: the same bits, little on the wire, and clients that fail."""

from __future__ import annotations

import json
import re
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from tests.flower.worlds import Loopback, data, grid, made, plan, silos, sites  # isort: skip  # skips without flwr

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict

import fedstrata as fs
from fedstrata import wire
from fedstrata.diagnosis import diagnose
from fedstrata.engines.pool import AHEAD
from fedstrata.flower import client_app, server, server_app, transport
from fedstrata.flower.client import Site
from fedstrata.flower.messages import ClientInfo, TrainReply, from_records, to_records
from fedstrata.flower.reorder_buffer import ReorderBuffer
from fedstrata.flower.server import build_federation
from fedstrata.flower.site_directory import SiteDirectory
from fedstrata.flower.transport import Transport
from fedstrata.runs.reader import SavedRun
from fedstrata.tasks.registry import build_task
from fedstrata.techniques.scaffold import Scaffold
from tests.contract.standins import Limit
from tests.engines.worlds import EIGHT, check_same, points, staged
from tests.small_runs import edit, strays


def serial(clients: int = 5, **settings: Any) -> fs.Federation:
    """The same federation in this process."""
    defaults = {"rounds": 4, "participation": 3, "batch_size": 5, "lr": 0.05}
    mine = [data(client) for client in range(clients)]
    fed = fs.Federation(staged(), mine, points(40, 99), engine="serial", **{**defaults, **settings})
    fed.fit()
    return fed


@pytest.mark.parametrize("buffers", ["average", "local", "drop"])
@pytest.mark.parametrize("method", ["fedavg", EIGHT])
def test_the_same_bits_as_serial(method: str, buffers: Any) -> None:
    settings: dict[str, Any] = {"method": method, "buffers": buffers, "rounds": 8}
    found = silos(grid(), **settings)
    check_same(found, serial(**settings))
    assert not any(record.refused for record in found.records)


def test_a_server_that_trusts_its_own_examples() -> None:
    settings: dict[str, Any] = {"method": "fedavg(reduce='fltrust')", "trusted": points(20, 77)}
    check_same(silos(grid(), **settings), serial(**settings))


def test_clients_of_different_architecture() -> None:
    parts = {"shallow": made("first", "norm", "relu", "head")}
    names = {0: "", 1: "shallow", 2: "", 3: "shallow", 4: ""}
    for method in ("heteroavg + scaffold + topk(share=0.5)", "groupavg"):
        settings: dict[str, Any] = {"method": method, "arch_of": names.__getitem__, "participation": 4}
        found = silos(grid(archs=parts), archs=parts, **settings)
        check_same(found, serial(archs={"shallow": parts["shallow"]()}, **settings))
        assert not any(record.refused for record in found.records)


DRILLS = (
    "signflip(scale=4, clients=(1,)) + stuck(clients=(2,)) + labelflip(clients=(3,))",
    "inputs(9.0, noise=0.5, clients=(0,)) + gaussian(0.1, clients=(4,)) + backdoor(size=1, boost=3, clients=(2,))",
)


@pytest.mark.parametrize("method", ["fedavg", "scaffold + moon + topk(share=0.5) + quantise"])
@pytest.mark.parametrize("faults", DRILLS)
def test_a_drill_at_sites_has_the_bits_of_a_simulation(faults: str, method: str) -> None:
    settings: dict[str, Any] = {"method": method, "rounds": 6, "participation": 4}
    found = silos(grid(faults=faults), **settings)
    reference = serial(faults=faults, **settings)
    assert all(torch.equal(t, found.state.params[n]) for n, t in reference.state.params.items())
    assert not any(record.refused for record in found.records)
    honest = serial(**settings)
    assert any(not torch.equal(t, found.state.params[n]) for n, t in honest.state.params.items())


def test_lost_and_late_updates_of_a_drill() -> None:
    """What does not come is a refusal of its site; what comes late is refused by the server."""
    faults = "drop(0.5, clients=(1,)) + late(clients=(2,))"
    found, reference = silos(grid(faults=faults), participation=5), serial(faults=faults, participation=5)
    assert all(torch.equal(t, found.state.params[n]) for n, t in reference.state.params.items())
    told = [[(r["client"], r["why"].removeprefix("it says: ")) for r in record.refused] for record in found.records]
    assert told == [[(r["client"], r["why"]) for r in record.refused] for record in reference.records]
    assert any(client == 1 for row in told for client, _ in row)


def test_faults_at_a_site_of_its_own() -> None:
    """Without a word all its clients are hit."""
    everybody = silos(grid(faults="signflip"), participation=5)
    named = silos(grid(faults="signflip(clients=(0, 1, 2, 3, 4))"), participation=5)
    check_same(everybody, named)
    for wrong, why in {
        "alie": "no site sees them",
        "ipm(clients=(1,))": "no site sees them",
        "signflip(share=0.5)": "which no site knows",
        "signflp": "did you mean 'signflip'",
    }.items():
        with pytest.raises(fs.UsageError, match=why):
            client_app(staged, data, faults=wrong)


def test_several_clients_at_one_site() -> None:
    box = grid(0)
    box.__init__(box.app, [{"partition-id": "0,3"}, {"partition-id": "4 1"}, {"partition-id": 2}])  # type: ignore[misc]
    check_same(silos(box, method=EIGHT, clients=5), serial(method=EIGHT))


def test_a_method_of_ones_own() -> None:
    mine = fs.chain(Limit(limit=0.05), Scaffold())
    check_same(silos(grid(method=mine), method=mine), serial(method=mine))
    refused = silos(grid(method=fs.method("fedavg")), method=mine, rounds=1).records[0].refused
    assert {row["why"] for row in refused} == {
        "it says: this site runs the method 'fedavg', and the server another one"
    }


@pytest.mark.parametrize("method", ["fedper + scaffold", "fedrep(head_epochs=1)", "ditto", "fedprox + finetune"])
def test_what_stays_at_a_site(method: str) -> None:
    """Heads, models of its own, and what is trained after the last round: the server never has them."""
    found = silos(grid(), method=method, **({"test": None} if fs.method(method).incomplete else {}))
    reference = serial(method=method)
    assert all(torch.equal(t, found.state.params[n]) for n, t in reference.state.params.items())
    assert [r.train_loss for r in found.records] == [r.train_loss for r in reference.records]


def test_nothing_but_numbers_and_settings_leaves_a_site() -> None:
    """What a site says of itself is in its greeting: how many examples, and what one looks like."""
    box = grid(2)
    context = next(iter(box.contexts.values()))
    assert Site(staged, data).greeting(context.node_config).model_dump() == {
        "parties": [
            {"client": 0, "examples": 10, "shape": [6], "dtype": "float32", "population": 2}
            | {"target_shape": [], "target_dtype": "int64", "parts": [], "named": False}
        ],
        "refusal": "",
    }


def test_only_what_changed_is_sent_and_what_is_accounted_for() -> None:
    """FedPart after its full round: the messages are those whose bytes are counted, and much shorter."""
    box = grid(3)
    found = silos(box, method="fedpart(full_rounds=1)", participation=3, rounds=6)
    message_ids: dict[str, list[int]] = {}
    for sent in box.sent:
        if sent.metadata.message_type == "train":
            size = len(sent.content.array_records["fedstrata.message"][""].data)
            message_ids.setdefault(sent.metadata.group_id, []).append(size)
    assert [sum(sizes) for sizes in message_ids.values()] == [record.bytes_down for record in found.records]
    assert found.records[-1].bytes_up < found.records[0].bytes_up / 2


# Clients that fail ---------------------------------------------------------------------------------------------------


def why(fed: Any) -> list[str]:
    return [row["why"] for record in fed.records for row in record.refused]


def garbage(message: Message, answer: Any) -> Message:
    return Message(RecordDict({"fedstrata": ConfigRecord({"head": "{}"})}), reply_to=message)


def foreign(message: Message, answer: Any) -> Message:
    return Message(RecordDict({"x": ConfigRecord({"y": b"\x80"})}), reply_to=message)


def tampered(message: Message, answer: Any) -> Message:
    reply = answer()
    array = reply.content.array_records["fedstrata.message"][""]
    array.data = array.data[:40] + b"\x00" * (len(array.data) - 40)
    return reply


def broken(message: Message, answer: Any) -> Message:
    raised = Error(2, "Traceback …\nRuntimeError: the disk is gone")
    return Message(raised, reply_to=message)


def silent(message: Message, answer: Any) -> None:
    return None


def late(message: Message, answer: Any) -> None:
    """The client trains, but its answer comes when nobody waits for it any more."""
    answer()


FAULTS = {
    garbage: "the message is not a JSON head followed by safetensors|truncated",
    foreign: "the records hold no message of ours",
    tampered: "the message is not|truncated",
    broken: "its SuperNode says: RuntimeError: the disk is gone",
    silent: "it did not answer in time",
    late: "it did not answer in time",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_failing_client_is_refused_and_comes_back(fault: Any, tmp_path: Path) -> None:
    """It fails in round 2 of 4; rounds go on without it, and from round 3 on its answers are used again."""
    box = grid(3)

    def in_round_two(message: Message, answer: Any) -> Message | None:
        reply = fault if message.metadata.group_id == "2" else lambda message, answer: answer()
        return reply(message, answer)  # type: ignore[no-any-return]

    box.faults[101] = in_round_two
    out = tmp_path / "run"
    settings: dict[str, Any] = {"method": "scaffold + fedpart(full_rounds=1)", "participation": 3}
    found = silos(box, timeout=0.3 if fault in (silent, late) else 5.0, out=out, **settings)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [[r["client"] for r in row["refused"]] for row in rows] == [[], [1], [], []]
    assert re.search(FAULTS[fault], rows[1]["refused"][0]["why"])
    assert found.state.remembers.tolist() == [3, 3, 3]


def test_a_memory_that_was_not_accepted_is_forgotten() -> None:
    """`late` trained in round 2 and wrote a memory, `silent` did not: what follows is the same."""
    ends = []
    for fault in (silent, late):
        box = grid(3)
        box.faults[101] = lambda message, answer, fault=fault: (  # type: ignore[misc]
            fault(message, answer) if message.metadata.group_id == "2" else answer()
        )
        ends.append(silos(box, method="scaffold + feddyn", participation=3, timeout=0.3))
    check_same(*ends)


def test_a_node_that_is_away_is_refused_and_found_again_under_another_number() -> None:
    box = grid(3)
    gone = box.contexts[101]

    def leave(message: Message, answer: Any) -> Message:
        if message.metadata.group_id == "2":
            box.online.discard(101)
        if message.metadata.group_id == "3":
            box.contexts[999], gone.node_id = gone, 999
            box.online.add(999)
        reply: Message = answer()
        return reply

    box.faults[100] = box.faults[102] = leave
    found = silos(box, method="scaffold", participation=3, rounds=5)
    assert why(found) == ["its SuperNode is not connected"]
    assert [[r["client"] for r in record.refused] for record in found.records] == [[], [], [1], [], []]


def test_a_node_that_has_lost_its_memory_begins_anew() -> None:
    """Its state is gone, as after a restart of the SuperNode; parameters are sent again without a word."""
    box = grid(3)

    def restarted(message: Message, answer: Any) -> Message:
        if message.metadata.group_id == "3":
            box.contexts[101].state.clear()
        reply: Message = answer()
        return reply

    box.faults[101] = restarted
    found = silos(box, method="scaffold + fedpart(full_rounds=1)", participation=3, rounds=5)
    assert why(found) == ["it has lost what it remembered, and will begin anew"]
    assert found.state.remembers.tolist() == [4, 4, 4]
    box = grid(3)
    box.faults[101] = restarted
    check_same(silos(box, method="fedpart(full_rounds=1)", participation=3), serial(3, method="fedpart(full_rounds=1)"))


def test_clients_are_asked_for_strata_of_their_own() -> None:
    """A choice by client, from numbers that sites send: the same as in one process."""
    settings: dict[str, Any] = {"method": "select(score='snr', per='client', full_rounds=1)", "rounds": 4}
    check_same(silos(grid(3), participation=2, **settings), serial(3, participation=2, **settings))


def test_a_context_that_comes_late_is_waited_for() -> None:
    """A node is asked before Flower has kept what it remembers: it is asked once more, and nothing is lost."""
    world = grid(3)
    late: dict[str, Any] = {}

    def stale(message: Message, answer: Any) -> Message:
        state = world.contexts[101].state
        if message.metadata.group_id == "3" and not late:
            late.update({name: state[name] for name in state if name != "fedstrata"})
            for name in late:
                del state[name]
            reply: Message = answer()
            state.update(late)
            return reply
        return answer()  # type: ignore[no-any-return]

    world.faults[101] = stale
    fed = silos(world, participation=3, method="scaffold")
    assert late
    check_same(fed, serial(3, method="scaffold", participation=3))


def test_a_run_in_which_nothing_can_be_used_stops() -> None:
    """They answer, and every answer is refused."""
    world = grid(3)

    def other(message: Message, answer: Any) -> Message:
        reply: Message = answer()
        head, update = from_records(reply.content, TrainReply, 10**9)
        reply.content = to_records(head, wire.encode(replace(wire.decode_update(update), method="0" * 16)))
        return reply

    for node in (100, 101, 102):
        world.faults[node] = other
    with pytest.raises(fs.UsageError, match="nothing that can be used came from any client in 3 rounds in a row"):
        silos(world, participation=3, rounds=8)


def test_one_client_alone_does_not_end_the_run_as_diverged() -> None:
    """Its numbers are not finite, and the others are away: that says nothing of the training."""
    world = grid(3)

    def endless(message: Message, answer: Any) -> Message:
        reply: Message = answer()
        head, update = from_records(reply.content, TrainReply, 10**9)
        sent = wire.decode_update(update)
        reply.content = to_records(
            head, wire.encode(replace(sent, delta={n: d * torch.nan for n, d in sent.delta.items()}))
        )
        return reply

    world.faults[100] = endless
    for node in (101, 102):
        world.faults[node] = lambda message, answer: (
            Message(Error(2, "broken"), reply_to=message) if message.metadata.group_id == "2" else answer()
        )
    fed = silos(world, participation=3, rounds=3)
    assert [len(record.refused) for record in fed.records] == [1, 3, 1]


def test_a_site_whose_first_answer_was_an_error_is_asked_again() -> None:
    world = grid(3)
    calls = iter([Error(2, "not yet"), Error(2, "not yet")])
    answer_message = world._answer

    def first_fails(node: int, message: Message) -> Any:
        error = next(calls, None) if node == 101 and message.metadata.message_type == "query" else None
        return answer_message(node, message) if error is None else Message(error, reply_to=message)

    world._answer = first_fails  # type: ignore[method-assign]
    assert not silos(world, participation=3, rounds=1).records[0].refused


def test_a_greeting_counts_as_a_whole() -> None:
    """A node that claims a client of somebody else's gets none at all."""
    configs = [{"partition-id": "0"}, {"partition-id": "1,0"}, {"partition-id": "1"}]
    world = Loopback(client_app(staged, data), configs)
    notes: list[str] = []
    directory = SiteDirectory(Transport(world, 5.0), 5.0, notes.append)  # type: ignore[arg-type]
    directory.gather(2)
    assert [directory.node(client) for client in (0, 1)] == [100, 102]
    assert len(notes) == 1
    assert "takes no part" in notes[0]


@pytest.mark.parametrize(
    "party", [{"population": 0}, {"population": 2**40}, {"shape": [2**20, 2**20]}, {"shape": [-1]}, {"examples": -1}]
)
def test_greetings_that_ask_for_too_much(party: dict[str, Any]) -> None:
    sound = {"client": 0, "examples": 3, "shape": [2], "dtype": "float32"}
    assert ClientInfo.model_validate(sound)
    with pytest.raises(ValidationError):
        ClientInfo.model_validate({**sound, **party})


def test_a_run_in_which_nobody_answers_stops() -> None:
    box = grid(3)
    box.faults = dict.fromkeys(box.contexts, garbage)
    with pytest.raises(fs.UsageError, match="came from any client in 3 rounds in a row"):
        silos(box, participation=3, rounds=20)


@pytest.mark.slow
def test_updates_that_come_before_their_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Client 1 never answers. All others are fetched long before its time is over, after which a SuperLink would throw
    them away: four at a time, and four of them stay in memory."""
    monkeypatch.setattr(server, "AHEAD_BYTES", 1)
    monkeypatch.setattr(transport, "LOOKS", 1)
    world = grid(12)
    world.faults[101] = lambda message, answer: None
    pulls: list[tuple[float, int, int]] = []
    filed: list[int] = []
    pull, write = world.pull_messages, ReorderBuffer._write

    def note_loss(numbers: Any) -> Any:
        found = list(pull(numbers))
        trained = sum(m.metadata.message_type == "train" for m in found)
        pulls.append((time.monotonic(), len(numbers), trained))
        return found

    def counted(early: ReorderBuffer, data: bytes) -> tuple[int, int]:
        filed.append(len(data))
        return write(early, data)

    monkeypatch.setattr(world, "pull_messages", note_loss)
    monkeypatch.setattr(ReorderBuffer, "_write", counted)
    fed = silos(world, participation=12, rounds=1, timeout=5.0, out=tmp_path / "run")
    assert fed.records[0].refused == [{"client": 1, "why": "it did not answer in time"}]
    trained = [row for row in pulls if row[2]]
    assert sum(row[2] for row in trained) == 11
    assert max(row[1] for row in trained) == AHEAD
    assert trained[-1][0] - trained[0][0] < 4
    assert len(filed) == 11 - 1 - AHEAD
    reference = grid(12)
    reference.faults[101] = lambda message, answer: Message(Error(2, "broken"), reply_to=message)
    other = silos(reference, participation=12, rounds=1)
    assert all(torch.equal(fed.state.params[name], tensor) for name, tensor in other.state.params.items())
    assert not strays(tmp_path)


def test_who_always_wants_everything_is_refused() -> None:
    """It is sent all parameters once more, and not again."""
    world = grid(3)
    head = ConfigRecord({"head": '{"lost":"parameters"}'})
    world.faults[101] = lambda message, answer: Message(RecordDict({"fedstrata": head}), reply_to=message)
    fed = silos(world, participation=3, rounds=3, method="fedpart(full_rounds=1)")
    assert [[row["client"] for row in record.refused] for record in fed.records] == [[1]] * 3
    assert len([m for m in world.sent if m.metadata.message_type == "train"]) <= 3 * 3 + 3


def test_nobody_answers_in_anothers_name() -> None:
    box = grid(3)
    stolen: list[Any] = []

    def watched(message: Message, answer: Any) -> Message:
        reply: Message = answer()
        stolen.append(reply.content)
        return reply

    box.faults[100] = watched
    box.faults[101] = lambda message, answer: Message(stolen[-1], reply_to=message)
    assert set(why(silos(box, participation=3))) == {"it answers for client 0"}


def test_an_update_beyond_the_limit_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstrata.flower.server.allowance", lambda weights: weights)
    reasons = why(silos(grid(3), participation=3, rounds=1))
    assert len(reasons) == 3
    assert all("and 792 are the limit" in reason for reason in reasons)


# Beginning, and going on ---------------------------------------------------------------------------------------------


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """A new server, and sites that lose their Flower state: what clients remember is in files of their own."""
    settings: dict[str, Any] = {"method": EIGHT, "rounds": 6, "out": tmp_path / "run"}
    keep = tmp_path / "site"
    box = grid(keep=keep)
    first = plan(**settings).with_config({})
    transport = Transport(box, 5.0)  # type: ignore[arg-type]
    directory = SiteDirectory(transport, 5.0, print)
    stopped = build_federation(first, transport, directory, directory.gather(None))
    rounds = stopped.rounds()
    for _ in range(3):
        next(rounds)
    del rounds, stopped
    found = silos(grid(keep=keep), **settings, resume=True)
    check_same(found, serial(method=EIGHT, rounds=6))
    assert (
        len(list(keep.iterdir())) <= 5 * 5
    )  # memories of two checkpoints and of what is pending, parameters of two rounds


@pytest.mark.parametrize("chain", [EIGHT, "fedavg + ccvr"])
def test_a_run_gets_more_rounds(chain: str, tmp_path: Path) -> None:
    """Also where a round after the last one was taken back: the sites have heard of it."""
    settings: dict[str, Any] = {"method": chain, "out": tmp_path / "run"}
    keep = tmp_path / "site"
    silos(grid(keep=keep), rounds=3, **settings)
    found = silos(grid(keep=keep), rounds=6, **settings, resume=True)
    assert not [refused for record in found.records for refused in record.refused]
    check_same(found, serial(method=chain, rounds=6))
    with pytest.raises(fs.UsageError, match="was run with rounds = 6, not 4: rounds can be added"):
        silos(grid(keep=keep), rounds=4, **settings, resume=True)


def test_a_run_whose_settings_were_edited_does_not_go_on(tmp_path: Path) -> None:
    silos(grid(), rounds=2, lr=0.1, out=tmp_path / "run")
    edit(tmp_path / "run", "lr", 0.2)
    with pytest.raises(fs.UsageError, match=r"run.toml was edited after the run began: lr was 0\.1, is 0\.2; put it"):
        silos(grid(), rounds=2, lr=0.2, out=tmp_path / "run", resume=True)


def test_clients_that_do_not_come() -> None:
    box = grid(3)
    box.online.discard(102)
    with pytest.raises(fs.UsageError, match=r"clients \[2\] of 3 did not come within 0.2 seconds"):
        silos(box, wait=0.2)
    box = Loopback(box.app, [{"partition-id": 0}])
    with pytest.raises(fs.UsageError, match="nobody says how many there are"):
        silos(box, wait=0.2)
    box = Loopback(box.app, [{"partition-id": 0, "num-partitions": 2}, {"partition-id": 0, "num-partitions": 2}, {}])
    with pytest.raises(fs.UsageError, match=r"clients \[1\] of 2"):
        silos(box, wait=0.2)


def test_a_round_without_anybody_ends_the_run_and_not_the_rounds() -> None:
    box = grid(3)

    def leave(message: Message, answer: Any) -> Message:
        box.online.clear()
        reply: Message = answer()
        return reply

    box.faults = dict.fromkeys(box.contexts, leave)
    with pytest.raises(fs.UsageError, match=r"none of this round's clients \[0, 1, 2\] was there for 0.2 seconds"):
        silos(box, participation=3, wait=0.2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "fedavgg"}, "did you mean"),
        ({"method": "local"}, "'local' is a reference"),
        ({"method": "centralised"}, "'centralised' is a reference"),
        ({"method": "fedbuff"}, "'fedbuff' takes updates in the order of simulated time"),
        ({"fleet": "a*3"}, "'fleet' has no meaning here"),
        ({"method": "fedper", "test": points(4, 0)}, "'fedper' keeps parts of the model at the sites"),
        ({"newcomers": 0.2}, "'newcomers' has no meaning here"),
        ({"probe": "visits cka"}, "the probe 'cka' has no meaning here"),
        ({"probe": "visits", "secure": True}, "the server sees no client's update"),
        ({"probe_examples": 9}, "'probe_examples' has no meaning here"),
        ({"workers": 2}, "'workers' has no meaning here"),
        ({"eval_clients": True}, "'eval_clients' has no meaning here"),
        ({"holdout": 0.2}, "'holdout' has no meaning here"),
        ({"faults": "signflip"}, "'faults' has no meaning here"),
        ({"round": 3}, r"there is no setting 'round' \(did you mean 'rounds'\?\)"),
        ({"timeout": 0}, "timeout = 0 does not fit: input should be greater than 0"),
        ({"clients": "3"}, "clients = '3' does not fit"),
        ({"out": 5}, "out = 5 does not fit"),
        ({"seed": "x"}, "seed = 'x' does not fit"),
        ({"participation": "all"}, "participation = 'all' does not fit"),
        ({"dp_clip": "abc"}, "dp_clip = 'abc' does not fit"),
        ({"secure_quorum": "x"}, "secure_quorum = 'x' does not fit"),
        ({"secure": 1}, "secure = 1 does not fit"),
    ],
)
def test_refusals(given: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.UsageError, match=message):
        server_app(staged, **given)


def test_probes_that_need_no_data(tmp_path: Path) -> None:
    """They find what they find where the data is, and change nothing; what cannot be seen is said."""
    settings: dict[str, Any] = {"probe": "all", "rounds": 3, "participation": 5}
    found = silos(grid(), **settings, out=tmp_path / "run")
    alone = serial(**{**settings, "probe": "proxy weightdiv cosine visits"})
    check_same(found, alone)
    assert [{**row, "seconds": 0, "missed": 0} for row in found.probes] == [
        {**row, "seconds": 0, "missed": 0} for row in alone.probes
    ]
    measured = {"proxy", "weightdiv", "cosine", "crossing", "scores", "aggregation", "visits"}
    assert found.probes[0]["seconds"].keys() == measured
    assert found.probes[-1]["visits"]["examples"] == [len(data(client)[1]) for client in range(5)]
    told = diagnose(SavedRun.read(tmp_path / "run"))
    assert "hostile-updates" in told.looked
    assert "broken-data" in told.looked
    assert "broken-labels" not in told.unmeasured
    (note,) = [note for note in told.notes if "Cannot be seen from the server" in note]
    assert "inputs and labels of single clients" in note
    assert "broken labels" in note


def test_the_run_configuration_goes_first() -> None:
    config = {"method": "fedprox(mu=0.5)", "rounds": 2, "batch-size": 3, "out": "", "my-own": 1}
    changed = plan(method="fedavg", rounds=9).with_config(config)
    assert changed.settings | {"method": "fedprox(mu=0.5)", "rounds": 2, "batch_size": 3} == changed.settings
    assert changed.out is None
    with pytest.raises(fs.UsageError, match="'workers' has no meaning here"):
        plan().with_config({"workers": 3})


def test_a_mistake_in_the_run_configuration_is_told_briefly() -> None:
    """Flower prints the traceback of what a ServerApp raises."""
    app, context = server_app(staged), Context(7, 1, {}, RecordDict(), {"method": "feddynn"})
    with pytest.raises(fs.UsageError, match=r"there is no method 'feddynn' \(did you mean 'feddyn'\?\)") as error:
        app(grid(1), context)  # type: ignore[arg-type]
    functions = [frame.name for frame in traceback.extract_tb(error.value.__traceback__)]
    assert functions[-1] == "main"
    assert error.value.__suppress_context__


def test_without_flower_there_is_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr.app", None)
    for call in (lambda: client_app(staged, data), lambda: server_app(staged)):
        with pytest.raises(fs.UsageError, match=r"pip install 'fedstrata\[flower\]'"):
            call()


# Tasks and inputs ----------------------------------------------------------------------------------------------------


class Answering(nn.Module):
    """Takes two inputs by name, and gives a dict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(5, 1)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(torch.cat([left, right], 1)).squeeze(1)}


def two_parts(client: int) -> Any:
    rng = torch.Generator().manual_seed(client)
    left, right = torch.randn(9 + client, 2, generator=rng), torch.randn(9 + client, 3, generator=rng)
    return {"left": left, "right": right}, left[:, 0] - right.sum(1)


def test_a_task_and_inputs_of_several_parts_at_sites() -> None:
    """Regression on two inputs by name, with an output in a dict: the bits of serial."""
    settings: dict[str, Any] = {"task": "regression(loss='huber')", "method": "scaffold", "rounds": 3, "lr": 0.1}
    box = Loopback(client_app(Answering, two_parts), sites(3))
    found = silos(box, model=Answering, test=two_parts(9), participation=3, batch_size=4, **settings)
    alone = fs.Federation(
        Answering(), [two_parts(c) for c in range(3)], two_parts(9), engine="serial", batch_size=4, **settings
    )
    alone.fit()
    check_same(found, alone)
    assert found.records[-1].primary == "rmse"
    assert [r.metrics for r in found.records] == [r.metrics for r in alone.records]


def test_a_site_that_learns_something_else() -> None:
    """One sentence for the server, which goes on without it."""
    box = Loopback(client_app(staged, data, task=build_task("classification(label_smoothing=0.1)")), sites(2))
    found = silos(box, participation=2, rounds=1)
    assert {row["why"] for row in found.records[0].refused} == {
        "it says: this site learns 'classification(label_smoothing=0.1)', and the server 'classification'"
    }
