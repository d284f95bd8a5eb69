"""Messages that are made to be slow to decode: families of them, each of any size."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from fedstrata.wire.messages import decode_assignment, decode_update, encode
from fedstrata.wire.packing import WireError
from tests.wire.test_messages import ASSIGNMENT_HEAD, UPDATE_HEAD, an_update, message, row

HALF = 1_900_000
"""Bytes of a head, and of an index, that make a message of nearly four megabytes, and stay below wire.HEAD_LIMIT."""


def honest(size: int = HALF) -> bytes:
    """An update of a model with as many small layers as a message of this size can name twice."""
    return encode(an_update(delta={f"layers.{k}.weight": torch.ones(16) for k in range(2 * size // 160)}))


def _head(**fields: Any) -> dict[str, Any]:
    return {**UPDATE_HEAD, **fields}


def _names(size: int, form: str = "{:06d}") -> list[str]:
    count = size // (len(form.format(0)) + 4)
    return [form.format(k) for k in range(count)]


def _index(size: int, form: str = "slot:{:06d}/a", shape: str = "0") -> bytes:
    """The index of as many empty tensors as fit."""
    one = '"%s":{"dtype":"U8","shape":[%s],"data_offsets":[0,0]}'
    count = size // len(one % (form.format(0), shape))
    return ("{" + ",".join(one % (form.format(k), shape) for k in range(count)) + "}").encode()


def _repeated(piece: str, size: int) -> str:
    return piece * (size // len(piece))


def _plan(size: int, name: str, again: bool) -> bytes:
    names = ["a"] * (size // 4) if again else _names(size)
    tensors = {"param/a": row("F32", [1], 4)}
    return message({**ASSIGNMENT_HEAD, name: names}, tensors, bytes(4))


def _raw(text: str) -> bytes:
    """A head with a raw field."""
    return (json.dumps(UPDATE_HEAD)[:-1] + f',"x":{text}}}').encode()


FAMILIES: dict[str, Callable[[int], bytes]] = {
    "many slot names": lambda size: message(_head(slots=_names(size)), {}),
    "many slot names, each with a tiny tensor": lambda size: message(_head(slots=_names(size)), _index(size)),
    "many slot names, none of the tensors theirs": lambda size: message(_head(slots=_names(size)), _index(size, "{}")),
    "one slot name again and again": lambda size: message(_head(slots=["t"] * (size // 5)), _index(size, "slot:t/{}")),
    "many tiny tensors": lambda size: message(UPDATE_HEAD, _index(size, "delta/{}")),
    "many tensors under one name": lambda size: message(UPDATE_HEAD, _index(size, "delta/a")),
    "a tensor with many axes": lambda size: message(UPDATE_HEAD, _index(size, "delta/{}", "0" + ",1" * (size // 4))),
    "many tensors with some axes": lambda size: message(UPDATE_HEAD, _index(size, "delta/{}", "0" + ",1" * 60)),
    "nested lists in the head": lambda size: message(_raw(_repeated("[", size)), {}),
    "nested objects in the head": lambda size: message(_raw(_repeated('{"a":', size)), {}),
    "many shallow nests": lambda size: message(_raw("[" + _repeated("[[[[[[[[[[]]]]]]]]]],", size) + "0]"), {}),
    "nested lists in the index": lambda size: message(UPDATE_HEAD, _repeated("[", size).encode()),
    "one long name": lambda size: message(_head(slots=["n" * size]), _index(size, f"slot:{'n' * (size - 100)}/a")),
    "long names": lambda size: message(_head(slots=_names(size, "n" * 9000 + "{}")), _index(size, "d" * 9000 + "{}")),
    "escaped names": lambda size: message(_head(slots=_names(size, "\u00e9" * 9 + "{}")), {}),
    "a huge metrics object": lambda size: message(_head(metrics=dict.fromkeys(_names(size), 0.5)), {}),
    "metrics of a wrong type": lambda size: message(_head(metrics=dict.fromkeys(_names(size), "")), {}),
    "many unknown fields": lambda size: message({**UPDATE_HEAD, **dict.fromkeys(_names(size), 0)}, {}),
    "one unknown field, huge": lambda size: message(_head(x=[{}] * (size // 4)), {}),
    "whole numbers of many digits": lambda size: message(_raw("[" + _repeated("9" * 4000 + ",", size) + "0]"), {}),
    "one number of too many digits": lambda size: message(_raw("9" * size), {}),
    "a fraction of many digits": lambda size: message(_raw("0." + "3" * size), {}),
    "slots that are no names": lambda size: message(_head(slots=[0] * (size // 3)), {}),
    "many names to train": lambda size: _plan(size, "trains", again=False),
    "one name to train, again and again": lambda size: _plan(size, "trains", again=True),
    "one name to send, again and again": lambda size: _plan(size, "travels", again=True),
    "one name to report, again and again": lambda size: _plan(size, "reports", again=True),
    "one name to move, again and again": lambda size: _plan(size, "moves", again=True),
    "many settings of the work": lambda size: message({**ASSIGNMENT_HEAD, "work": dict.fromkeys(_names(size), 0)}, {}),
}


def seconds(data: bytes) -> float:
    """CPU seconds for a megabyte of a message, by the decoder that takes longer."""
    return max(_spent(decode, data) for decode in (decode_update, decode_assignment)) / (len(data) / 1e6)


def _spent(decode: Callable[[bytes], Any], data: bytes) -> float:
    gc.collect()
    began = time.process_time()
    with suppress(WireError):
        decode(data)
    return time.process_time() - began
