"""Backends that run kernels on this machine: C++ on the CPU, CUDA in the emulator, CUDA on a GPU."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron.ops.library import library
from megatron.ops.operation import with_fallback
from megatron.ops.registry import OPERATIONS, register
from tests.helpers.scripts import load_script
from tests.policy.rules import ROOT

# Each process that shares the tests has its own library, because a library in use may not be replaced.
EMULATED = ROOT / "build" / f"emulated-{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}"
ORDERS = {"in order": 0, "in reverse": 1, "odd ones first": 2, "shuffled": 20261122}


@dataclass(frozen=True)
class Backend:
    name: str
    device: str
    ops: Any  # torch.ops.<namespace>
    namespace: str


@cache
def builder() -> ModuleType:
    """Imports csrc/build.py as a module."""
    return load_script("csrc/build.py")


@cache
def emulated_library() -> Path:
    """Built when a test first asks for it; later builds compile only changes."""
    path = EMULATED / "_kernels.so"
    builder().build(path, emulated=True)
    return path


@cache
def backend(name: str) -> Backend:
    """Returns `cpu`, `emulated` or `cuda`; skips the test with the reason if this machine lacks it."""
    if name == "emulated":
        try:
            path = emulated_library()
        except builder().BuildError as error:
            pytest.skip(f"the emulator cannot be built: {error}")
        torch.ops.load_library(path)
        register("megatron_emulated")
        return Backend(name, "cpu", torch.ops.megatron_emulated, "megatron_emulated")
    if (missing := library().missing) is not None:
        pytest.skip(f"the kernels are {missing}")
    if name == "cuda" and not (torch.cuda.is_available() and library().without_cuda is None):
        pytest.skip("no GPU here, or the kernels were built without CUDA")
    return Backend(name, name, library().ops, "megatron_native")


def kernel(op: str, ops: Any) -> Callable[..., Any]:
    """Native implementation of an operation; `ops` is torch.ops.<namespace>."""
    native = OPERATIONS[op].native
    assert native is not None
    return native.bound(ops)


def strict(op: str, ops: Any) -> Callable[..., Any]:
    """Operation under --kernels native: rejects what the kernel cannot take."""
    operation = OPERATIONS[op]
    assert operation.native is not None and operation.formula is not None
    return with_fallback(op, operation.native, operation.native.bound(ops), operation.formula, None)


BACKENDS = ("cpu", "emulated", "cuda")


@contextmanager
def emulator_order(name: str) -> Iterator[None]:
    """Runs the emulator's threads and blocks in one of ORDERS."""
    choose = ctypes.CDLL(str(emulated_library())).mk_emulator_order
    choose(ORDERS[name])
    try:
        yield
    finally:
        choose(0)
