"""CUDA kernels are verified at first use. The CPU stands in for the GPU, because verification, caching and verdicts do
not depend on the device. tools/gpu_check.py tests the kernels on a real GPU."""

from __future__ import annotations

import fcntl
import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.distributed.device import activate, resolve_device
from megatron.distributed.messages import all_gather_json
from megatron.distributed.parallel_state import ParallelState
from megatron.layout import Layout
from megatron.ops import resolve, select, verification
from megatron.ops.library import PATH, UNVERIFIED, Gpu, Library
from megatron.ops.operation import Fallbacks, Implementation, Native, Operation, Target
from megatron.ops.proof import OperationReport, Proof
from megatron.ops.proof import __main__ as by_command_line
from megatron.ops.proof.apart import judge_apart
from megatron.ops.registry import OPERATIONS, kernels_in
from megatron.ops.verification import RejectedKernels, agreed, judged_apart, verified
from tests.helpers.distributed import run_ranks
from tests.helpers.kernels import backend
from tests.helpers.planted import planted_checkout, planted_library

CPU = torch.device("cpu")
FOLDERS = {"activation": "hash of activation", "rope": "hash of rope"}
KERNELS = [kernel for folder in FOLDERS for kernel in kernels_in(folder)]
NATIVE = Library(unverified=dict.fromkeys(KERNELS, UNVERIFIED), cuda_sources=FOLDERS)


@dataclass
class StandIn:
    """A judge that records what it was asked."""

    outcomes: Mapping[str, RejectedKernels] = field(default_factory=dict)
    seconds: float = 0.0
    asked: list[list[str]] = field(default_factory=list)

    def __call__(self, folders: Sequence[str], device: torch.device) -> dict[str, RejectedKernels]:
        self.asked.append(list(folders))
        time.sleep(self.seconds)
        return {folder: self.outcomes.get(folder, RejectedKernels()) for folder in folders}


def check(cache: Path | None, judge: StandIn, native: Library = NATIVE) -> tuple[Library, list[str]]:
    said: list[str] = []
    return verified(native, CPU, said.append, cache=cache, judge=judge), said


def backends(native: Library, spec: str = "auto") -> dict[str, tuple[str, str]]:
    return {one.op: (one.backend, one.reason) for one in resolve(spec, "cuda", native=native).choices}


def test_what_is_right_is_used_and_verified_once(tmp_path: Path) -> None:
    judge = StandIn()
    native, (line,) = check(tmp_path, judge)
    assert backends(NATIVE)["swiglu"][0] == "torch" and backends(native)["swiglu"][0] == "native"
    assert line == f"kernels: activation, rope verified, on cpu in 0 s; kept in {tmp_path}"
    assert check(tmp_path, judge) == (native, []) and judge.asked == [["activation", "rope"]]


def test_what_is_wrong_is_not_used_and_every_start_says_so(tmp_path: Path) -> None:
    seen = "3x5: output 0: error 1e-1"
    judge = StandIn({"rope": RejectedKernels({kernel: f"{kernel}: {seen}" for kernel in kernels_in("rope")})})
    for times in (1, 2):
        native, (line,) = check(tmp_path, judge)
        assert f"rope float32, rope bfloat16, rope float16 found wrong and not used (rope float32: {seen})" in line
        assert len(judge.asked) == 1
        assert backends(native)["swiglu"][0] == "native"
        backend_of_rope, why = backends(native)["rope"]
        assert backend_of_rope == "ref" and "found wrong on this GPU (rope float32: 3x5: output 0" in why, times
    assert "found wrong on this GPU" in backends(native, "native")["rope"][1]  # asked for: used, and the table says it


def test_a_verdict_is_that_of_an_operation_in_one_dtype(tmp_path: Path) -> None:
    """Failures of four forms in fp32 once disabled the right ones in bf16."""
    wrong = {"swiglu float32": "swiglu float32: inf and nan", "gelu float32": "gelu float32: inf and nan"}
    native, (line,) = check(tmp_path, StandIn({"activation": RejectedKernels(wrong)}))
    assert "gelu float32 found wrong and not used (swiglu float32: inf and nan)" in line and "rope verified" in line
    assert native == check(tmp_path, StandIn())[0], "the cache has all of it"
    kernels = resolve("auto", "cuda", native=native)
    backends = {choice.op: choice for choice in kernels.choices}
    assert backends["swiglu"].backend == "native, torch in float32" and backends["geglu"].backend == "native"
    assert "float32 found wrong on this GPU (swiglu float32: inf and nan)" in backends["swiglu"].reason
    assert "swiglu (native, torch in float32)" in kernels.summary() and "geglu" not in kernels.summary()
    assert "swiglu" in select.left_to_compiler(kernels)


def test_calls_in_a_dtype_that_is_wrong_take_the_fallback() -> None:
    backend("cpu")
    took: list[str] = []
    swiglu = OPERATIONS["swiglu"]
    noted = Operation(
        "swiglu",
        swiglu.formula,
        lambda target: Implementation("torch", lambda x: took.append(f"torch {x.dtype}"), ""),
        Native("activation", lambda ops, x: took.append(f"native {x.dtype}"), lambda x: None),
    )
    doubts = {"swiglu float32": "wrong"}
    for mode in ("auto", "native"):
        chosen = select._choose(noted, mode, Target("cuda"), Library(unverified=doubts), None, Fallbacks())
        for dtype in (torch.float32, torch.bfloat16):
            assert chosen.function is not None
            chosen.function(torch.ones(2, dtype=dtype))
    assert took == ["torch torch.float32", "native torch.bfloat16", "native torch.float32", "native torch.bfloat16"]


@pytest.mark.parametrize(("doubts", "native"), [(["adamw bfloat16"], False), ([], True), (["grad_norm float32"], True)])
def test_the_optimizers_kernels_run_in_all_dtypes_or_in_none(doubts: list[str], native: bool) -> None:
    found = resolve("auto", "cuda", native=Library(unverified=dict.fromkeys(doubts, "wrong")))
    assert (found.backend("adamw") == "native") is native


def test_what_could_not_be_judged_is_tried_again(tmp_path: Path) -> None:
    ended = dict.fromkeys(kernels_in("rope"), "its process ended with exit code -6")
    judge = StandIn({"rope": RejectedKernels(ended, judged=False)})
    native, (line,) = check(tmp_path, judge)
    assert "rope float16 not verified and not used (its process ended" in line
    assert "native is not verified on this GPU (its process ended with exit code -6)" in backends(native)["rope"][1]
    again, _ = check(tmp_path, StandIn())
    assert not again.unverified


@pytest.mark.parametrize("changed", ["a source", "the CUDA version", "the GPU", "torch", "the proofs"])
def test_an_outcome_holds_for_what_was_verified_only(
    tmp_path: Path, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(tmp_path, StandIn())
    native, expected = NATIVE, ["activation", "rope"]
    if changed == "a source":
        native, expected = replace(NATIVE, cuda_sources=FOLDERS | {"rope": "another"}), ["rope"]
    elif changed == "the CUDA version":
        native = replace(NATIVE, needs=Gpu((8, 0), (13, 0)))
    elif changed == "the GPU":
        monkeypatch.setattr(verification, "device_name", lambda device: "another GPU")
    elif changed == "torch":
        monkeypatch.setattr(torch, "__version__", "2.99")
    else:
        monkeypatch.setattr(verification, "hash_of_files", lambda folder, files: "another")
    judge = StandIn()
    check(tmp_path, judge, native)
    assert judge.asked == [expected]


def another_key(text: str) -> str:
    record = json.loads(text)
    return json.dumps(record | {"key": record["key"] | {"gpu": "another"}})


DAMAGE: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "no object": lambda text: "[]",
    "of something else": another_key,
    "no verdict": lambda text: json.dumps({"key": json.loads(text)["key"]}),
    "a strange verdict": lambda text: json.dumps(json.loads(text) | {"wrong": 0}),
    "an empty verdict": lambda text: json.dumps(json.loads(text) | {"wrong": {"rope float32": ""}}),
    "a verdict that is no text": lambda text: json.dumps(json.loads(text) | {"wrong": {"rope float32": 1}}),
    "deep": lambda text: "[" * 200_000,
    "not text": lambda text: "\udcff\udcfe",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_is_made_again(tmp_path: Path, damage: str) -> None:
    check(tmp_path, StandIn())
    (record,) = tmp_path.glob("rope-*.json")
    right = record.read_text()
    record.write_bytes(DAMAGE[damage](right).encode(errors="surrogateescape"))
    judge = StandIn()
    native, _ = check(tmp_path, judge)
    assert judge.asked == [["rope"]] and record.read_text() == right and not native.unverified


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for cache, why in ((tmp_path / "file" / "kernels", "cannot be written (Not a directory)"), (None, "no home")):
        judge = StandIn()
        for _ in range(2):
            native, (line,) = check(cache, judge)
            assert why in line and "every start verifies again" in line and not native.unverified
        assert len(judge.asked) == 2


def test_two_processes_verify_once(tmp_path: Path) -> None:
    judge = StandIn(seconds=0.5)
    with ThreadPoolExecutor(2) as pool:  # of one process: a lock belongs to an open file
        results = list(pool.map(partial(check, judge=judge), (tmp_path, tmp_path)))
    assert len(judge.asked) == 1
    assert [native.unverified for native, _ in results] == [{}, {}]
    assert sorted("waiting" in " ".join(said) for _, said in results) == [False, True]


def test_a_lock_that_is_never_given_back_costs_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "WAIT", 0.2)
    with open(tmp_path / "lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        native, said = check(tmp_path, StandIn())
    assert not native.unverified and "waiting for another process" in said[0]


def test_ranks_that_disagree_all_fall_back(tmp_path: Path) -> None:
    """Two machines, each with its own cache: a kernel that fails on one is used on neither."""

    def rank(number: int) -> tuple[dict[str, tuple[str, str]], dict[str, tuple[str, str]]]:
        judge = StandIn({"rope": RejectedKernels({"rope float32": "rope float32: wrong here"})} if number else {})
        native, _ = check(tmp_path / str(number), judge)
        world = ParallelState.build(Layout(2), number).world
        together = agreed(native, all_gather_json(dict(native.unverified), world, dict[str, str]))
        return backends(native), backends(together)

    alone, together = zip(*run_ranks(2, rank))
    assert [one["rope"][0] for one in alone] == ["native", "native, ref in float32"]
    assert [one["rope"][0] for one in together] == ["native, ref in float32", "native, ref in float32"]
    assert "rope float32: wrong here), rank 1" in together[0]["rope"][1]
    assert [one["swiglu"][0] for one in together] == ["native", "native"]


# ---------------------------------------------------------------- when


def test_only_auto_on_a_gpu_verifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path | None] = []
    monkeypatch.setattr(select, "library", lambda: NATIVE)
    monkeypatch.setattr(select, "this_gpu", lambda: None)
    assert select.usable_library("auto", torch.device("cuda"), print) is NATIVE  # a plan
    monkeypatch.setattr(select, "this_gpu", lambda: Gpu((9, 0), (13, 0)))
    monkeypatch.setattr(select, "verified", lambda native, device, say, *, cache: asked.append(cache) or Library())
    for spec, device in (("ref", "cuda"), ("native", "cuda"), ("auto", "cpu")):
        assert select.usable_library(spec, torch.device(device), print) is NATIVE
    monkeypatch.setattr(select, "library", lambda: Library("not built"))
    assert select.usable_library("auto", torch.device("cuda"), print).missing == "not built"
    assert asked == []
    monkeypatch.setattr(select, "library", lambda: NATIVE)
    assert not select.usable_library("auto,-rope", torch.device("cuda", 1), print, tmp_path).unverified
    assert asked == [tmp_path]


# ---------------------------------------------------------------- the judge itself


@pytest.mark.parametrize(("device", "index"), [("cuda", None), ("cuda:0", 0), ("cuda:1", 1)])
def test_every_name_of_a_gpu_is_taken(
    device: str, index: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs torch's `set_device` and `get_device_properties` on a CUDA runtime that computes nothing."""
    became: list[int] = []
    monkeypatch.setattr(torch._C, "_cuda_setDevice", became.append, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    properties = SimpleNamespace(name="a GPU", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "_get_device_properties", lambda number: properties, raising=False)
    asked: list[tuple[Any, str]] = []

    def judge(proof: Proof, dtype: torch.dtype, seed: int, where: tuple[Any, str], *rest: Any) -> OperationReport:
        asked.append(where)
        return OperationReport(proof.name, proof.folder, str(dtype), 1, 0.0, 0.0, ())

    monkeypatch.setattr(by_command_line, "judge", judge)
    monkeypatch.setattr(by_command_line, "library", lambda: SimpleNamespace(ops="ops"))
    monkeypatch.setattr(sys, "argv", ["", "--device", device, "--folder", "rope", "--out", str(tmp_path / "out")])
    assert by_command_line.main() == 0
    assert asked == 3 * [("ops", device)] and became == ([] if index is None else [index])
    key = verification._key(NATIVE, "rope", torch.device(device))
    assert (key["gpu"], key["capability"]) == ("a GPU", "9.0")


@pytest.mark.parametrize(("device", "expected"), [("cuda", 3), ("cuda:0", 0), ("cuda:2", 2)])
def test_a_run_takes_every_name_of_a_gpu(device: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[int] = []
    monkeypatch.setattr("megatron.distributed.device.accelerator_type", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", became.append)
    chosen = resolve_device(device, local_rank=3)
    activate(chosen)
    assert chosen == torch.device("cuda", expected) and became == [expected]


def test_the_kernels_of_this_machine_are_right() -> None:
    """Judges in the processes that a first start on a GPU starts."""
    backend("cpu")
    assert judged_apart(["rope", "nowhere"], CPU) == {"rope": RejectedKernels(), "nowhere": RejectedKernels({}, False)}


def test_a_planted_kernel_is_found_wrong_and_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend("cpu")
    root = planted_checkout(tmp_path, "rope/cpu.cpp", "a * cos[i] - b", "a * cos[i] + b")
    kernels = planted_library(root, Path("rope/cpu.cpp"), "rope", emulated=False)
    record = json.loads(PATH.with_suffix(".json").read_text())
    record["sha256"] = hashlib.sha256(kernels.read_bytes()).hexdigest()
    kernels.with_suffix(".json").write_text(json.dumps(record))
    code = f"import pathlib, megatron.ops.library as l; l.PATH = pathlib.Path({str(kernels)!r})\n"
    code += "from megatron.ops.proof.__main__ import main; main()"
    planted = partial(judge_apart, judge=(sys.executable, "-c", code))
    monkeypatch.setattr("megatron.ops.proof.apart.judge_apart", planted)
    native = Library(unverified=dict.fromkeys(kernels_in("rope"), UNVERIFIED), cuda_sources={"rope": "hash"})
    native = verified(native, CPU, lambda line: None, cache=tmp_path / "cache")
    assert "found wrong on this GPU (rope float32: " in native.unverified["rope float32"]
    assert backends(native)["rope"][0] == "ref"
