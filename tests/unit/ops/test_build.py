"""csrc/build.py and setup.py with compilers that only pretend: what is built, said, locked, kept and cleaned up. None
of it has torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tests.policy.rules import ROOT

# Writes the requested file and records its arguments; fails or waits for the configured files. A shell starts ten times
# as fast as Python, and each build starts it for every object.
COMPILER = """#!/bin/sh
here=${0%/*} source=link output= before=
for word; do
    case $word in
    --version) echo "pretended compiler, release 13.1"; exit ;;
    --list-gpu-code)
        if [ -e "$here/gpus" ]; then cat "$here/gpus"; else echo "sm_75 sm_80 sm_90 sm_100 sm_103 sm_120"; fi
        exit
        ;;
    *.cpp | *.cu) [ "$source" != link ] || source=$word ;;
    esac
    [ "$before" != -o ] || output=$word
    before=$word
done
folder=${source%/*}
[ "$source" = link ] && echo link >> "$here/log" || echo "${folder##*/}/${source##*/}" >> "$here/log"
[ ! -e "$here/slow" ] || sleep "$(cat "$here/slow")"
if [ "$source" != link ] && grep -q "#error" "$source"; then
    echo "$source:1: error: planted" >&2
    exit 1
fi
printf %s "$*" > "$output"
"""


# Runs `-c CODE ...` or `SCRIPT ...` as Python does, and fails where torch is looked for.
WITHOUT_TORCH = """
import runpy, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name.split('.')[0] != 'torch', 'torch was looked for'
sys.meta_path.insert(0, Refuse())
del sys.argv[0]
if sys.argv[0] == "-c":
    exec(sys.argv.pop(1))
else:
    sys.path.insert(0, ".")
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Sandbox:
    """A checkout with the files that building needs, a fake C++ compiler and a fake nvcc."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tools = folder / "checkout", folder / "tools"
        for name in ("setup.py", "pyproject.toml", "README.md", "MANIFEST.in", "megatron_anywhere.py"):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.folder / name)
        shutil.copytree(ROOT / "csrc", self.folder / "csrc")
        for name in ("version.py", "ops/__init__.py", "data/__init__.py"):
            (self.folder / "megatron" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / "megatron" / name, self.folder / "megatron" / name)
        for name in ("tools/cxx", "tools/cuda/bin/nvcc"):
            program = folder / name
            program.parent.mkdir(parents=True, exist_ok=True)
            program.write_text(COMPILER)
            program.chmod(0o755)
        (self.tools / "cuda" / "lib64").mkdir()
        (self.tools / "cuda" / "lib64" / "libcudart_static.a").touch()

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        settings = {"CXX": str(self.tools / "cxx"), "CUDA_HOME": str(self.tools / "cuda"), **environment}
        return subprocess.Popen(
            [sys.executable, "-c", WITHOUT_TORCH, *command], cwd=self.folder, text=True, env=os.environ | settings,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, *command: str, **environment: str) -> str:
        process = self.start(*(command or ("csrc/build.py",)), **environment)
        return process.communicate(timeout=120)[0]

    def outcome(self, *command: str, **environment: str) -> str:
        """The last line that was said of the kernels."""
        lines = self.run(*command, **environment).splitlines()
        return [line for line in lines if line.startswith("kernels:")][-1]

    def compiled(self) -> list[str]:
        """Files compiled since the last call."""
        logs = [self.tools / "log", self.tools / "cuda" / "bin" / "log"]
        names = [name for log in logs if log.exists() for name in log.read_text().split()]
        for log in logs:
            log.unlink(missing_ok=True)
        return sorted(set(names))

    @property
    def helpers(self) -> Path:
        return self.folder / "megatron" / "data" / "_helpers.so"

    @property
    def library(self) -> Path:
        return self.folder / "megatron" / "ops" / "_kernels.so"

    def record(self) -> dict[str, object]:
        return json.loads(self.library.with_suffix(".json").read_text())


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


def test_only_what_changed_is_compiled_again(sandbox: Sandbox) -> None:
    assert sandbox.outcome().startswith("kernels: built, with CUDA: ")
    found = (path for path in (sandbox.folder / "csrc").glob("*/*") if path.suffix in (".cpp", ".cu"))
    everything = {f"{path.parent.name}/{path.name}" for path in found}
    assert set(sandbox.compiled()) == everything | {"link"} and sandbox.helpers.is_file()
    sandbox.run()
    assert sandbox.compiled() == ["link"]
    header = sandbox.folder / "csrc" / "activation" / "math.h"
    header.write_text(header.read_text() + "// changed\n")
    sandbox.run()
    assert sandbox.compiled() == ["activation/cpu.cpp", "activation/cuda.cu", "activation/torch.cpp", "link"]


def test_a_build_says_what_it_is_doing(sandbox: Sandbox) -> None:
    (sandbox.tools / "slow").write_text("0.05")
    slowly = "import sys; sys.path.insert(0, 'csrc'); import build; build.SAY_SECONDS = 0.05; build.main()"
    first, *progress = sandbox.run("-c", slowly).splitlines()
    progress = [line for line in progress if re.search(r"of \d\d+ objects are", line)]  # the index builders are one
    found = re.fullmatch(r"kernels: compiling (\d+) of \1 objects, \d+ at once", first)
    assert found
    counts = [int(re.fullmatch(rf"kernels: (\d+) of {found[1]} objects are ready", line)[1]) for line in progress]
    assert counts == sorted(counts) and len(counts) > 2
    (sandbox.folder / "csrc" / "rope" / "cpu.cpp").open("a").write("// changed\n")
    assert re.match(r"kernels: compiling [1-3] of \d+ objects", sandbox.run())
    nothing_to_do = sandbox.run().splitlines()
    assert [line.split(": ")[1] for line in nothing_to_do] == ["built, with CUDA", "built"]


@pytest.mark.parametrize(
    ("known", "targets"),
    [
        (None, ["compute_80,code=[sm_80,sm_90,sm_100]", "compute_120,code=[sm_120,compute_120]"]),
        ("sm_80 sm_89 sm_90 sm_90a", ["compute_80,code=[sm_80]", "compute_90,code=[sm_90,compute_90]"]),  # CUDA 12.4
        ("sm_120", ["compute_120,code=[sm_120,compute_120]"]),
        ("sm_70 sm_75", []),
    ],
)
def test_every_gpu_that_nvcc_knows(sandbox: Sandbox, known: str | None, targets: list[str]) -> None:
    if known is not None:
        (sandbox.tools / "cuda" / "bin" / "gpus").write_text(known)
    said = sandbox.outcome()
    assert ("with CUDA:" in said) == bool(targets) == (sandbox.record()["without_cuda"] is None)
    assert targets or "supports none of sm_80, sm_90, sm_100, sm_120" in said
    compiled = next((sandbox.folder / "build" / "kernels").glob("rope-cuda-*.o"), None)
    options = compiled.read_text().split() if compiled else []
    assert [word.removeprefix("-gencode=arch=") for word in options if word.startswith("-gencode")] == targets


def test_a_cuda_file_that_does_not_compile_costs_only_cuda(sandbox: Sandbox) -> None:
    source = sandbox.folder / "csrc" / "activation" / "cuda.cu"
    source.write_text("#error planted\n")
    said = sandbox.outcome()
    assert said.startswith("kernels: built for the CPU, without CUDA (nvcc: csrc/activation/cuda.cu:1: error: planted)")
    assert "-DMK_HAS_CUDA" not in sandbox.library.read_text() and sandbox.library.is_file()
    assert "error: planted" in str(sandbox.record()["without_cuda"])


@pytest.mark.parametrize(
    ("nvcc", "reason"),
    [
        (b"no program", "nvcc does not run (Exec format error)"),
        (b"#!/no/such/interpreter\n", "nvcc does not run (No such file or directory)"),
        (b"#!/bin/sh\nkill -9 $$\n", "nvcc: ended with code -9"),
        (b"#!/bin/sh\nprintf '\\377 error: \\200' >&2; exit 2\n", "nvcc: \ufffd error: \ufffd"),
    ],
)
def test_a_broken_nvcc_costs_only_cuda(sandbox: Sandbox, nvcc: bytes, reason: str) -> None:
    (sandbox.tools / "cuda" / "bin" / "nvcc").write_bytes(nvcc)
    said = sandbox.outcome()
    assert said.startswith("kernels: built for the CPU, without CUDA (") and f"{reason}): " in said
    assert sandbox.library.is_file()


def test_cuda_home_is_honoured(sandbox: Sandbox) -> None:
    assert "without CUDA (CUDA_HOME=/nowhere has no bin/nvcc)" in sandbox.run(CUDA_HOME="/nowhere")
    (sandbox.tools / "cuda" / "lib64" / "libcudart_static.a").unlink()
    assert "without CUDA (no libcudart_static.a was found near " in sandbox.run()


@pytest.mark.parametrize(
    ("cxx", "reason"),
    [
        ("no-such-compiler", "CXX=no-such-compiler: no such program"),
        ("false", "false: ended with code 1"),
    ],
)
def test_a_compiler_that_does_not_work(sandbox: Sandbox, cxx: str, reason: str) -> None:
    said = [line for line in sandbox.run(CXX=cxx).splitlines() if "compiling" not in line]
    assert said == [
        f"kernels: not built ({reason}); PyTorch's own operations are used, which are slower",
        f"index builders: not built ({reason}); numpy is used, which is slower",
    ]
    assert not sandbox.library.exists() and not sandbox.helpers.exists()


def test_without_any_compiler(sandbox: Sandbox) -> None:
    assert sandbox.outcome(CXX="", PATH="/nowhere").startswith("kernels: not built (no C++ compiler on the PATH; ")


def test_cxx_may_be_a_command_with_arguments(sandbox: Sandbox) -> None:
    assert sandbox.outcome(CXX=f"/bin/sh {sandbox.tools / 'cxx'}").startswith("kernels: built, with CUDA")


# ---------------------------------------------------------------- more than one, and less than one


def test_two_builds_at_once_share_the_work(sandbox: Sandbox) -> None:
    (sandbox.tools / "slow").write_text("0.3")
    both = [sandbox.start("csrc/build.py") for _ in range(2)]
    said = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sum("kernels: waiting for process" in text for text in said) == 1
    assert len((sandbox.tools / "cuda" / "bin" / "log").read_text().split()) == len(
        list((sandbox.folder / "csrc").glob("*/*.cu"))
    )


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert path.exists()


def test_a_build_that_hangs_is_named_and_one_that_was_killed_hurts_nobody(sandbox: Sandbox) -> None:
    (sandbox.tools / "slow").write_text("2")
    first = sandbox.start("csrc/build.py")
    wait_for(sandbox.tools / "log")
    code = "import sys; sys.path.insert(0, 'csrc'); import build; build.build(lock_seconds=0.5)"
    said = sandbox.run("-c", code)
    assert f"BuildError: process {first.pid} has been building in" in said
    first.send_signal(signal.SIGKILL)
    first.wait()
    cache = sandbox.folder / "build" / "kernels"
    halves = [cache / "activation-cpu-0.77.tmp.o", sandbox.library.with_name("_kernels.77.tmp")]
    for half in halves:
        half.write_text("half")
    (sandbox.tools / "slow").unlink()
    assert sandbox.outcome().startswith("kernels: built, with CUDA")
    assert not any(half.exists() for half in halves)


def test_objects_that_nobody_uses_are_deleted(sandbox: Sandbox) -> None:
    sandbox.run()
    old = sandbox.folder / "build" / "kernels" / "gone-0123.o"
    old.touch()
    old.with_suffix(".txt").touch()
    os.utime(old, (0, 0))
    sandbox.run()
    assert not old.exists() and not old.with_suffix(".txt").exists() and list(old.parent.glob("*.o"))


# ---------------------------------------------------------------- setup.py


def test_in_place(sandbox: Sandbox) -> None:
    said = sandbox.run("setup.py", "-q", "build_ext", "--inplace")
    assert "kernels: built, with CUDA: " in said and sandbox.helpers.is_file()
    assert sandbox.library.is_file() and sandbox.record()["without_cuda"] is None
    assert sandbox.record()["needs_of_cuda"] == {"capability": [8, 0], "cuda": [13, 1]}


def test_in_place_without_a_compiler(sandbox: Sandbox) -> None:
    said = sandbox.run("setup.py", "-q", "build_ext", "--inplace", CXX="no-such-compiler")
    lines = [line.split(" (")[0] for line in said.splitlines() if "not built" in line]
    assert lines == ["kernels: not built", "index builders: not built"]


BUILT = {"megatron/ops/_kernels.so", "megatron/ops/_kernels.json", "megatron/data/_helpers.so"}


@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
def test_what_pip_installs(sandbox: Sandbox, hook: str) -> None:
    """Calls pip's hooks; an editable installation finds the files where they were built."""
    said = sandbox.run("-c", f"from setuptools import build_meta; build_meta.{hook}('out')")
    (wheel,) = (sandbox.folder / "out").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    if hook == "build_editable":
        assert sandbox.library.is_file() and sandbox.helpers.is_file() and not names & BUILT, said
    else:
        assert names >= {*BUILT, "megatron_anywhere.py"} and "megatron/__init__.py" not in names, said
        assert not sandbox.library.exists()
        assert re.fullmatch(r"megatron_anywhere-[\d.]+-py3-none-linux_\w+\.whl", wheel.name)


def test_the_source_distribution_holds_the_sources(sandbox: Sandbox) -> None:
    sandbox.run("-c", "from setuptools import build_meta; build_meta.build_sdist('out')")
    (archive,) = (sandbox.folder / "out").glob("*.tar.gz")
    listed = subprocess.run(["tar", "tzf", str(archive)], capture_output=True, text=True, check=True).stdout
    assert all(f"/csrc/{name}" in listed for name in ("build.py", "common/emulator.h", "activation/cuda.cu"))
