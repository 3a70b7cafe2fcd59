"""nvcc's output for every .cu file, without a GPU: no spills, no stack, 16 bytes per access where packs are used."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parts import gpu_ops
from tests.helpers.kernels import builder
from tests.helpers.planted import as_built
from tests.policy.rules import ROOT

SOURCES = sorted((ROOT / "csrc").glob("*/cuda*.cu"))
USAGE = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
ACCESS = re.compile(r"\b(ld|st)\.global\S*?\.v([248])\.[a-z](\d+)")
ENTRIES = re.compile(r"\.entry\s+(\w+)\(")
ENTRY = re.compile(r"\.entry\s+(\w+)\(.*?\n\}", re.DOTALL)
PACKED = re.compile(r"Lb([01])E")  # a kernel's first argument that is true or false says whether it is made for packs
# What a GPU has one instruction for, in the kernels of halves: a dozen in its place made them wait for arithmetic.
ONE_INSTRUCTION = {
    "activation": {"cvt.f32.f16", "cvt.rn.f16.f32", "cvt.rn.bf16.f32", "ex2.approx.ftz.f32", "rcp.approx.ftz.f32"},
    "expert_rows": {"cvt.f32.f16", "cvt.rn.f16.f32", "cvt.rn.bf16.f32"},
    "norm": {"cvt.f32.f16", "cvt.rn.f16.f32", "cvt.rn.bf16.f32"},
    "optim": {"cvt.f32.f16", "cvt.rn.f16.f32", "cvt.rn.bf16.f32"},
    "rope": {"cvt.f32.f16", "cvt.rn.f16.f32", "cvt.rn.bf16.f32"},
    "softmax": {"cvt.f32.f16", "cvt.rn.f16.f32", "cvt.rn.bf16.f32", "ex2.approx.ftz.f32", "max.NaN.f32"},
    "cross_entropy": {"cvt.f32.f16", "cvt.rn.f16.f32", "cvt.rn.bf16.f32", "ex2.approx.ftz.f32", "max.NaN.f32"},
}
ONE_NUMBER = "row_products_kernel"  # reads packs and writes one number for each row


def cuda() -> Any:
    try:
        return builder().find_cuda()
    except builder().CudaError as error:
        pytest.skip(f"{error}: CUDA files are not compiled here")


def ptx_of(source: Path, folder: Path) -> str:
    """PTX of a CUDA file for the oldest, then the newest GPU that it is built for."""
    found, texts = cuda(), []
    for gpu in (min(builder().gpus(found)), max(builder().gpus(found))):
        out = folder / f"{gpu}.ptx"
        builder().run([found.nvcc, "-std=c++20", "-O3", "-ptx", f"-arch=compute_{gpu}", str(source), "-o", str(out)])
        texts.append(out.read_text())
    return "\n".join(texts)


def said_of(source: Path) -> str:
    """Assembler output when the kernels were built."""
    recipe, objects = as_built(False)
    ((_, compiled),) = [pair for pair in zip(recipe.units, objects) if pair[0].source == source]
    return compiled.with_suffix(".txt").read_text()


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Path, Future[str]]]:
    """PTX of every source; slow ones start first, in parallel on several cores."""
    cuda()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        slowest_first = sorted(SOURCES, key=lambda source: -source.stat().st_size)
        yield {
            source: pool.submit(ptx_of, source, tmp_path_factory.mktemp(f"nvcc-{source.parent.name}"))
            for source in slowest_first
        }


@pytest.fixture(params=SOURCES, ids=lambda source: source.parent.name)
def output(request: pytest.FixtureRequest, outputs: dict[Path, Future[str]]) -> tuple[Path, str]:
    return request.param, outputs[request.param].result()


def usage_problems(said: str) -> list[str]:
    functions = re.split(r"Function properties for ", said)[1:]
    found = [(text.split()[0], USAGE.search(text)) for text in functions]
    return [name for name, numbers in found if numbers is None or numbers.groups() != ("0", "0", "0")]


def narrow_kernels(ptx: str, kind: str) -> list[str]:
    """Kernels instantiated for packs, but without a 16-byte load or store."""
    entries = [(found.group(1), found.group()) for found in ENTRY.finditer(ptx)]
    packed = [(name, body) for name, body in entries if PACKED.findall(name)[:1] == ["1"]]
    return [name for name, body in packed if not wide(body, kind)]


def wide(body: str, kind: str) -> bool:
    return any(op == kind and int(count) * int(bits) == 128 for op, count, bits in ACCESS.findall(body))


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.parent.name)
def test_no_kernel_spills_or_uses_the_stack(source: Path) -> None:
    """Covers all GPUs that machine code is made for."""
    cuda()
    said = said_of(source)
    assert set(re.findall(r"Compiling entry function '\w+' for 'sm_(\d+)'", said)) == {"80", "90", "100", "120"}
    assert usage_problems(said) == []


def test_compute_sanitizer_is_told_of_every_kernel(output: tuple[Path, str]) -> None:
    """Compute Sanitizer selects kernels by a part of their mangled name, and reports all others as clean."""
    key, part = gpu_ops.OUR_KERNELS.split("=")
    kernels = ENTRIES.findall(output[1])
    assert key == "kns" and kernels
    assert [name for name in kernels if part not in name] == []


def test_packs_are_one_access(output: tuple[Path, str]) -> None:
    source, ptx = output
    text = source.read_text()
    in_steps = '#include "../common/steps.h"' in text
    if in_steps or "load_pack(" in text:
        assert wide(ptx, "ld")
        assert narrow_kernels(ptx, "ld") == []
    if in_steps or "store_pack(" in text:
        assert wide(ptx, "st")
    if in_steps:
        assert [name for name in narrow_kernels(ptx, "st") if ONE_NUMBER not in name] == []


def test_halves_are_converted_by_the_gpu(output: tuple[Path, str]) -> None:
    source, ptx = output
    assert {name for name in ONE_INSTRUCTION[source.parent.name] if name not in ptx} == set()


def test_a_spill_and_a_narrow_access_are_seen(tmp_path: Path) -> None:
    """Planted bug: an array indexed at run time lives on the stack, and members are stored one by one."""
    source = tmp_path / "planted.cu"
    source.write_text("""
template <bool kPacked>
__global__ void planted_kernel(const float* x, float* out, int n) {
  float kept[64];
  for (int i = 0; i < 64; ++i) kept[i] = x[i * n];
  for (int i = 0; i < 64; ++i) out[i] = kept[(i * n) % 64];
}
template __global__ void planted_kernel<true>(const float*, float*, int);
""")
    ptx = ptx_of(source, tmp_path)
    said = builder().run([*builder().nvcc_command(cuda()), "-c", str(source), "-o", str(tmp_path / "out.o")])
    assert len(usage_problems(said)) == 4  # once for each GPU
    assert len(narrow_kernels(ptx, "ld")) == len(narrow_kernels(ptx, "st")) == 2  # and in the PTX of two
