"""Changes in fewer bytes: every stratum's as one vector, which techniques encode one after the other.

First some numbers are chosen (`select`), then those that are left are written with fewer bits (`round`), in whatever
order the techniques stand in the method. The server takes the same steps back before it looks at anything, so that
reducers, other techniques and probes see changes as they see all others.

Error feedback is one rule for all of them. With d_0 the change and what was left of earlier ones, and d_i what the
server would read after the i-th technique, d_{i−1} − d_i is what that technique has lost: if it wants `feedback`, its
client remembers that, and adds it to its next change. All of them together remember d_0 − d_n, what was not sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, ClassVar, Literal

from fedstrata.core.lazy import torch
from fedstrata.core.rng import generator
from fedstrata.core.technique import Technique, memory_mismatch
from fedstrata.core.tensors import Tensors, add
from fedstrata.core.types import Assignment, Slots, Stratum, Update, replace_fields
from fedstrata.errors import FedstrataError

if TYPE_CHECKING:
    from torch import Tensor

Step = Literal["select", "round"]
STEPS: dict[Step, str] = {
    "select": "both choose which numbers of a change travel",
    "round": "both choose in how many bits a change travels",
}
"""The steps of an encoding, in order; why there is one technique for each."""


class Malformed(FedstrataError):
    """What no client can have made by encoding its change; a few words."""


@dataclass(frozen=True)
class VectorForm:
    """What a vector looks like that a technique encodes.

    Attributes:
        stratum: whose change it is.
        length: how many numbers it has: all that travels of the stratum, or what the technique before left of it.
        dtype: their type.
    """

    stratum: Stratum
    length: int
    dtype: torch.dtype


class Encoder(Technique):
    """A technique that lets changes travel in fewer bytes. It has no slot besides what travels beside the vectors.

    Class attributes:
        step: of the encoding; there is one technique for each.

    Attributes:
        feedback: True if a client remembers what this technique has lost of its changes, and adds it to the next.
    """

    step: ClassVar[Step]
    feedback: bool

    def encode(self, vector: Tensor, form: VectorForm, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Client, last of all: (what travels in a vector's place, what travels beside it), both of one axis.

        Always of one client by itself, also where many are trained at once, in the memory of the CPU.
        Their lengths and types depend on the form alone. Random numbers come from `rng`. Where a vector holds NaN, what
        travels holds one, too: the server is to see it.
        """
        raise NotImplementedError

    def decode(self, encoded: Tensor, beside: Tensor, form: VectorForm) -> Tensor:
        """Server, first of all: a vector of this form again.

        Raises:
            Malformed: if `encode` cannot have given this; all numbers in it are finite.
        """
        raise NotImplementedError

    def count_encoded(self, form: VectorForm) -> int:
        """How many numbers travel in the place of a vector, before the next technique encodes them."""
        return form.length

    def validate_memory(self, memory: Tensors, params: Tensors, buffers: Tensors) -> str | None:
        """Refuse a memory of anything but parameters."""
        return memory_mismatch(memory, params)


def check_vector(what: str, tensor: Tensor, dtype: torch.dtype, length: int) -> None:
    """Refuse a tensor of another type or shape.

    Raises:
        Malformed: with what it is; `what` are they.
    """
    if tensor.dtype != dtype or tensor.shape != (length,):
        shown, wanted = (str(kind).removeprefix("torch.") for kind in (tensor.dtype, dtype))
        raise Malformed(f"{what} are {shown} {list(tensor.shape)} instead of {wanted} [{length}]")


@dataclass(frozen=True, eq=False)
class Encoding:
    """What a method's encoders make of the changes that travel, and back.

    Args:
        encoders: in the order in which they encode; at least one.
        strata: of each architecture.
    """

    encoders: Sequence[Encoder]
    strata: Mapping[str, Sequence[Stratum]]

    def _vectors(self, asked: Assignment) -> dict[str, tuple[list[str], VectorForm]]:
        """Stratum → (those of its parameters that travel, the vector of their changes)."""
        sent = set(asked.uploads)
        found: dict[str, tuple[list[str], VectorForm]] = {}
        for stratum in self.strata[asked.arch]:
            names = [n for n in stratum.params if n in sent]
            if names:
                tensors = [asked.params[n] for n in names]
                dtype = reduce(torch.promote_types, (t.dtype for t in tensors))
                found[stratum.name] = names, VectorForm(stratum, sum(t.numel() for t in tensors), dtype)
        return found

    def _forms(self, form: VectorForm) -> list[VectorForm]:
        """What each of the encoders is given of a vector."""
        forms = [form]
        for encoder in self.encoders[:-1]:
            forms.append(replace(forms[-1], length=encoder.count_encoded(forms[-1])))
        return forms

    def encode(self, update: Update, memory: Slots, asked: Assignment) -> tuple[Update, Slots]:
        """(an update as it travels, what its client will remember)."""
        vectors = self._vectors(asked)
        if not vectors:
            return update, memory
        streams = [generator(asked.seed, encoder.name, "encode") for encoder in self.encoders]
        delta = update.delta
        for encoder in self._mindful:
            delta = add(delta, memory.get(encoder.name, {}))
        sent: Tensors = {}
        slots: Slots = {encoder.name: {} for encoder in self.encoders}
        errors: Slots = {encoder.name: {} for encoder in self._mindful}
        for name, (names, form) in vectors.items():
            vector = torch.cat([delta[n].reshape(-1) for n in names]).to(form.dtype)
            forms, now, read, beside = self._forms(form), vector, vector, list["Tensor"]()
            for depth, encoder in enumerate(self.encoders):
                now, other = encoder.encode(now, forms[depth], streams[depth])
                slots[encoder.name][name] = other
                beside.append(other)
                if self._mindful:
                    before, read = read, self._read(now, beside, forms)
                    if encoder.feedback:
                        errors[encoder.name] |= _split(before - read, names, asked.params)
            sent[name] = now
        kept = {kind: {**memory.get(kind, {}), **error} for kind, error in errors.items()}
        return replace_fields(update, delta=sent, slots={**update.slots, **slots}), {**memory, **kept}

    @property
    def _mindful(self) -> list[Encoder]:
        """Those whose errors are remembered."""
        return [encoder for encoder in self.encoders if encoder.feedback]

    def _read(self, encoded: Tensor, beside: Sequence[Tensor], forms: Sequence[VectorForm]) -> Tensor:
        """The vector that the first encoders, as many as there is something beside of, were given."""
        for encoder, other, form in reversed(list(zip(self.encoders, beside, forms, strict=False))):
            encoded = encoder.decode(encoded, other, form)
        return encoded

    def decode(self, update: Update, asked: Assignment) -> Update:
        """An update whose change is as others' are; all numbers in it are finite, those of the change may not be.

        Raises:
            Malformed: if no client can have encoded it.
        """
        vectors = self._vectors(asked)
        beside = [update.slots.get(encoder.name, {}) for encoder in self.encoders]
        for found, what in ((update.delta, "change"), *zip(beside, map(_slot_of, self.encoders), strict=True)):
            _check_names(f"its encoded {what}", vectors, found)
        delta: Tensors = {}
        for name, (names, form) in vectors.items():
            vector = self._read(update.delta[name], [slot[name] for slot in beside], self._forms(form))
            delta |= _split(vector, names, asked.params)
        own = {encoder.name for encoder in self.encoders}
        others = {name: slot for name, slot in update.slots.items() if name not in own}
        return replace_fields(update, delta={n: delta[n] for n in asked.uploads}, slots=others, finite=False)

    def try_decoding(self, update: Update, asked: Assignment) -> Update | None:
        """The same; None where it cannot be."""
        try:
            return self.decode(update, asked)
        except Malformed:
            return None


def _slot_of(encoder: Encoder) -> str:
    return f"change's part of '{encoder.name}'"


def _check_names(what: str, expected: Mapping[str, object], found: Tensors) -> None:
    """Refuse vectors of other strata than those that travel."""
    missing, extra = expected.keys() - found.keys(), found.keys() - expected.keys()
    if missing:
        raise Malformed(f"{what} lacks the stratum '{min(missing)}'")
    if extra:
        raise Malformed(f"{what} has an unexpected '{min(extra)[:100]}'")


def _split(vector: Tensor, names: Sequence[str], like: Tensors) -> Tensors:
    """Parameters' parts of a vector, in their shapes and types."""
    parts = torch.split(vector, [like[n].numel() for n in names])
    return {n: part.view(like[n].shape).to(like[n].dtype) for n, part in zip(names, parts, strict=True)}
