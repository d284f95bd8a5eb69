"""Seeds: every random stream of a run comes from its seed, by name."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fedstrata.core.lazy import numpy as np
from fedstrata.core.lazy import torch


def derive(*parts: int | str) -> int:
    """A 63-bit seed from named parts: the first 8 bytes of SHA-256 over the parts joined by '/', shifted right once.

    Every random stream of a run is seeded by (seed, purpose, round, client), so no stream depends on the order in
    which clients happen to run.
    """
    return _seed_of("/".join(map(str, parts)))


def derive_each(*parts: int | str, last: Sequence[int]) -> list[int]:
    """`derive(*parts, number)` for every number."""
    begin = "/".join(map(str, parts)) + "/"
    return [_seed_of(f"{begin}{number}") for number in last]


def _seed_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A CPU generator seeded by `derive(*parts)`."""
    return torch.Generator().manual_seed(derive(*parts))


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Give the global generators of torch, Python and NumPy back as they were."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])


def seed_global(seed: int, device: torch.device, everything: bool = True) -> None:
    """Seed what dropout and augmentation draw from and, with `everything`, what a user's dataset may draw from."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
    if everything:
        random.seed(seed)
        np.random.seed(seed % 2**32)
