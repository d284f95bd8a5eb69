"""Messages: round trips, sizes, and bytes that are not ours."""

from __future__ import annotations

import json
import random
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load as load_safetensors
from torch import Tensor

from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Assignment, Update, Work
from fedstrata.wire.messages import decode_assignment, decode_update, encode
from fedstrata.wire.packing import REMEMBERED, WireError, bytes_of, pack, unpack
from fedstrata.wire.sizes import size

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def raw(tensor: Tensor) -> bytes:
    """A tensor's bytes by another road than the code's: through a list of its elements' storage."""
    flat = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).flatten()
    return bytes(flat.untyped_storage().tolist()) if flat.numel() else b""


def same(left: Tensors, right: Tensors) -> bool:
    """The same names in the same order, with the same dtypes, shapes and bits (NaNs too)."""
    if list(left) != list(right):
        return False
    return all(
        a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
        for a, b in zip(left.values(), right.values(), strict=True)
    )


def same_slots(left: dict[str, Tensors], right: dict[str, Tensors]) -> bool:
    return list(left) == list(right) and all(same(left[t], right[t]) for t in left)


# A name may hold dots, slashes and any script; a surrogate alone is no character.
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    count = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def named_tensors(max_size: int = 4) -> st.SearchStrategy[Tensors]:
    return st.dictionaries(NAMES, tensors(), max_size=max_size)


SLOTS = st.dictionaries(st.sampled_from(["scaffold", "fedimpro", "moon"]), named_tensors(2), max_size=3)


@st.composite
def updates(draw: st.DrawFn) -> Update:
    whole = st.integers(0, 2**63)
    return Update(
        round=draw(whole),
        client=draw(whole),
        method=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=20)),
        examples=draw(whole),
        steps=draw(whole),
        delta=draw(named_tensors()),
        buffers=draw(named_tensors()),
        slots=draw(SLOTS),
        metrics=draw(st.dictionaries(NAMES, st.floats(), max_size=3)),
    )


@st.composite
def assignments(draw: st.DrawFn) -> Assignment:
    params = draw(named_tensors())
    names = list(params)
    some = st.lists(st.sampled_from(names), unique=True) if names else st.just([])
    trains = draw(some | st.just(names))
    ordered = tuple(n for n in names if n in trains)
    buffers = {f"statistic {n}": t for n, t in draw(named_tensors()).items()}
    known = [*names, *buffers]
    either = st.lists(st.sampled_from(known), unique=True) if known else st.just([])
    fresh = draw(st.none() | either.map(lambda chosen: tuple(n for n in known if n in chosen)))
    return Assignment(
        round=draw(st.integers(0, 10**6)),
        client=draw(st.integers(0, 10**6)),
        arch=draw(NAMES),
        params=params,
        buffers=buffers,
        trains=ordered,
        uploads=ordered if draw(st.booleans()) else tuple(n for n in ordered if draw(st.booleans())),
        work=Work(
            epochs=draw(st.integers(1, 9)),
            steps=draw(st.none() | st.integers(1, 9)),
            lr=draw(st.floats(1e-9, 1e3)),
            optimizer=draw(st.sampled_from(["sgd", "adam(beta1=0.5)"])),
            clip=draw(st.none() | st.floats(1e-3, 9.0)),
        ),
        seed=draw(st.integers(0, 2**63 - 1)),
        method=draw(NAMES),
        slots=draw(SLOTS),
        to_send=None if fresh is None or len(fresh) == len(known) else fresh,
        upload_buffers=draw(st.none() | st.just(tuple(buffers)[1:])),
        update_buffers=tuple(buffers)[:1] if draw(st.booleans()) else None,
        cache_prefix=draw(st.booleans()),
    )


def an_assignment(**changes: Any) -> Assignment:
    params = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.zeros(2), "b.weight": torch.ones(1, 2)}
    names = tuple(params)
    plain = Assignment(
        3, 7, "", params, {"a.count": torch.tensor(5)}, names, names, Work(), 11, "digest", {"t": {"c": torch.ones(2)}}
    )
    return replace(plain, **changes)


def an_update(**changes: Any) -> Update:
    plain = Update(
        round=3,
        client=7,
        method="digest",
        examples=10,
        steps=2,
        delta={"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.full((2,), 0.5)},
        buffers={"a.count": torch.tensor(5)},
        slots={"t": {"c": torch.ones(2)}},
        metrics={"flops": 12.0, "train_loss": 0.25},
    )
    return replace(plain, **changes)


# Round trips ------------------------------------------------------------------------------------------------


@given(updates())
@settings(max_examples=150, deadline=None)
def test_an_update_survives_its_bytes(update: Update):
    back = decode_update(encode(update))
    for name in ("round", "client", "method", "examples", "steps"):
        assert getattr(back, name) == getattr(update, name)
    assert list(back.metrics) == list(update.metrics)
    assert [repr(v) for v in back.metrics.values()] == [repr(v) for v in update.metrics.values()]
    assert same(back.delta, update.delta)
    assert same(back.buffers, update.buffers)
    assert same_slots(back.slots, update.slots)


@given(assignments())
@settings(max_examples=150, deadline=None)
def test_an_assignment_survives_its_bytes(assignment: Assignment):
    """What the client holds already comes from it, all else from the message."""
    fresh = assignment.to_send

    def stale(tensors: Tensors) -> Tensors:
        return {n: torch.zeros(1) if n in (fresh or ()) else t for n, t in tensors.items()}

    held = replace(assignment, params=stale(assignment.params), buffers=stale(assignment.buffers))
    back = decode_assignment(encode(assignment), None if fresh is None else held)
    plan = ("trains", "uploads", "upload_buffers", "update_buffers", "cache_prefix")
    for name in ("round", "client", "arch", *plan, "work", "seed", "method", "to_send"):
        assert getattr(back, name) == getattr(assignment, name), name
    assert same(back.params, assignment.params)
    assert same(back.buffers, assignment.buffers)
    assert same_slots(back.slots, assignment.slots)


@given(st.one_of(updates(), assignments()))
@settings(max_examples=150, deadline=None)
def test_size_is_the_length_of_the_bytes(message: Update | Assignment):
    assert size(message) == len(encode(message))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,), (3, 2)])
def test_every_type_and_shape(dtype: torch.dtype, shape: tuple[int, ...]):
    tensor = (torch.arange(torch.Size(shape).numel()) % 2).to(dtype).reshape(shape)
    back = decode_update(encode(an_update(delta={"x": tensor}))).delta["x"]
    assert back.dtype == dtype
    assert back.shape == shape
    assert torch.equal(back, tensor)


def test_tensors_that_are_not_contiguous():
    """Transposed, strided and expanded: the values travel, in row-major order."""
    base = torch.arange(12.0).view(3, 4)
    given_ = {"t": base.t(), "strided": base[:, ::2], "expanded": torch.tensor([7.0]).expand(3), "offset": base[1:]}
    message = encode(an_update(delta=given_))
    back = decode_update(message).delta
    assert back["t"].tolist() == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    assert back["strided"].tolist() == [[0, 2], [4, 6], [8, 10]]
    assert back["expanded"].tolist() == [7, 7, 7]
    assert back["offset"].tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert size(an_update(delta=given_)) == len(message)


def test_a_parameter_that_requires_grad_travels_as_numbers():
    back = decode_update(encode(an_update(delta={"w": torch.nn.Parameter(torch.ones(2))}))).delta["w"]
    assert not back.requires_grad
    assert back.tolist() == [1.0, 1.0]


def test_what_was_decoded_can_be_written_to():
    back = decode_update(encode(an_update())).delta["a.weight"]
    back += 1
    assert back.tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    "names",
    [
        ["z", "a", "m"],
        ["features.10.weight", "features.9.weight", "features.2.weight"],
        ["a/b", "a", "b/a", "param/a", "slot:t/a", "/", "//", ""],
        ["ваги", "層.重み", "σ²", "\u00e9", "e\u0301", '"quoted"', "back\\slash", "\x00", "\u2028", "🦙"],
        ["__metadata__", "x"],
    ],
)
def test_names_keep_their_letters_and_their_order(names: list[str]):
    values = {name: torch.tensor(float(i)) for i, name in enumerate(names)}
    back = decode_update(encode(an_update(delta=values, buffers=values, slots={"t": values, "u": values})))
    for section in (back.delta, back.buffers, back.slots["t"], back.slots["u"]):
        assert list(section) == names
        assert [t.item() for t in section.values()] == list(range(len(names)))


def test_empty_slots_and_sections():
    back = decode_update(encode(an_update(delta={}, buffers={}, slots={"t": {}}, metrics={})))
    assert (back.delta, back.buffers, back.slots, back.metrics) == ({}, {}, {"t": {}}, {})


def test_a_diverged_client_can_say_so():
    """NaN and infinite losses and deltas must reach the server: it is the server that refuses them, with a reason."""
    back = decode_update(
        encode(
            an_update(metrics={"train_loss": float("nan"), "flops": float("inf")}, delta={"w": torch.tensor(torch.nan)})
        )
    )
    assert str(back.metrics["train_loss"]) == "nan"
    assert back.metrics["flops"] == float("inf")
    assert back.delta["w"].isnan()


def test_an_assignment_that_trains_nothing():
    """Two plans may have nothing in common; the client must then not train everything."""
    back = decode_assignment(encode(an_assignment(trains=(), uploads=())))
    assert back.trains == ()
    assert back.uploads == ()


# What travels down ------------------------------------------------------------------------------------------


def test_only_fresh_parameters_travel():
    """b.weight is two float32, 8 bytes; the message loses the others' 6·4 + 2·4 bytes and their index entries."""
    whole, part = an_assignment(), an_assignment(to_send=("b.weight",))
    _, packed = unpack(encode(part))
    assert [n for n in packed if n.startswith("param/")] == ["param/b.weight"]
    assert "param/a.weight" in unpack(encode(whole))[1]
    assert len(encode(whole)) - len(encode(part)) >= 32
    assert size(part) == len(encode(part))


def test_nothing_fresh_sends_no_parameter():
    part = an_assignment(to_send=())
    assert not any(n.startswith(("param/", "buffer/")) for n in unpack(encode(part))[1])
    back = decode_assignment(encode(part), part)
    assert same(back.params, part.params)
    assert same(back.buffers, part.buffers)
    assert back.to_send == ()


def test_running_statistics_that_are_not_fresh_stay_at_home():
    whole, part = an_assignment(), an_assignment(to_send=("a.weight", "a.bias", "b.weight"))
    assert size(part) < size(whole)
    held = replace(whole, buffers={"a.count": torch.tensor(4)})
    assert decode_assignment(encode(part), held).buffers["a.count"].item() == 4
    assert decode_assignment(encode(replace(part, to_send=("a.count",))), held).buffers["a.count"].item() == 5


def test_held_parameters_fill_the_gaps_and_fresh_ones_win():
    part = an_assignment(to_send=("b.weight",))
    held = {"a.weight": torch.zeros(2, 3), "a.bias": torch.ones(2), "b.weight": torch.full((1, 2), -1.0)}
    back = decode_assignment(encode(part), replace(part, params=held))
    assert list(back.params) == ["a.weight", "a.bias", "b.weight"]
    assert back.params["a.weight"] is held["a.weight"]
    assert back.params["b.weight"].tolist() == [[1.0, 1.0]]
    assert held["b.weight"].tolist() == [[-1.0, -1.0]]


def test_a_client_that_holds_nothing_cannot_read_a_part():
    with pytest.raises(WireError, match="does not hold"):
        decode_assignment(encode(an_assignment(to_send=("b.weight",))))
    empty = an_assignment(params={}, buffers={})
    with pytest.raises(WireError, match="does not bring"):
        decode_assignment(encode(an_assignment(to_send=("b.weight",), trains=("a.bias",), uploads=("a.bias",))), empty)


# The form ---------------------------------------------------------------------------------------------------


def test_the_form_is_a_json_head_and_a_safetensors_file():
    """8 bytes with the head's length, the head, and bytes that the safetensors library reads without our help."""
    message = encode(an_update())
    length = int.from_bytes(message[:8], "little")
    head = json.loads(message[8 : 8 + length])
    assert head == {
        "round": 3,
        "client": 7,
        "method": "digest",
        "examples": 10,
        "steps": 2,
        "metrics": {"flops": 12.0, "train_loss": 0.25},
        "slots": ["t"],
    }
    loaded = load_safetensors(message[8 + length :])
    assert set(loaded) == {"delta/a.weight", "delta/a.bias", "buffer/a.count", "slot:t/c"}
    assert loaded["delta/a.weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert loaded["buffer/a.count"].dtype == torch.int64


@given(named_tensors())
@settings(max_examples=60, deadline=None)
def test_safetensors_reads_whatever_we_write(tensors: Tensors):
    message = pack({}, {f"x/{n}": t for n, t in tensors.items()})
    loaded = load_safetensors(message[8 + 2 :])
    assert same({n: loaded[f"x/{n}"] for n in tensors}, tensors)


def test_tensor_data_begins_at_a_multiple_of_eight_in_its_file():
    """So that a reader may map it: safetensors' header (8 bytes and its text) is padded with spaces."""
    for name in ("a", "ab", "abc", "abcdefgh"):
        message = pack({}, {name: torch.ones(1)})
        body = message[10:]
        assert (8 + int.from_bytes(body[:8], "little")) % 8 == 0
        assert body[-4:] == b"\x00\x00\x80\x3f"


def test_pack_and_unpack():
    head = {"numbers": [1, 2.5, None, True], "text": "é"}
    tensors = {"x": torch.tensor([1, 2], dtype=torch.int16)}
    back, values = unpack(pack(head, tensors))
    assert back == head
    assert same(values, tensors)
    assert unpack(pack({}, {})) == ({}, {})


def test_bytes_of_a_contiguous_tensor_are_its_own():
    tensor = torch.tensor([1, 2], dtype=torch.int16)
    view = bytes_of(tensor)
    assert bytes(view) == b"\x01\x00\x02\x00"
    tensor[0] = 3
    assert bytes(view) == b"\x03\x00\x02\x00"


# Bytes that are not ours ------------------------------------------------------------------------------------


@contextmanager
def little_memory(extra: int = 256 * 2**20) -> Iterator[None]:
    """No more than a quarter of a gigabyte may be taken inside; a larger request fails with an error of its own."""
    if sys.platform != "linux":
        yield
        return
    import resource

    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + extra, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def read(message: bytes) -> bool:
    """Give bytes to both readers; True if one accepts them. Anything but an answer or a WireError is a failure."""
    accepted = False
    for decode in (decode_update, decode_assignment):
        try:
            decode(message)
            accepted = True
        except WireError:
            pass
    return accepted


def message(head: Any, index: Any, data: bytes = b"") -> bytes:
    """A message from a head and a safetensors header, each as bytes or to be dumped as JSON."""
    parts = [part if isinstance(part, bytes) else json.dumps(part).encode() for part in (head, index)]
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts) + data


UPDATE_HEAD = {"round": 0, "client": 0, "method": "m", "examples": 1, "steps": 1, "metrics": {}, "slots": []}
ASSIGNMENT_HEAD = {
    "round": 0,
    "client": 0,
    "rounds": 9,
    "run_seed": 3,
    "arch": "",
    "trains": None,
    "travels": None,
    "held": False,
    "work": {},
    "seed": 0,
    "method": "m",
    "slots": [],
}


def row(dtype: str, shape: list[int], end: int, begin: int = 0) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_the_hand_made_messages_below_are_read_when_sound():
    """Else the refusals below would prove nothing."""
    sound = {"delta/a": row("F32", [1], 4)}
    assert decode_update(message(UPDATE_HEAD, sound, b"\x00\x00\x80\x3f")).delta["a"].tolist() == [1.0]
    sound = {"param/a": row("F32", [1], 4)}
    assert decode_assignment(message(ASSIGNMENT_HEAD, sound, b"\x00\x00\x80\x3f")).trains == ("a",)


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_random_bytes(data: bytes):
    assert not read(data)


@given(st.binary(max_size=100), st.binary(max_size=100), st.binary(max_size=40))
@settings(max_examples=200, deadline=None)
def test_random_bytes_in_the_right_frame(head: bytes, index: bytes, data: bytes):
    assert not read(message(head, index, data))


@pytest.mark.parametrize("sound", [encode(an_update()), encode(an_assignment())], ids=["update", "assignment"])
def test_truncated_at_every_length(sound: bytes):
    assert read(sound)
    assert not any(read(sound[:length]) for length in range(len(sound)))


@pytest.mark.parametrize("sound", [encode(an_update()), encode(an_assignment())], ids=["update", "assignment"])
def test_more_bytes_than_announced(sound: bytes):
    assert not read(sound + b"\x00")
    assert not read(sound + sound)


@pytest.mark.parametrize("sound", [encode(an_update()), encode(an_assignment())], ids=["update", "assignment"])
def test_flipped_bytes(sound: bytes):
    """Every byte, flipped whole and in one bit: an answer (the flip hit a number) or a WireError, nothing else."""
    rng = random.Random(0)
    refused = 0
    for position in range(len(sound)):
        for mask in (0xFF, 1 << rng.randrange(8)):
            damaged = bytearray(sound)
            damaged[position] ^= mask
            refused += not read(bytes(damaged))
    assert refused > len(sound)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_many_flipped_bytes(data: st.DataObject):
    sound = bytearray(encode(an_update()) if data.draw(st.booleans()) else encode(an_assignment()))
    flips = st.tuples(st.integers(0, len(sound) - 1), st.integers(0, 255))
    for position, value in data.draw(st.lists(flips, max_size=8)):
        sound[position] = value
    read(bytes(sound))


@pytest.mark.parametrize("length", [2**20, 2**31, 2**32, 2**40, 2**62, 2**63, 2**64 - 9, 2**64 - 8, 2**64 - 1])
def test_huge_announced_lengths(length: int):
    announced = length.to_bytes(8, "little")
    head = json.dumps(UPDATE_HEAD).encode()
    with little_memory():
        assert not read(announced + head)
        assert not read(announced)
        assert not read(len(head).to_bytes(8, "little") + head + announced + b"{}")


@pytest.mark.parametrize(
    "index",
    [
        {"delta/a": row("F32", [2**30], 2**32)},
        {"delta/a": row("F32", [2**62], 2**64)},
        {"delta/a": row("F32", [2**30], 4)},
        {"delta/a": row("F32", [2**32, 2**32], 4)},
        {"delta/a": row("F32", [-1], 4)},
        {"delta/a": row("F32", [1], -4)},
        {"delta/a": row("F32", [1], 4, begin=8)},
        {"delta/a": row("F32", [1], 0)},
        {"delta/a": row("F32", [0], 4)},
        {"delta/a": row("F64", [1], 4)},
        {"delta/a": row("F32", [1], 4), "delta/b": row("F32", [1], 4)},
        {"delta/a": row("F32", [1.5], 4)},
        {"delta/a": row("F32", [True], 4)},
        {"delta/a": row("F32", ["1"], 4)},
        {"delta/a": row("F32", [1e300], 4)},
        {"delta/a": row("F99", [1], 4)},
        {"delta/a": row("F8_E4M3", [4], 4)},
        {"delta/a": row("U16", [2], 4)},
        {"delta/a": {"dtype": "F32", "shape": [1]}},
        {"delta/a": {"dtype": 32, "shape": 1, "data_offsets": 4}},
        {"delta/a": None},
        {"__metadata__": {"a": 1}, "delta/a": row("F32", [1], 4)},
        {},
        [],
        [["delta/a", row("F32", [1], 4)]],
        None,
        3,
        "delta/a",
        b"",
        b"{",
        b"\xff\xfe",
        b'{"delta/a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}',
        b'{"delta/\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
    ids=lambda index: repr(index)[:60],
)
def test_a_wrong_index_of_tensors(index: Any):
    with little_memory():
        assert not read(message(UPDATE_HEAD, index, b"\x00" * 4))
        assert not read(message(ASSIGNMENT_HEAD, index, b"\x00" * 4))


@pytest.mark.parametrize("shape", [[0, 2**63], [0, 2**64 - 1], [2**63, 0]])
def test_an_empty_tensor_of_an_impossible_shape(shape: list[int]):
    with little_memory():
        assert not read(message(UPDATE_HEAD, {"delta/a": row("F32", shape, 0)}))
        assert not read(message(ASSIGNMENT_HEAD, {"param/a": row("F32", shape, 0)}))


@pytest.mark.parametrize("shape", [[0, 2**62, 2**62], [0, 2**40, 2**40], [2**62, 0], [0, 2**63 - 1]])
def test_an_empty_tensor_of_a_strange_shape(shape: list[int]):
    """Its strides overflow: it may be refused or be read as nothing, but nothing else may happen."""
    with little_memory():
        read(message(UPDATE_HEAD, {"delta/a": row("F32", shape, 0)}))
        read(message(ASSIGNMENT_HEAD, {"param/a": row("F32", shape, 0)}))


@pytest.mark.parametrize("axes", [1, 64])
@pytest.mark.parametrize("length", [0, 1])
def test_as_many_axes_as_torch_has(axes: int, length: int):
    data = b"\x00" * 4 * length
    update = decode_update(message(UPDATE_HEAD, {"delta/a": row("F32", [length] * axes, len(data))}, data))
    assert update.delta["a"].dim() == axes


@pytest.mark.parametrize("axes", [65, 3000])
@pytest.mark.parametrize("length", [0, 1])
def test_more_axes_than_torch_has(axes: int, length: int):
    """`torch.isfinite` fails on them, which would end a server's run: no message brings them."""
    data = b"\x00" * 4 * length
    assert not read(message(UPDATE_HEAD, {"slot:t/a": row("F32", [length] * axes, len(data))}, data))


WRONG = [None, True, "1", 1.5, [1], {"a": "b"}, [None], {"a": None}]


@pytest.mark.parametrize(
    ("name", "wrong"), [(n, w) for n in UPDATE_HEAD for w in WRONG if (n, w) not in [("method", "1")]]
)
def test_wrong_types_in_the_head_of_an_update(name: str, wrong: Any):
    assert not read(message({**UPDATE_HEAD, name: wrong}, {}))


RIGHT = [("method", "1"), ("arch", "1"), ("trains", None), ("travels", None)]


@pytest.mark.parametrize(("name", "wrong"), [(n, w) for n in ASSIGNMENT_HEAD for w in WRONG if (n, w) not in RIGHT])
def test_wrong_types_in_the_head_of_an_assignment(name: str, wrong: Any):
    """`held=True` is of the right type, but nothing is held; inside `work`, `a` is no setting."""
    assert not read(message({**ASSIGNMENT_HEAD, name: wrong}, {}))


@pytest.mark.parametrize("head", [UPDATE_HEAD, ASSIGNMENT_HEAD], ids=["update", "assignment"])
def test_missing_and_additional_fields(head: dict[str, Any]):
    assert read(message(head, {}))
    assert not read(message({**head, "more": 1}, {}))
    for name in head:
        assert not read(message({n: v for n, v in head.items() if n != name}, {}))


@pytest.mark.parametrize("wrong", [[], {"epoch": 1}, {"epochs": 1, "lr": 0.1, "more": 1}])
def test_work_of_another_form(wrong: Any):
    assert not read(message({**ASSIGNMENT_HEAD, "work": wrong}, {}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": "many"},
        {"epochs": 1.5},
        {"steps": [1]},
        {"batch_size": None},
        {"optimizer": 3},
        {"lr": "fast"},
        {"epochs": "3"},
        {"epochs": True},
        {"lr": "0.1"},
    ],
)
def test_wrong_types_in_the_work(wrong: Any):
    assert not read(message({**ASSIGNMENT_HEAD, "work": wrong}, {}))


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"3",
        b'"x"',
        b"{'round': 0}",
        b"[" * 100_000,
        b'{"round":' * 100_000,
        b'{"a":[' * 50_000 + b"]}" * 50_000,
        b"\x00\x00",
        b"\xff\xfe\x00",
        b"9" * 10_000,
        json.dumps({**UPDATE_HEAD, "round": float("nan")}).encode(),
        json.dumps({**UPDATE_HEAD, "steps": float("inf")}).encode(),
        json.dumps({**ASSIGNMENT_HEAD, "seed": float("nan")}).encode(),
        json.dumps({**UPDATE_HEAD, "metrics": {"flops": 10**400}}).encode(),
        json.dumps({**UPDATE_HEAD, "round": 0}).encode().replace(b'"round": 0', b'"round": ' + b"9" * 5000),
    ],
    ids=lambda head: repr(head[:40]),
)
def test_a_wrong_head(head: bytes):
    assert not read(message(head, {}))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from([UPDATE_HEAD, ASSIGNMENT_HEAD]), st.data())
@settings(max_examples=200, deadline=None)
def test_any_json_in_any_field(head: dict[str, Any], data: st.DataObject):
    fields = [n for n in head if n != "work"]
    changed = data.draw(st.dictionaries(st.sampled_from(fields), JSON, min_size=1, max_size=3))
    read(message({**head, **changed}, data.draw(st.just({}) | JSON)))


def test_a_head_that_is_too_long_is_not_even_read(monkeypatch: pytest.MonkeyPatch):
    sound = encode(an_update(delta={}, buffers={}, slots={}))
    length = int.from_bytes(sound[:8], "little")
    monkeypatch.setattr("fedstrata.wire.packing.HEAD_LIMIT", length)
    assert read(sound)
    monkeypatch.setattr("fedstrata.wire.packing.HEAD_LIMIT", length - 1)
    with pytest.raises(WireError, match="head is too long"):
        decode_update(sound)


def test_an_index_that_is_too_long_is_not_even_read(monkeypatch: pytest.MonkeyPatch):
    sound = pack({}, {"a name that is longer than the head": torch.ones(1)})
    length = int.from_bytes(sound[10:18], "little")
    monkeypatch.setattr("fedstrata.wire.packing.HEAD_LIMIT", length)
    assert unpack(sound)
    monkeypatch.setattr("fedstrata.wire.packing.HEAD_LIMIT", length - 1)
    with pytest.raises(WireError, match="index is too long"):
        unpack(sound)


LONG = "x" * 2**20


@pytest.mark.parametrize(
    "changes",
    [
        lambda n: {"delta": dict.fromkeys([f"{n} {i} {LONG[:2000]}" for i in range(500)], torch.ones(1))},
        lambda n: {"delta": {f"{n}{LONG}": torch.ones(1)}},
        lambda n: {"slots": {f"{n}{LONG}": {}}},
        lambda n: {"metrics": {f"{n}{LONG}": 1.0}},
        lambda n: {"method": f"{n}{LONG}"},
    ],
    ids=["many names", "a long name", "slots", "metrics", "method"],
)
def test_what_clients_call_things_is_not_remembered_for_ever(changes: Callable[[int], dict[str, Any]]):
    """Forty updates, each with a megabyte of names or so that were never seen before."""
    tracemalloc.start()
    try:
        for number in range(40):
            size(an_update(**changes(number)))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 6 * REMEMBERED


def test_an_update_is_no_assignment():
    with pytest.raises(WireError, match="not an assignment"):
        decode_assignment(encode(an_update()))
    with pytest.raises(WireError, match="not an update"):
        decode_update(encode(an_assignment()))
