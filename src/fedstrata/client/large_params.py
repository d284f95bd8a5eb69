"""Large parameters: a visit reads them where the server's are, and moves them to where its delta is wanted.

A visit of few steps to a large model is bound by memory, not by arithmetic. The plain way goes over all parameters to
copy them, to move them, to subtract what the server sent and to look for NaN. Here the first forward pass reads the
server's own tensors, and the last move, the difference and the look at it are done piece by piece, in one go. Where
gradients are products that we compute ourselves and SGD only moves along them, not even these are ever whole. Every
number is computed by the same operations in the same order, so the bits are those of the plain way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fedstrata.client.visit import ClientVisit
from fedstrata.core.optim import move_in_place
from fedstrata.core.tensors import Tensors, write_difference
from fedstrata.models.layer_gradients import Gradients
from fedstrata.system.devices import HOST, META

BLOCK = 1 << 18
"""Numbers of a gradient that are computed at once where it is used up piece by piece."""
ROWS = 32
"""Rows of it, at least: products of fewer round in another order."""


class LargeParams:
    """The large parameters of one visit; without any, all is done the plain way.

    Args:
        params: the replica's own parameters, of these names; each has its own memory before and after the visit.
        server: the server's, which are only ever read.
    """

    def __init__(self, params: Mapping[str, Tensor], server: Mapping[str, Tensor]) -> None:
        self._params, self._server = params, server
        self._own = {name: p.data for name, p in params.items()}
        self._names: dict[int, str] = {}
        self._leaves = {id(p): name for name, p in params.items()}
        self._moved: Mapping[str, Tensor] = {}
        self.delta: Tensors = {}
        """Memory for what the visit changes, from its last step on."""
        self._total = 0.0
        self.differences: Tensors = {}
        """What was written there."""

    @property
    def names(self) -> tuple[str, ...]:
        """Which they are."""
        return tuple(self._params)

    @property
    def finite(self) -> bool:
        """True if all differences were written and no number in them is NaN or infinite, as far as a sum can tell."""
        return len(self.differences) == len(self._params) and math.isfinite(self._total)

    @contextmanager
    def borrow(self) -> Iterator[None]:
        """Inside, the replica's parameters are the server's tensors until they move."""
        try:
            for name, p in self._params.items():
                p.data = self._server[name]
            yield
        finally:
            for name, p in self._params.items():
                p.data = self._own[name]

    def follow(self, moved: Mapping[str, Tensor]) -> None:
        """Learn under which tensors the optimiser knows the parameters."""
        self._moved = {name: moved[name] for name in self._params if name in moved}
        self._names = {id(tensor): name for name, tensor in self._moved.items()}

    def end_in(self, delta: Tensors) -> None:
        """From now on a move is the last one, and what was changed since the server goes into these tensors."""
        self.delta = delta

    def move(self, weights: Sequence[Tensor], direction: Sequence[Tensor], lr: float | Tensor) -> None:
        """w ← w − lr·d, each to where it is to go; in place for all other parameters."""
        staying: tuple[list[Tensor], list[Tensor]] = [], []
        for w, d in zip(weights, direction, strict=True):
            name = self._names.get(id(w))
            if name is None or not self._move_away(name, w, d, float(lr)):
                staying[0].append(w)
                staying[1].append(d)
        if staying[0]:
            move_in_place(*staying, lr)

    def _move_away(self, name: str, w: Tensor, d: Tensor, lr: float) -> bool:
        """Move a parameter to other memory; False if it is to stay where it is."""
        if name in self.delta:
            out = self.delta[name]
            self._total += write_difference(w, d, -lr, self._server[name], out)
            self.differences[name] = out
            return True
        own = self._own[name]
        if w.data_ptr() == own.data_ptr():
            return False
        torch.add(w, d, alpha=-lr, out=own)
        w.data = self._params[name].data = own
        return True

    def move_along(self, leaf: Tensor, left: Tensor, right: Tensor, lr: float) -> bool:
        """w ← w − lr·leftᵀ·right, block by block to where it is to go; False if the matrix is none of these."""
        name = self._leaves.get(id(leaf))
        if name is None or name not in self._moved:
            return False
        w, server, own, out = leaf.data, self._server[name], self._own[name], self.delta.get(name)
        count = max(1, len(w) // max(ROWS, BLOCK // w.shape[1]))
        blocks = [t.tensor_split(count) for t in (left.t(), w, server, own if out is None else out)]
        for columns, begin, minus, to in zip(*blocks, strict=True):
            direction = columns.mm(right)
            if out is None:
                torch.add(begin, direction, alpha=-lr, out=to)
            else:
                self._total += write_difference(begin, direction, -lr, minus, to)
        if out is None:
            self._moved[name].data = self._params[name].data = own
        else:
            self.differences[name] = out
        return True


NOTHING_LARGE = LargeParams({}, {})


class MovedGradients(Gradients):
    """The gradients of a pass in which large matrices move as soon as theirs are known, so that nobody holds these.

    Args:
        large: the parameters that move so.
        lr: how far.
    """

    def __init__(self, large: LargeParams, lr: float) -> None:
        super().__init__()
        self._large, self._lr = large, lr

    def take_product(self, weight: Tensor, left: Tensor, right: Tensor) -> None:
        """Move a large matrix; take the gradient of any other."""
        if not self._large.move_along(weight, left, right, self._lr):
            super().take_product(weight, left, right)


def find_large(visit: ClientVisit) -> LargeParams:
    """The large parameters of a visit: of what trains and travels, where nobody but the optimiser touches any."""
    context, replica, a = visit.context, visit.replica, visit.assignment
    names: list[str] = []
    plain = context.device in (HOST, META) and replica.forward is replica.model and not any(context.method.at("local"))
    if plain and replica.large:
        uploads = set(a.uploads)
        names = [n for n in a.trains if n in replica.large and n in uploads and _alike(a.params[n], replica.params[n])]
    return LargeParams({n: replica.params[n] for n in names}, {n: a.params[n] for n in names})


def _alike(tensor: Tensor, other: Tensor) -> bool:
    return tensor.stride() == other.stride() and tensor.dtype == other.dtype and tensor.device == other.device
