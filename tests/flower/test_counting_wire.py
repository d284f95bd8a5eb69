"""The wire of a deployment, which must not be what a SuperNode fails at."""

from __future__ import annotations

import socket
import time

import pytest

pytest.importorskip("flwr")

from tests.flower.deployment import Counter, free_ports


def test_the_wire_counts_and_is_gone_while_it_is_closed() -> None:
    """As long as there is no SuperLink behind it, whoever connects must be refused and not accepted and left."""
    port, to = free_ports(2)
    wire = Counter(port, to)
    for _ in range(2):
        before = wire.up, wire.down
        with (
            socket.create_server(("127.0.0.1", to)) as server,
            socket.create_connection(("127.0.0.1", port)) as near,
            server.accept()[0] as far,
        ):
            near.sendall(b"question")
            assert far.recv(100) == b"question"
            far.sendall(b"no")
            assert near.recv(100) == b"no"
        assert (wire.up - before[0], wire.down - before[1]) == (8, 2)
        wire.close()
        time.sleep(0.1)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        wire.open()
    wire.close()
