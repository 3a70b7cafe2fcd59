"""tools/gpu_check.py without a GPU: its functions run on the CPU kernels, and on the CUDA kernels in the emulator."""

from __future__ import annotations

import json
import os
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import gpu_peers, gpu_ranks, gpu_steps
from benchmarks.parts import gpu_ops
from megatron.ops import library as library_module
from megatron.ops.proof import PROOFS
from megatron.ops.proof.apart import JUDGE, judge_apart
from megatron.ops.registry import kernels_in
from tests.helpers.kernels import backend
from tests.helpers.scripts import load_script
from tests.helpers.warm import warm_python
from tests.policy.rules import ROOT

CUDA_FOLDERS = {source.parent.name for source in (ROOT / "csrc").glob("*/cuda*.cu")}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_script("tools/gpu_check.py")


def test_every_operation_is_judged_on_fresh_inputs() -> None:
    """A GPU run is the same with the library on another device as `where`."""
    emulated, cpu, said = backend("emulated"), backend("cpu"), []
    verdicts = gpu_ops.judge_all(7, (emulated.ops, "cpu"), cpu.ops, said.append, largest=gpu_ops.SMALL)
    assert [verdict.wrong for verdict in verdicts if verdict.wrong] == []
    assert {verdict.op for verdict in verdicts} == set(PROOFS)
    assert all(verdict.tensors > 0 and 0 <= verdict.error_of_twin <= 1 for verdict in verdicts)
    assert any(verdict.error_of_twin > 0 for verdict in verdicts)
    assert all("right" in line for line in said) and len(said) == len(verdicts)


def test_what_is_wrong_is_left_out_of_the_record() -> None:
    where, proof = (backend("cpu").ops, "cpu"), PROOFS["swiglu"]
    scaled = replace(proof, kernel=lambda ops: lambda x: 1.01 * proof.kernel(ops)(x))
    wrong = gpu_ops.judge(scaled, torch.float32, 1, where, None)
    assert "allowed are" in wrong.wrong[0]

    def refuses(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("swiglu: CUDA error 700\nand a second line")

    failing = gpu_ops.judge(replace(proof, kernel=lambda ops: refuses), torch.float32, 1, where, None)
    assert failing.wrong[0].endswith("swiglu: CUDA error 700")
    right = gpu_ops.judge(proof, torch.float32, 1, where, None)
    half = gpu_ops.judge(proof, torch.bfloat16, 1, where, None)
    built = {"activation": "a", "norm": "b"}
    both = {"swiglu float32": "a", "swiglu bfloat16": "a"}
    assert gpu_ops.verified_kernels([right, half], built, {}) == both
    assert gpu_ops.verified_kernels([wrong, half], built, {}) == {"swiglu bfloat16": "a"}
    assert gpu_ops.verified_kernels([right, failing], built, {}) == {}
    assert gpu_ops.verified_kernels([right, half], built, {"memcheck": "Invalid __global__ read"}) == {}
    assert gpu_ops.verified_kernels([right, half], built, {"memcheck": "not run: not installed"}) == both
    assert gpu_ops.verified_kernels([right, half], built, {"memcheck": gpu_ops.YET_TO_RUN}) == {}


def test_an_operation_is_verified_if_all_of_its_proofs_are_right() -> None:
    """The head's loss runs on kernels that have their own proofs."""
    verdicts = [
        gpu_ops.OperationReport(
            proof.name, proof.folder, "bfloat16", 1, 0.5, 0.5, ("off",) * (proof.name == "xent_split")
        )
        for proof in PROOFS.values()
    ]
    kernels = gpu_ops.verified_kernels(verdicts, {"cross_entropy": "c"}, {})
    assert kernels == {"cross_entropy bfloat16": "c"}


def test_a_result_that_changes_from_run_to_run_is_wrong() -> None:
    proof, runs = PROOFS["swiglu"], []

    def restless(x: torch.Tensor) -> torch.Tensor:
        runs.append(x)
        return proof.kernel(backend("cpu").ops)(x) * (1 + 2e-7 * len(runs))

    verdict = gpu_ops.judge(replace(proof, kernel=lambda ops: restless), torch.float32, 1, (None, "cpu"), None)
    assert any("a second run gave other bits" in text for text in verdict.wrong)


def test_the_sanitizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert {said for _, said in gpu_ops.sanitize(1)} == {"not run: compute-sanitizer is not installed"}
    program = tmp_path / "bin" / "compute-sanitizer"  # a toolkit is not always on the PATH
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\n[ "$2" = memcheck ] && exit 0\n[ "$2" = synccheck ] && echo refused && exit 255\n'
        'echo "$*" > arguments\necho "a hazard"\nexit 9\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(gpu_ops, "ROOT", tmp_path)
    assert dict(gpu_ops.sanitize(1)) == {
        "memcheck": "clean", "racecheck": "a hazard", "synccheck": "not run: exit code 255: refused"
    }  # fmt: skip
    broken = "Internal Sanitizer Error: The Sanitizer failed to handle a hardware exception"
    lines = f"1x2: right\n========= {broken}\n========= Stack\nframe #28: _start\n"
    assert gpu_ops._verdict(gpu_ops.SANITIZER_FOUND, lines) == f"not run: {broken}"
    assert gpu_ops._verdict(1, lines) == f"not run: {broken}"
    lines = lines.replace(broken, "Error: Race reported")
    assert gpu_ops._verdict(gpu_ops.SANITIZER_FOUND, lines) == "========= Error: Race reported\n========= Stack"
    given = (tmp_path / "arguments").read_text()
    assert "--error-exitcode 9 --kernel-name kns=2mk4cuda" in given
    assert "--target-processes application-only --launch-timeout 250" in given  # torch is imported for longer than 10 s
    sleep = f"/bin/sleep 61.{os.getpid()}"
    program.write_text(f"#!/bin/sh\n{sleep}\necho done\n")
    late = {said for _, said in gpu_ops.sanitize(1, seconds=0.2)}
    assert late == {"not run: it took longer than the remaining 0 s"}
    until = time.monotonic() + 30
    while any(sleep.encode() in read(path).replace(b"\0", b" ") for path in Path("/proc").glob("[0-9]*/cmdline")):
        assert time.monotonic() < until, "what it started is still there"
        time.sleep(0.05)


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_what_a_sanitizer_looks_at_has_no_memory_behind_it(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sanitizer would see only the end of the blocks that torch cuts tensors from, so each tensor gets its own."""
    did: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: did.append("CUDA is there"))
    monkeypatch.setattr(
        torch.cuda.memory, "caching_allocator_enable", lambda on: did.append("cached" if on else "an allocation each")
    )
    monkeypatch.setattr(gpu_ops, "why_not_native", lambda native, device: None)
    given: dict[str, Any] = {}
    monkeypatch.setattr(gpu_ops, "judge_all", lambda *_, **named: given.update(named) or [])
    assert tool.main(["--only-small"]) == 0
    assert did == ["CUDA is there", "an allocation each"] and given["largest"] == gpu_ops.SMALL
    assert set(PROOFS) - {proof.name for proof in given["proofs"]} == {"linear_cross_entropy"}, "torch's products"


def test_the_sanitizers_look_at_all_our_kernels() -> None:
    """They select kernels by mk::cuda, a part of our mangled names."""
    substring = gpu_ops.OUR_KERNELS.removeprefix("kns=")
    assert f"_ZN{substring}11some_kernelEv".startswith("_ZN2mk4cuda")
    for source in (ROOT / "csrc").glob("*/cuda*.cu"):
        assert "namespace mk::cuda {" in source.read_text()


def test_a_source_whose_process_dies_does_not_take_the_others_along(tmp_path: Path) -> None:
    fake = tmp_path / "check.py"
    fake.write_text(
        "import json, os, sys, time\n"
        "source, out = (sys.argv[sys.argv.index(flag) + 1] for flag in ('--folder', '--out'))\n"
        "right = [one for one in json.load(open(sys.path[0] + '/right.json')) if one['folder'] == source]\n"
        "open(out, 'w').write(json.dumps(right[:1] if source in ('norm', 'rope') else right))\n"
        "if source == 'norm': print('CUDA error 700', flush=True); os.abort()\n"
        "if source == 'rope': time.sleep(60)\n"
    )
    judge = (sys.executable, str(fake))
    everything = [
        asdict(gpu_ops.OperationReport(proof.name, proof.folder, str(dtype).removeprefix("torch."), 1, 0.0, 0.0, ()))
        for proof in PROOFS.values()
        for dtype in proof.dtypes
    ]
    (tmp_path / "right.json").write_text(json.dumps(everything))
    verdicts = list(judge_apart(sorted(CUDA_FOLDERS), "cpu", seed=1, seconds=3, judge=judge))
    wrong = {verdict.folder: verdict.wrong for verdict in verdicts if verdict.wrong}
    died = "its process ended with exit code -6: CUDA error 700"
    assert wrong == {"norm": (died,), "rope": ("not judged within 3 s",)}
    built = dict.fromkeys(CUDA_FOLDERS, "hash")
    verified = set(gpu_ops.verified_kernels(verdicts, built, {}))
    assert {"layer_norm float32", "rope float32"} < verified, "what was judged before is right"
    doubted = {kernel for folder in ("norm", "rope") for kernel in kernels_in(folder)}
    assert verified == {kernel for folder in built for kernel in kernels_in(folder)} - doubted | {
        "layer_norm float32", "rope float32"
    }  # fmt: skip


@pytest.mark.parametrize("part", ["steps", "peers", "nccl"])
def test_the_benchmarks_write_the_record(
    tool: ModuleType, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[list[str], dict[str, object]]] = []

    def benchmark(words: list[str], about: dict[str, object]) -> int:
        given.append((words, about))
        return 7

    benchmarks = {"steps": gpu_steps, "peers": gpu_peers, "nccl": gpu_ranks}
    monkeypatch.setattr(benchmarks[part], "main", benchmark)
    out = str(tmp_path / "record.json")
    assert tool.main(["--part", part, "--device", "cpu", "--out", out, "--", "--flags=--compile"]) == 7
    words, about = given[0]
    small = [] if part == "nccl" else ["--sizes", "tiny"]
    assert words == ["--device", "cpu", "--seconds", "450", "--json", out, *small, "--flags=--compile"]
    assert about["part"] == part and about["device_type"] == "cpu" and about["environment"]


def test_what_was_judged_is_in_the_record_before_the_rest_is_tried(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend("cpu")
    verdict = gpu_ops.OperationReport("swiglu", "activation", "float32", 1, 0.0, 0.0, ())
    monkeypatch.setattr(gpu_ops, "judged", lambda args, seconds: [verdict])

    def cut_off(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_ops, "times", cut_off)
    record = tmp_path / "record.json"
    with pytest.raises(KeyboardInterrupt):
        tool.main(["--device", "cpu", "--out", str(record), "--seed", "3"])
    assert set(json.loads(record.read_text())["verified"]) == {"swiglu float32"}


def test_a_sanitizer_that_did_not_look_is_named_at_the_end_and_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend("cpu")
    record = tmp_path / "record.json"
    args = gpu_ops.argparse.Namespace(device="cuda", only_small=False, seed=1, seconds=9.0, rounds=0, out=record)
    said = {"memcheck": "clean", "racecheck": "not run: exit code 255: refused", "synccheck": "clean"}
    before: list[tuple[object, object]] = []

    def sanitize(seed: int, seconds: float) -> Iterator[tuple[str, str]]:
        for tool, verdict in said.items():
            now = json.loads(record.read_text())
            before.append((now["verified"], now["sanitizer"][tool]))
            yield tool, verdict

    for name, stand_in in {
        "make_ready": lambda device: None,
        "about_run": lambda args: {"environment": {}},
        "judged": lambda args, seconds: [gpu_ops.OperationReport("swiglu", "activation", "float32", 1, 0.0, 0.0, ())],
        "sanitize": sanitize,
    }.items():
        monkeypatch.setattr(gpu_ops, name, stand_in)
    gpu_ops.check_ops(args)
    assert before == 3 * [({}, gpu_ops.YET_TO_RUN)], "verified before all sanitizers have looked"
    written = json.loads(record.read_text())
    assert set(written["verified"]) == {"swiglu float32"} and written["sanitizer"] == said
    lines = capsys.readouterr().out.splitlines()
    assert "WITHOUT compute-sanitizer racecheck, which was not run: exit code 255: refused" in lines[-3:]
    assert not any("memcheck" in line for line in lines)


def test_the_whole_command_on_a_cpu(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend("cpu")
    monkeypatch.setattr(gpu_ops, "judge_apart", partial(judge_apart, judge=(warm_python(), *JUDGE[1:])))
    record = tmp_path / "record.json"
    assert tool.main(["--device", "cpu", "--out", str(record), "--rounds", "0", "--seed", "3"]) == 0
    written = json.loads(record.read_text())
    assert written["device_type"] == "cpu" and written["seed"] == 3 and written["environment"]["torch"]
    assert set(written["verified"]) == {kernel for folder in CUDA_FOLDERS for kernel in kernels_in(folder)}
    assert "verified; not: none" in capsys.readouterr().out


def test_every_cuda_source_has_something_that_checks_it() -> None:
    assert {proof.folder for proof in PROOFS.values()} == CUDA_FOLDERS


def test_the_record_is_the_one_that_is_read(tool: ModuleType) -> None:
    """The tool answers --help without torch, so it repeats the file's name."""
    assert tool.RECORD == library_module.VERIFIED


def test_only_a_record_of_a_gpu_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "gpu_verified.json"
    monkeypatch.setattr(library_module, "VERIFIED", record)
    for device, expected in (("cpu", {}), ("cuda", {"rope float32": "a"})):
        record.write_text(json.dumps({"device_type": device, "verified": {"rope float32": "a"}}))
        assert library_module._verified_kernels() == expected
    for damaged in ("", "[]", '{"device_type": "cuda", "verified": 3}'):
        record.write_text(damaged)
        assert library_module._verified_kernels() == {}


def test_an_installation_takes_the_record_along() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert data["megatron.ops"] == [library_module.VERIFIED.name]
    assert library_module.VERIFIED.parent == ROOT / "megatron" / "ops"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "torch sees no GPU here"),
        (["--device", "cpu"], "give another file with --out"),
        (["--device", "cuda:0"], "invalid choice: 'cuda:0' (choose from"),
        (["--device", "cpu", "--out", "no/such/folder/x.json"], "there is no writable folder"),
        (["--device", "cpu", "--out", "x.json", "--", "--sizes", "tiny"], "--part ops takes no flags of a benchmark"),
    ],
)
def test_refusals(tool: ModuleType, arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    if not arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(SystemExit):
        tool.main(arguments)
    assert reason in capsys.readouterr().err


def test_kernels_that_do_not_load_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons, commands = ["not built", None], []
    monkeypatch.setattr(gpu_ops, "why_not", lambda device: reasons.pop(0))
    monkeypatch.setattr(gpu_ops, "output_of", lambda *command, **limit: commands.append(command) or "kernels: built")
    assert gpu_ops.make_ready("cuda") is None
    assert commands == [(sys.executable, str(ROOT / "csrc" / "build.py"))]


def test_a_build_that_fails_is_told_and_one_without_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build = tmp_path / "build.py"
    monkeypatch.setattr(gpu_ops, "BUILD", build)
    monkeypatch.setattr(gpu_ops, "why_not", lambda device: "not built")
    build.write_text("import sys\nsys.exit('kernels: not built (no C++ compiler (g++) on the PATH)')\n")
    assert gpu_ops.make_ready("cuda") == "not built"
    assert "exit code 1: kernels: not built (no C++ compiler (g++) on the PATH)" in capsys.readouterr().out
    build.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(gpu_ops, "BUILDING", 0.5)
    assert gpu_ops.make_ready("cuda") == "not built"
    assert "not done within 0 s" in capsys.readouterr().out


def test_a_library_without_cuda_is_asked_of_a_new_process() -> None:
    backend("cpu")
    assert gpu_ops.why_not("cpu") is None
    assert gpu_ops.why_not("npu") == "not made for the device npu"
    without = library_module.Library(without_cuda="no nvcc was found")
    assert gpu_ops.why_not_native(without, "cuda") == "built without CUDA (no nvcc was found)"


def test_who_was_started_by_another_builds_nothing(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_ops, "make_ready", lambda device: pytest.fail("another has made everything ready"))
    monkeypatch.setattr(gpu_ops, "library", lambda: library_module.Library("not built"))
    out = ["--device", "cpu", "--out", str(tmp_path / "verdicts.json")]
    assert tool.main([*out, "--only-small"]) == 1
    assert "the kernels are not built" in capsys.readouterr().err
