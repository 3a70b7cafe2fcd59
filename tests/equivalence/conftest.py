from __future__ import annotations

import pytest

from tests.helpers.distributed import import_for_ranks


@pytest.fixture(scope="session", autouse=True)
def imported_for_ranks() -> None:
    """tools/check_layout.py forks its ranks too."""
    import_for_ranks()
