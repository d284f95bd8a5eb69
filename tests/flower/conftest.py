"""One deployment for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.flower.deployment import Deployment


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A SuperLink, and three SuperNodes that are admitted."""
    from tests.flower.deployment import SITES, Deployment

    with Deployment(tmp_path_factory.mktemp("deployment")) as deployment:
        deployment.register(0, 1, 2)
        deployment.nodes = [deployment.node(number, clients=clients) for number, clients in enumerate(SITES)]
        yield deployment
