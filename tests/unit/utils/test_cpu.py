"""CPU settings of a process: their effect, and when they stay unchanged."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import torch

from megatron.errors import ConfigError
from megatron.utils import cpu

PASSES = """
import resource, sys, torch
from megatron.utils.cpu import set_allocator
print(set_allocator(sys.argv[1]), file=sys.stderr)
for _ in range(4):  # until the heap has found its shape
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    large, small = torch.ones(40 << 20), [torch.ones(25_000) for _ in range(1000)]
    del large, small
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


FLAGS = """
import sys, torch
from megatron.utils.cpu import set_allocator
print(set_allocator(sys.argv[1]), file=sys.stderr)
tensor, inside = torch.ones(16 << 20), False
for words in map(str.split, open("/proc/self/smaps")):
    if "-" in words[0]:
        start, end = (int(address, 16) for address in words[0].split("-"))
        inside = start <= tensor.data_ptr() + (32 << 20) < end
    elif inside and words[0] == "VmFlags:":
        print(int("hg" in words))
"""
END_OF_HEAP = """
import ctypes, sys, torch
from megatron.utils.cpu import set_allocator
print(set_allocator(sys.argv[1]), file=sys.stderr)
libc = ctypes.CDLL(None)
libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
untouched = [torch.empty(1 << 30, dtype=torch.uint8) for _ in range(3)]  # takes addresses, no memory
before = libc.sbrk(0)
del untouched
print(before - libc.sbrk(0))
"""


def printed(program: str, choice: str) -> int:
    """Output of a new process, because the setting is process-wide."""
    command = [sys.executable, "-c", program, choice]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_kept_memory_is_there_for_the_next_tensor() -> None:
    kept, given_back = printed(PASSES, "keep"), printed(PASSES, "system")
    assert kept < 1000 < 20_000 < given_back  # 160 and 100 MB are 65 000 pages


def test_more_than_two_gibibytes_are_kept_too() -> None:
    assert printed(END_OF_HEAP, "keep") == 0


def test_kept_memory_is_asked_for_in_large_pages() -> None:
    offered = Path("/sys/kernel/mm/transparent_hugepage").exists()
    assert (printed(FLAGS, "keep"), printed(FLAGS, "system")) == (int(offered), 0)


@pytest.mark.parametrize("rule", ["2", "?", None])
def test_no_addresses_are_taken_where_they_count_as_memory(tmp_path: Path, rule: str | None) -> None:
    if rule is not None:
        (tmp_path / "overcommit").write_text(rule)
    assert not cpu._ask_for_large_pages(cast(ctypes.CDLL, None), tmp_path / "overcommit")


def test_keep_is_refused_without_glibc_and_auto_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.platform, "libc_ver", lambda: ("", ""))
    with pytest.raises(ConfigError, match="--cpu-allocator keep: needs glibc"):
        cpu.set_allocator("keep")
    assert "not glibc" in cpu.set_allocator("auto")


@pytest.fixture
def products() -> Iterator[None]:
    before = torch.backends.mkldnn.matmul.fp32_precision
    yield
    torch.backends.mkldnn.matmul.fp32_precision = before


def rounding(product: Callable[..., torch.Tensor], second: bool) -> Callable[..., torch.Tensor]:
    """Planted bug: rounds one factor, as a processor with AMX would."""

    def narrow(x: torch.Tensor, wanted: bool) -> torch.Tensor:
        return x.bfloat16().float() if wanted else x

    return lambda a, b: product(narrow(a, not second), narrow(b, second))


@pytest.mark.usefixtures("products")
def test_onednn_is_taken_where_it_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "processor_is_amd", lambda: True)
    line = cpu.set_fp32_products("auto")
    assert cpu.onednn_is_exact() == ("oneDNN (checked" in line)
    a, b = torch.randn(300, 500, generator=torch.Generator().manual_seed(1)), torch.randn(500, 700)
    exact = a.double() @ b.double()
    assert (torch.linalg.norm(a @ b - exact) / torch.linalg.norm(exact)).item() < 1e-6


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("index", range(5))
def test_one_rounding_product_is_enough_to_stay_away(monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    """Planted bug: one product rounds one of its factors."""
    monkeypatch.setattr(cpu, "processor_is_amd", lambda: True)
    real = cpu._products()
    assert len(real) == 5
    for swapped in (False, True):
        found = (*real[:index], rounding(real[index], swapped), *real[index + 1 :])
        monkeypatch.setattr(cpu, "_products", lambda found=found: found)
        before = torch.backends.mkldnn.matmul.fp32_precision
        assert not cpu.onednn_is_exact()
        assert "MKL (oneDNN rounds" in cpu.set_fp32_products("auto")
        with pytest.raises(ConfigError, match="--fp32-products onednn: rounds the factors"):
            cpu.set_fp32_products("onednn")
        assert torch.backends.mkldnn.matmul.fp32_precision == before, "the probe left its setting behind"


@pytest.mark.usefixtures("products")
def test_mkl_stays_where_it_is_asked_for_or_known_to_be_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision
    assert "MKL (--fp32-products mkl)" in cpu.set_fp32_products("mkl")
    monkeypatch.setattr(cpu, "processor_is_amd", lambda: False)
    assert "AMD's processors only" in cpu.set_fp32_products("auto")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert "without oneDNN" in cpu.set_fp32_products("auto")
    with pytest.raises(ConfigError, match="no oneDNN; use auto or mkl"):
        cpu.set_fp32_products("onednn")
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_the_processor_is_what_the_system_says(tmp_path: Path) -> None:
    told = tmp_path / "cpuinfo"
    told.write_text("vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx512f avx512_bf16\n")
    assert cpu.processor_is_amd(told) and cpu.has_bf16_products(told)
    told.write_text("vendor_id\t: GenuineIntel\nflags\t\t: fpu avx2\n")
    assert not cpu.processor_is_amd(told) and not cpu.has_bf16_products(told)
    assert not cpu.processor_is_amd(tmp_path / "none") and cpu.has_bf16_products(tmp_path / "none")


def test_a_processors_name_tells_generations_apart(tmp_path: Path) -> None:
    told = tmp_path / "cpuinfo"
    core = "cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx512f avx512_bf16\n"
    told.write_text(core + "\n" + core)
    assert cpu.processor_name(told) == "AMD EPYC (cpu family 25, model 17, avx512_bf16)"
    assert cpu.processor_name(tmp_path / "none")
