"""Pictures of reproductions are drawn coarsely: nobody looks at these."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fedstrata.reproduce import plots


@pytest.fixture(scope="session", autouse=True)
def _coarse_pictures() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "DPI", 50)
        yield
