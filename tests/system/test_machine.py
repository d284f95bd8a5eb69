"""How a process uses its machine, and that it gives everything back."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

import pytest
import torch

from fedstrata.system.machine import cache_directory, compute_with, cores, installed_memory, keep_memory

TINY = 1e-40
"""A denormal number in single precision."""


def flushes() -> bool:
    """True if this thread takes denormal numbers for zero."""
    return bool((torch.tensor(TINY) * 1.0).item() == 0.0)


def test_inside_there_are_no_denormals_and_outside_there_are() -> None:
    assert not flushes()
    with compute_with(torch.get_num_threads()):
        assert flushes()
        assert (torch.full((1000,), TINY) * 1.0).sum().item() == 0.0  # in vectorised kernels too
        assert (torch.tensor(1e-37) * 1.0).item() > 0.0  # a normal number stays
    assert not flushes()
    assert math.isclose((torch.full((1000,), TINY) * 1.0)[999].item(), TINY, rel_tol=1e-4)


def test_threads_are_set_and_given_back() -> None:
    before = torch.get_num_threads()
    with compute_with(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_all_is_given_back_after_an_exception() -> None:
    before = torch.get_num_threads()

    def interrupted() -> None:
        with compute_with(before + 1):
            assert flushes()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert torch.get_num_threads() == before
    assert not flushes()


def test_one_inside_another() -> None:
    before = torch.get_num_threads()
    with compute_with(before + 1):
        with compute_with(before + 2):
            assert torch.get_num_threads() == before + 2
        assert torch.get_num_threads() == before + 1
        assert flushes()
    assert torch.get_num_threads() == before
    assert not flushes()


def test_a_user_who_flushes_denormals_goes_on_doing_so() -> None:
    torch.set_flush_denormal(True)
    try:
        with compute_with(torch.get_num_threads()):
            assert flushes()
        assert flushes()
    finally:
        torch.set_flush_denormal(False)
    assert not flushes()


def test_cores() -> None:
    assert 1 <= cores() <= (os.cpu_count() or 1)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinities")
def test_cores_are_those_that_this_process_may_use() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert cores() == len(before)


def test_keeping_memory_twice() -> None:
    glibc = platform.libc_ver()[0] == "glibc"
    assert keep_memory() is glibc
    assert keep_memory() is glibc
    assert torch.ones(10_000_000).sum().item() == 10_000_000  # a large block still comes and goes


def test_keeping_memory_where_there_is_no_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda *_: ("", ""))
    assert keep_memory() is False


def test_where_caches_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("FEDSTRATA_CACHE", raising=False)
    assert cache_directory() == Path("/home/somebody/.cache/fedstrata")
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")  # which its specification says to ignore
    assert cache_directory() == Path("/home/somebody/.cache/fedstrata")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_directory() == Path("/caches/fedstrata")
    monkeypatch.setenv("FEDSTRATA_CACHE", "~/own")
    assert cache_directory() == Path("/home/somebody/own")


def test_a_machine_has_memory() -> None:
    assert installed_memory() > 10**8
