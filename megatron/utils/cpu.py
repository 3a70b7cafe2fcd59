"""Process-wide CPU settings, made once at start: the allocator and the library of fp32 products. Results keep full
precision. docs/design/018-cpu-settings.md explains why these settings belong to the process and not to an object.
"""

import ctypes
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.errors import ConfigError

_CPUINFO = Path("/proc/cpuinfo")
_MAPS = Path("/proc/self/maps")
_OVERCOMMIT, _STRICT = Path("/proc/sys/vm/overcommit_memory"), 2
_LARGE_PAGE, _MADV_HUGEPAGE = 2 << 20, 14  # mman.h of Linux
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -2, -3, -4  # malloc.h of glibc
_LARGE = 1 << 20
_NEVER = -1  # the largest positive threshold is 2 GiB; a heap with more free memory would return all of it
_TOP_PAD = 256 << 20
_ALWAYS_MAPPED = 64 << 20  # twice the largest mmap threshold that glibc chooses by itself
_PROBE_SIZE = 256  # products of this size take the same path as large ones
_NARROW = 1 + 2**-12  # needs 12 bits of fraction; bf16 has 7 and TF32 has 10


def set_allocator(choice: str) -> str:
    """Keeps freed memory in the process for the next tensor, unless `choice` is "system". Returns a line for the log.

    By default the C library unmaps every freed tensor of 32 MiB and more. The next tensor gets fresh pages, which the
    system has to clear and map one by one. Call this before any large tensor exists.
    """
    if choice == "system":
        if platform.libc_ver()[0] == "glibc":  # glibc would raise its threshold, which leaves holes in the heap
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE)
        return "CPU memory: large tensors are returned to the system when freed (--cpu-allocator system)"
    if platform.libc_ver()[0] != "glibc":
        if choice == "keep":
            raise ConfigError("--cpu-allocator keep: needs glibc, which this system does not use; use auto or system")
        return "CPU memory: the C library's default, because it is not glibc"
    libc = ctypes.CDLL(None)
    kept = all(
        (libc.mallopt(_M_MMAP_MAX, 0), libc.mallopt(_M_TRIM_THRESHOLD, _NEVER), libc.mallopt(_M_TOP_PAD, _TOP_PAD))
    )
    assert kept, "glibc rejected a value that it documents"
    where = ", in large pages" if _ask_for_large_pages(libc) else ""
    return (
        f"CPU memory: freed memory is kept for the next tensor{where}; --cpu-allocator system returns it, and is slower"
    )


def _ask_for_large_pages(libc: ctypes.CDLL, overcommit: Path = _OVERCOMMIT) -> bool:
    """Asks for 2 MiB pages in the heap and returns whether the system agreed. With small pages, a product that reads a
    matrix column by column needs another page for each element. The heap's next addresses are allocated, marked and
    freed, but not written."""
    try:
        if int(overcommit.read_text()) == _STRICT:  # reserved addresses then count as memory
            return False
    except (OSError, ValueError):
        return False
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    start = libc.malloc(size)
    if not start:  # the allocation failed, such as at a limit that the user has set
        return False
    aligned = -(-start // _LARGE_PAGE) * _LARGE_PAGE
    agreed = libc.madvise(aligned, start + size - aligned, _MADV_HUGEPAGE) == 0
    libc.free(start)
    return agreed


@cache
def memory_is_kept() -> bool:
    """True if `set_allocator` keeps freed memory in this process: then a large tensor is in the heap."""
    if platform.libc_ver()[0] != "glibc":
        return False
    large = torch.empty(_ALWAYS_MAPPED, dtype=torch.uint8).data_ptr()
    heap = [line.split("-", 1) for line in _MAPS.read_text().splitlines() if line.endswith("[heap]")]
    return any(int(start, 16) <= large < int(rest.split()[0], 16) for start, rest in heap)


def set_fp32_products(choice: str) -> str:
    """Chooses the library of fp32 matrix products: `mkl`, `onednn` or `auto`. Returns a line for the log.

    PyTorch uses oneDNN for fp32 products only if it may round the factors to bf16. On processors with AMX, oneDNN does
    round. On other processors it computes in full precision, and on AMD's it is faster than MKL. Therefore small
    products are checked before oneDNN is enabled.
    """
    if not torch.backends.mkldnn.is_available():
        if choice == "onednn":
            raise ConfigError("--fp32-products onednn: this build of torch has no oneDNN; use auto or mkl")
        return "fp32 products: torch's own, because it was built without oneDNN"
    if choice == "mkl":
        return "fp32 products: MKL (--fp32-products mkl)"
    if choice == "auto" and not processor_is_amd():
        return "fp32 products: MKL (oneDNN is known to be faster on AMD's processors only)"
    if onednn_is_exact():
        _mkldnn_products().fp32_precision = "bf16"
        return "fp32 products: oneDNN (checked: exact on this processor)"
    if choice == "onednn":
        raise ConfigError(
            "--fp32-products onednn: rounds the factors to bf16 on this processor; use auto or mkl, or train in --bf16"
        )
    return "fp32 products: MKL (oneDNN rounds the factors on this processor)"


def fp32_products() -> str:
    """Returns the library that multiplies fp32 matrices in this process: onednn or mkl."""
    available = torch.backends.mkldnn.is_available()
    return "onednn" if available and _mkldnn_products().fp32_precision == "bf16" else "mkl"


def processor_is_amd(cpuinfo: Path = _CPUINFO) -> bool:
    return "AuthenticAMD" in _words(cpuinfo)


def has_bf16_products(cpuinfo: Path = _CPUINFO) -> bool:
    """True if the processor has bf16 products, or if the system does not report its features."""
    words = _words(cpuinfo)
    return not words or not words.isdisjoint(("avx512_bf16", "amx_bf16", "bf16"))


def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """Name of the processor, its generation, and its widest instructions for products."""
    facts = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in _text(cpuinfo).splitlines())
    }
    name = facts.get("model name") or platform.processor() or platform.machine()
    numbers = [f"{key} {facts[key]}" for key in ("cpu family", "model") if key in facts]
    widest = [flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if flag in facts.get("flags", "").split()]
    details = ", ".join([*numbers, *widest[:1]])
    return f"{name} ({details})" if details else name


def _words(cpuinfo: Path) -> frozenset[str]:
    return frozenset(_text(cpuinfo).split())


def _text(cpuinfo: Path) -> str:
    try:
        return cpuinfo.read_text()
    except OSError:
        return ""


def onednn_is_exact() -> bool:
    """True if fp32 products through oneDNN keep a bit of both factors that bf16 and TF32 would lose."""
    one = torch.eye(_PROBE_SIZE)
    fine = torch.full((_PROBE_SIZE, _PROBE_SIZE), _NARROW)
    with _products_marked("bf16"):
        return all(torch.equal(product(*pair), fine) for product in _products() for pair in ((fine, one), (one, fine)))


def _products() -> tuple[Callable[[Tensor, Tensor], Tensor], ...]:
    """Returns one function for each kind of product in a model."""
    zero = torch.zeros(_PROBE_SIZE)
    return (
        torch.mm,
        lambda a, b: torch.mm(a.t(), b),
        lambda a, b: torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[1],
        lambda a, b: torch.addmm(zero, a, b),
        lambda a, b: torch.nn.functional.linear(a, b),
    )


def _mkldnn_products() -> Any:
    return torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # made at run time


@contextmanager
def _products_marked(precision: str) -> Iterator[None]:
    before = _mkldnn_products().fp32_precision
    _mkldnn_products().fp32_precision = precision
    try:
        yield
    finally:
        _mkldnn_products().fp32_precision = before


def fp32_products_unmarked() -> AbstractContextManager[None]:
    """Suspends the oneDNN setting of `set_fp32_products`. It speeds up large products, but small ones (a few rows) take
    up to twice as long with it."""
    return _products_marked("ieee")


def available_memory() -> int | None:
    """Bytes available without swapping; None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
