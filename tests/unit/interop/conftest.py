from __future__ import annotations

import pytest

from tests.helpers.exports import ask_warm


@pytest.fixture(scope="session", autouse=True)
def exports_are_read_by_a_warm_process() -> None:
    ask_warm()
