"""Two ranks for pfl, which finds its process group in the environment, as torchrun sets it, when it is imported."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def become_rank_0(workload: str, door: str) -> subprocess.Popen[bytes]:
    """Set the environment that torchrun would set, and start rank 1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        TORCHELASTIC_RUN_ID="peers",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        RANK="0",
        LOCAL_RANK="0",
        GLOO_SOCKET_IFNAME="lo",
        PFL_PYTORCH_DEVICE="cpu",
    )
    command = [sys.executable, str(Path(__file__).with_name("peer_pfl.py")), workload, door]
    environment = {**os.environ, "RANK": "1", "LOCAL_RANK": "1"}
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=2)
