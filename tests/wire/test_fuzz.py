"""Hostile bytes: the decoder refuses them in a sentence, and takes neither more memory nor more time than it says.

Memory is bounded by the kernel here, so that a test fails if anything asks for more: a message may take a few times its
own length (the bytes, safetensors' copy, and the tensors), and what its JSON says fifty times the length of that.
Time is the CPU's, and held against what an honest message of the same size takes in the same process.
"""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedstrata.wire import packing
from fedstrata.wire.messages import decode_assignment, decode_update, encode
from fedstrata.wire.packing import WireError
from tests.hostile import FAMILIES, honest, seconds
from tests.wire.test_messages import ASSIGNMENT_HEAD, UPDATE_HEAD, an_assignment, an_update, little_memory, message, row

FUZZ = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SOUND = [encode(an_update()), encode(an_assignment())]


def refusal(decode: Callable[[bytes], Any], data: bytes) -> str:
    """Why a decoder refuses bytes, nothing if it does not; whatever else it raises is a failure."""
    try:
        decode(data)
    except WireError as error:
        return str(error)
    return ""


def is_refused(data: bytes) -> bool:
    """True if nobody takes the bytes for a message."""
    sentences = [refusal(decode, data) for decode in (decode_update, decode_assignment)]
    assert all(len(sentence) < 300 for sentence in sentences)
    return all(sentences)


@given(st.binary(max_size=4096))
@FUZZ
def test_random_bytes(data: bytes) -> None:
    assert is_refused(data)


@given(st.sampled_from(SOUND), st.integers(0, 10_000))
@FUZZ
def test_truncated(sound: bytes, length: int) -> None:
    assert is_refused(sound[: length % len(sound)])


@given(st.sampled_from(SOUND), st.binary(min_size=1, max_size=64))
@FUZZ
def test_more_than_announced(sound: bytes, rest: bytes) -> None:
    assert is_refused(sound + rest)


@given(st.sampled_from(SOUND), st.lists(st.tuples(st.integers(0, 10_000), st.binary(max_size=8)), max_size=6))
@FUZZ
def test_spliced(sound: bytes, cuts: list[tuple[int, bytes]]) -> None:
    """Pieces cut out and others put in: lengths, offsets and names no longer fit each other."""
    for place, piece in cuts:
        at = place % (len(sound) + 1)
        sound = sound[:at] + piece + sound[at + len(piece) // 2 :]
    is_refused(sound)


LENGTHS = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([2**k + d for k in range(64) for d in (-1, 0)]))


@given(LENGTHS, LENGTHS, st.sampled_from([UPDATE_HEAD, ASSIGNMENT_HEAD]))
@FUZZ
def test_announced_lengths(first: int, second: int, head: Any) -> None:
    """Whatever a message says of its own lengths, nothing is allocated for it."""
    text = json.dumps(head).encode()
    data = first.to_bytes(8, "little") + text + second.to_bytes(8, "little") + b"{}      "
    right = len(text).to_bytes(8, "little") + text + second.to_bytes(8, "little") + b"{}      "
    with little_memory(64 * 2**20):
        is_refused(data)
        is_refused(right)


SIZES = st.one_of(st.integers(-2, 6), st.integers(2**20, 2**64), st.floats(), st.text(max_size=2), st.none())
ROWS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*packing._TORCH, "F8_E4M3", "U64", "", "F32 "]),
        "shape": st.lists(SIZES, max_size=4),
        "data_offsets": st.lists(SIZES, min_size=1, max_size=3),
    }
)
NAMES = st.sampled_from(["delta/a", "delta/", "param/a", "buffer/a", "slot:t/a", "", "__metadata__", "delta/\x00", "/"])


@given(
    st.sampled_from([UPDATE_HEAD, ASSIGNMENT_HEAD]), st.dictionaries(NAMES, ROWS, max_size=4), st.binary(max_size=32)
)
@FUZZ
def test_hostile_indices(head: Any, index: Any, data: bytes) -> None:
    """Shapes and offsets of any size and type: tensors are no larger than the bytes that came."""
    with little_memory(64 * 2**20):
        is_refused(message(head, index, data))


@given(st.binary(max_size=2000), st.sampled_from(["delta", "buffer", "slot:t"]))
@FUZZ
def test_what_is_accepted_is_no_larger_than_what_came(data: bytes, section: str) -> None:
    sound = message({**UPDATE_HEAD, "slots": ["t"]}, {f"{section}/a": row("U8", [len(data)], len(data))}, data)
    update = decode_update(sound)
    tensors = [*update.delta.values(), *update.buffers.values(), *update.slots["t"].values()]
    assert sum(t.nbytes for t in tensors) == len(data)


def peak_of(data: bytes) -> int:
    """Bytes that were taken while a message was refused, at most."""
    tracemalloc.start()
    try:
        assert is_refused(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "filler", ["[],", "{},", '"",', "0.5,", '{"a":0},', "[[[]]],", "[[[[[[[[]]]]]]]],", '"\\u00e9",', "1e308,"]
)
@pytest.mark.parametrize("where", ["head", "index"])
def test_json_that_swells(filler: str, where: str) -> None:
    """A byte of JSON takes at most fifty in memory; its limit makes that 200 MB at the very most."""
    text = b'{"a":[' + filler.encode() * (2**16 // len(filler)) + b"0]}"
    data = message(text, {}) if where == "head" else message(UPDATE_HEAD, text)
    assert peak_of(data) < 50 * len(data)


@pytest.mark.parametrize("where", ["head", "index"])
def test_json_beyond_the_limit_is_not_parsed(where: str) -> None:
    text = b'{"a":"' + b"x" * packing.HEAD_LIMIT + b'"}'
    data = message(text, {}) if where == "head" else message(UPDATE_HEAD, text)
    assert peak_of(data) < 2**20


PART = 500_000
"""Bytes of the parts of a slow message: what takes their square then takes several hundred times what is honest."""
SLOW = 40
"""How many times as much of the CPU as an honest byte a hostile one may take; the slowest family takes 8 times."""


@pytest.fixture(scope="module")
def usual() -> Iterator[float]:
    """CPU seconds for a megabyte of an honest message; what was there before is not looked at by the collector."""
    gc.collect()
    gc.freeze()
    yield max(seconds(honest(PART)) for _ in range(3))
    gc.unfreeze()


@pytest.mark.parametrize("family", FAMILIES)
def test_no_byte_takes_long(family: str, usual: float) -> None:
    data = FAMILIES[family](PART)
    assert min(seconds(data) for _ in range(2)) < SLOW * usual


@pytest.mark.parametrize("family", FAMILIES)
def test_slow_messages_are_refused_in_a_sentence(family: str) -> None:
    """Or read, where they are nothing but large."""
    is_refused(FAMILIES[family](5000))


def with_slots(names: list[str]) -> bytes:
    return message({**UPDATE_HEAD, "slots": names}, {})


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (with_slots([str(k) for k in range(packing.FEW + 1)]), "lists 257 slots, and 256 are the limit"),
        (with_slots(["t", "u", "t"]), "one of its slots twice"),
        (with_slots(["t", "t/u"]), "holds a '/'"),
        (message({**UPDATE_HEAD, "metrics": {str(k): 0.5 for k in range(packing.FEW + 1)}}, {}), "not an update"),
        (message(UPDATE_HEAD, {"delta/a": row("U8", [0] * 65, 0)}), "impossible shape"),
    ],
)
def test_what_an_update_may_not_list(data: bytes, why: str) -> None:
    assert why in refusal(decode_update, data)


@pytest.mark.parametrize(
    ("field", "what"), [("trains", "train"), ("travels", "send"), ("reports", "report"), ("moves", "move")]
)
def test_a_name_that_an_assignment_lists_twice(field: str, what: str) -> None:
    tensors = {"param/a": row("F32", [1], 4)}
    data = message({**ASSIGNMENT_HEAD, field: ["a", "a"]}, tensors, bytes(4))
    assert refusal(decode_assignment, data) == f"the message lists one of its names to {what} twice"


def test_as_many_slots_as_there_may_be() -> None:
    names = [str(k) for k in range(packing.FEW)]
    index = {f"slot:{name}/a": row("U8", [1], k + 1, k) for k, name in enumerate(names)}
    update = decode_update(message({**UPDATE_HEAD, "slots": names}, index, bytes(range(256))))
    assert [slot["a"].item() for slot in update.slots.values()] == list(range(256))
