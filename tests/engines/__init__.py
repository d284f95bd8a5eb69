"""How a round's clients are run."""

import pytest

pytest.register_assert_rewrite("tests.engines.worlds")
