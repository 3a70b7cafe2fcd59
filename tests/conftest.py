"""Prepares the test process before torch is imported: usual signals and limits, one thread, no downloads."""

from __future__ import annotations

import gc
import importlib
import os
import platform
import sys
from collections.abc import Iterator

import pytest

from tests.helpers.inherited import take_usual_values

# One thread per process: gloo tests start several processes, and threads that fight for cores make tests slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A launcher's variables in the shell would make single-process tests wait for peers that do not exist.
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)
# Tests start hundreds of interpreters: each would compile the whole package again if none might keep what it compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
take_usual_values()
# Libraries must not download anything during tests.
os.environ["HF_HUB_OFFLINE"] = "1"
# Where a test has two threads, they sleep while they wait: one that spins takes the core from another process's test.
# OpenMP reads that when torch loads it; what a test starts decides for itself.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    importlib.import_module("torch")
    del os.environ["OMP_WAIT_POLICY"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-crash", action="store_true", help="tests of crashes try every place, not a few")


def pytest_report_header() -> list[str]:
    import numpy
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "none"
    return [
        f"python {platform.python_version()}, torch {torch.__version__}, numpy {numpy.__version__}, "
        f"{os.cpu_count()} cores, accelerator: {accelerator}"
    ]


def pytest_collection_finish() -> None:
    freeze()


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> Iterator[None]:
    """Freezes again after each file of tests. A file may import much, and a run that ends unfreezes all
    (`gc.unfreeze`)."""
    yield
    freeze()


def freeze() -> None:
    """Makes garbage collections skip the objects of thousands of tests. Forked ranks would copy every page that a
    collection looks at."""
    gc.collect()
    gc.freeze()
