"""A missing, damaged, stale or mismatched library gives one line and PyTorch's own operations, never a crash."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.commands import build_command
from megatron.errors import ConfigError
from megatron.ops import activation, resolve
from megatron.ops import library as module
from megatron.ops.library import PATH, SOURCES, Gpu, Library, library, load
from megatron.ops.registry import kernels_in
from tests.helpers.kernels import builder
from tests.policy.rules import ROOT

NOWHERE = Path("nowhere")  # no sources to compare with


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    if (missing := library().missing) is not None:
        pytest.skip(f"the kernels are {missing}")
    for suffix in (".so", ".json"):
        shutil.copy2(PATH.with_suffix(suffix), tmp_path)
    return tmp_path / PATH.name


def bless(path: Path) -> None:
    """Makes the record accept the library as built."""
    record = path.with_suffix(".json")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"sha256": module._digest(path)}))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garble(path: Path) -> None:
    path.write_bytes(b"\x7fELF" + bytes(range(256)) * 8)
    bless(path)


def empty(path: Path) -> None:
    path.write_bytes(b"")
    bless(path)


def shorten_record(path: Path) -> None:
    path.with_suffix(".json").write_text('{"sha256": "')


def strange_record(path: Path) -> None:
    path.with_suffix(".json").write_text("[]")


def drop_record(path: Path) -> None:
    path.with_suffix(".json").unlink()


def another_machine(path: Path) -> None:
    record = path.with_suffix(".json")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"machine": "riscv64"}))


def replace_library(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (Path.unlink, "not built"),
        (truncate, r"_kernels.so was truncated or replaced after it was built"),
        (replace_library, r"_kernels.so was truncated or replaced after it was built"),
        (another_machine, r"_kernels.so was built for riscv64, but this machine is \w+; build again"),
        (garble, r"torch .* cannot load them \("),
        (empty, r"torch .* cannot load them \("),
        (drop_record, "_kernels.json is missing or damaged"),
        (shorten_record, "_kernels.json is missing or damaged"),
        (strange_record, "_kernels.json is missing or damaged"),
    ],
)
def test_damage_is_one_line(copy: Path, damage: Callable[[Path], None], reason: str) -> None:
    damage(copy)
    missing = load(copy, NOWHERE).missing
    assert missing is not None and re.search(reason, missing) and "\n" not in missing
    assert missing.endswith(build_command())


@pytest.mark.parametrize("unreadable", ["_kernels.so", "cpu.cpp"])
def test_what_cannot_be_read_is_one_line(copy: Path, unreadable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == unreadable:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    missing = load(copy, SOURCES).missing
    assert missing is not None and re.fullmatch(
        rf"not usable: .*{unreadable} cannot be read \(Permission denied\); .*", missing
    )


def compiled(source: str, path: Path) -> None:
    """Compiles a few lines of C++ into a shared object in place of the kernels."""
    cxx = builder().compiler()
    command = [*cxx, "-shared", "-fPIC", "-Wl,-z,now", "-x", "c++", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)
    bless(path)


def test_made_for_another_torch(copy: Path) -> None:
    compiled('extern "C" int torch_of_the_future(); int use() { return torch_of_the_future(); }', copy)
    missing = load(copy, NOWHERE).missing
    assert missing is not None and "undefined symbol: torch_of_the_future" in missing and "\n" not in missing


def test_a_cpu_below_the_lowest_tier(copy: Path) -> None:
    compiled('extern "C" int mk_cpu_tier() { return 0; }', copy)
    assert "this CPU has none of the instruction sets" in str(load(copy, NOWHERE).missing)


def test_an_object_that_is_not_ours(copy: Path) -> None:
    compiled("int nothing;", copy)
    assert "mk_cpu_tier" in str(load(copy, NOWHERE).missing)


def test_older_than_its_sources(copy: Path, tmp_path: Path) -> None:
    sources = tmp_path / "csrc"
    shutil.copytree(SOURCES, sources)
    (sources / "activation" / "cpu.cpp").open("a").write("// edited\n")
    assert load(copy, sources).missing == f"older than csrc/; build again: {build_command()}"


def test_a_good_copy_loads(copy: Path) -> None:
    """Runs in a new process, because operations can be registered only once."""
    code = f"from pathlib import Path; from megatron.ops.library import load; print(load(Path({str(copy)!r})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("Library(missing=None"), done.stderr


def test_without_a_library_torch_runs_and_the_table_says_why() -> None:
    gone = Library("not built: python setup.py build_ext --inplace")
    kernels = resolve("auto", "cpu", native=gone)
    assert kernels.table().splitlines()[-1] == "the native kernels are not built: python setup.py build_ext --inplace"
    assert "native" not in {choice.backend for choice in kernels.choices}
    x = torch.randn(3, 8)
    torch.testing.assert_close(kernels.swiglu(x), activation.swiglu(x))
    with pytest.raises(
        ConfigError, match=r"--kernels native: the native kernels are not built: .*; to run without them, use --kernels"
    ):
        resolve("native", "cpu", native=gone)


def test_a_kernel_that_no_gpu_has_checked_is_not_taken_by_itself() -> None:
    unverified = Library(unverified=dict.fromkeys(kernels_in("activation"), module.UNVERIFIED))
    reasons = {choice.op: choice for choice in resolve("auto", "cuda", native=unverified).choices}
    assert reasons["swiglu"].backend == "torch" and "not yet verified on this GPU" in reasons["swiglu"].reason
    asked = {choice.op: choice for choice in resolve("auto", "cuda", native=Library()).choices}
    assert asked["swiglu"].backend == "native"
    with pytest.raises(ConfigError, match=r"built without CUDA \(no nvcc was found\)"):
        resolve("native", "cuda", native=Library(None, "no nvcc was found"))


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [
        (Gpu((8, 0), (13, 0)), "compiled for GPUs of capability 9.0 or newer, not 8.0"),
        (
            Gpu((9, 0), (12, 8)),
            "built with CUDA 13.1, but the GPU's driver supports at most CUDA 12.8: update the driver",
        ),
        (Gpu((9, 0), (13, 0)), None),  # of one major version every driver runs every CUDA
        (Gpu((10, 0), (13, 2)), None),
        (Gpu((9, 0), (0, 0)), None),
    ],
)
def test_a_gpu_that_the_kernels_were_not_compiled_for(
    gpu: Gpu, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.ops.select.this_gpu", lambda: gpu)
    built = Library(needs=Gpu((9, 0), (13, 1)))
    choice = {choice.op: choice for choice in resolve("auto", "cuda", native=built).choices}["swiglu"]
    assert choice.backend == ("native" if reason is None else "torch")
    if reason is not None:
        assert f"native is {reason}" in choice.reason
        with pytest.raises(ConfigError, match=f"--kernels native: the native kernels are {reason}"):
            resolve("native", "cuda", native=built)
    assert resolve("native", "cpu", native=built).choices[0].backend == "native"


def test_a_build_with_cuda_says_which_gpus_can_run_it() -> None:
    if library().missing is not None or library().without_cuda is not None:
        pytest.skip("no kernels here, or none for CUDA")
    needs = library().needs
    assert needs is not None and needs.capability == (8, 0) and needs.cuda >= (12, 0)


# ---------------------------------------------------------------- what it needs of the system

# All that a torch from 2.10 on promises to keep, and the C and C++ libraries of GCC 11 or newer.
ALLOWED_LIBRARIES = {"libtorch_cpu.so", "libstdc++.so.6", "libm.so.6", "libc.so.6", "libgcc_s.so.1",
                     "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}  # fmt: skip
NEWEST = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (4, 3)}


def symbols(*options: str) -> list[str]:
    program = shutil.which("nm")
    if program is None or library().missing is not None:
        pytest.skip("no nm here, or no kernels")
    listed = subprocess.run([program, "-D", *options, str(PATH)], capture_output=True, text=True, check=True).stdout
    return [line.split()[-1] for line in listed.splitlines()]


def test_it_needs_only_the_stable_symbols_of_torch() -> None:
    foreign = [name for name in symbols("--undefined-only") if "@" not in name]
    weak_of_the_linker = {"_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__gmon_start__"}
    private = [name for name in foreign if not name.startswith(("aoti_torch_", "torch_"))]
    assert set(private) <= weak_of_the_linker


def test_it_shows_nothing_that_another_library_could_take_for_its_own() -> None:
    assert not [name for name in symbols("--defined-only") if "c10" in name or "PyInit" in name or "cuda" in name]


def test_versions_of_the_c_libraries() -> None:
    for name in symbols("--undefined-only"):
        if found := re.search(r"@(GLIBC|GLIBCXX|CXXABI|GCC)_([0-9.]+)$", name):
            assert tuple(map(int, found[2].split("."))) <= NEWEST[found[1]], name


def test_libraries() -> None:
    program = shutil.which("readelf")
    if program is None or library().missing is not None:
        pytest.skip("no readelf here, or no kernels")
    listed = subprocess.run([program, "-d", str(PATH)], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"\(NEEDED\).*\[(.*)\]", listed)) <= ALLOWED_LIBRARIES
    assert "RPATH" not in listed and "RUNPATH" not in listed
