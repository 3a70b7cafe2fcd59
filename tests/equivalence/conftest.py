from __future__ import annotations

import pytest

from tests.helpers.distributed import import_for_ranks
from tests.helpers.exports import ask_warm


@pytest.fixture(scope="session", autouse=True)
def imported_for_ranks() -> None:
    """Imports what forked ranks need; tools/check_layout.py forks its ranks too."""
    import_for_ranks()


@pytest.fixture(scope="session", autouse=True)
def exports_are_read_by_a_warm_process() -> None:
    ask_warm()
