"""What nvcc makes of every .cu file, without a GPU: no spills, no stack, 16 bytes an access where packs are used."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.parts import gpu_ops
from tests.helpers.kernels import builder
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
    "norm": {"cvt.f32.f16", "cvt.rn.f16.f32", "cvt.rn.bf16.f32"},
    "optim": {"cvt.f32.f16", "cvt.rn.f16.f32", "cvt.rn.bf16.f32"},
    "rope": {"cvt.f32.f16", "cvt.rn.f16.f32", "cvt.rn.bf16.f32"},
    "softmax": {"cvt.f32.f16", "cvt.rn.f16.f32", "cvt.rn.bf16.f32", "ex2.approx.ftz.f32", "max.NaN.f32"},
    "cross_entropy": {"cvt.f32.f16", "cvt.rn.f16.f32", "cvt.rn.bf16.f32", "ex2.approx.ftz.f32", "max.NaN.f32"},
}


def compiled(source: Path, folder: Path) -> tuple[str, str]:
    """What the assembler says, and the PTX."""
    try:
        cuda = builder().find_cuda()
    except builder().CudaError as error:
        pytest.skip(f"{error}: CUDA files are not compiled here")
    command = [*builder().nvcc_command(cuda), "-Xptxas", "-v", "--keep", "--keep-dir", str(folder)]
    done = subprocess.run(
        [*command, "-c", str(source), "-o", str(folder / "out.o")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr, "\n".join(ptx.read_text() for ptx in sorted(folder.glob("*.ptx")))


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Path, Future[tuple[str, str]]]]:
    """Of every source, the slowest begun first: on several cores they are compiled at once."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        slowest_first = sorted(SOURCES, key=lambda source: -source.stat().st_size)
        yield {
            source: pool.submit(compiled, source, tmp_path_factory.mktemp(f"nvcc-{source.parent.name}"))
            for source in slowest_first
        }


@pytest.fixture(params=SOURCES, ids=lambda source: source.parent.name)
def output(request: pytest.FixtureRequest, outputs: dict[Path, Future[tuple[str, str]]]) -> tuple[Path, str, str]:
    return request.param, *outputs[request.param].result()


def usage_problems(said: str) -> list[str]:
    functions = re.split(r"Function properties for ", said)[1:]
    found = [(text.split()[0], USAGE.search(text)) for text in functions]
    return [name for name, numbers in found if numbers is None or numbers.groups() != ("0", "0", "0")]


def narrow_kernels(ptx: str, kind: str) -> list[str]:
    """Kernels made for packs without one 16-byte load or store."""
    entries = [(found.group(1), found.group()) for found in ENTRY.finditer(ptx)]
    packed = [(name, body) for name, body in entries if PACKED.findall(name)[:1] == ["1"]]
    return [name for name, body in packed if not wide(body, kind)]


def wide(body: str, kind: str) -> bool:
    return any(op == kind and int(count) * int(bits) == 128 for op, count, bits in ACCESS.findall(body))


def test_no_kernel_spills_or_uses_the_stack(output: tuple[Path, str, str]) -> None:
    """On any of the GPUs that machine code is made for."""
    _, said, _ = output
    assert set(re.findall(r"Compiling entry function '\w+' for 'sm_(\d+)'", said)) == {"80", "90", "100", "120"}
    assert usage_problems(said) == []


def test_compute_sanitizer_is_told_of_every_kernel(output: tuple[Path, str, str]) -> None:
    """It chooses by a part of the name in machine code, and calls what it was not told of clean."""
    key, part = gpu_ops.OUR_KERNELS.split("=")
    kernels = ENTRIES.findall(output[2])
    assert key == "kns" and kernels
    assert [name for name in kernels if part not in name] == []


def test_packs_are_one_access(output: tuple[Path, str, str]) -> None:
    source, _, ptx = output
    text = source.read_text()
    in_steps = '#include "../common/steps.h"' in text
    if in_steps or "load_pack(" in text:
        assert wide(ptx, "ld")
        assert narrow_kernels(ptx, "ld") == []
    if in_steps or "store_pack(" in text:
        assert wide(ptx, "st")
    if in_steps:
        assert narrow_kernels(ptx, "st") == []


def test_halves_are_converted_by_the_gpu(output: tuple[Path, str, str]) -> None:
    source, _, ptx = output
    assert {name for name in ONE_INSTRUCTION[source.parent.name] if name not in ptx} == set()


def test_a_spill_and_a_narrow_access_are_seen(tmp_path: Path) -> None:
    """Planted: an array indexed at run time lives on the stack, and members are stored one by one."""
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
    said, ptx = compiled(source, tmp_path)
    assert len(usage_problems(said)) == 4  # once for each GPU
    assert len(narrow_kernels(ptx, "ld")) == len(narrow_kernels(ptx, "st")) == 2  # and in the PTX of two
