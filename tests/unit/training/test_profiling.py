"""`--profile` sums up the trace of a real run correctly, and handmade traces of an accelerator."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.cli.profile_summary import main
from megatron.config import ProfileConfig
from megatron.errors import DataError
from megatron.training.profiling.profiler import StepProfiler, build_profiler
from megatron.training.profiling.trace_summary import CATEGORIES, Event, Summary, read_trace, summarise
from megatron.utils.log import RankLog
from tests.helpers.mutations import only_our_errors, texts
from tests.helpers.runs import flags, pretrain_here

CPU = torch.device("cpu")
THREAD, OTHER, STREAM, STREAM2 = (1, 1), (1, 2), (0, 7), (0, 20)


def op(name: str, start: float, end: float, thread: Any = THREAD, kind: str = "cpu_op") -> Event:
    return Event(name, kind, start, end, thread)


def step(start: float, end: float, number: int = 1) -> Event:
    return op(f"step {number}", start, end, kind="user_annotation")


def micro(summary: Summary) -> dict[str, float]:
    """Microseconds per step of the categories that have any."""
    return {name: round(1e6 * s, 6) for name, s in summary.seconds.items() if s > 0}


def test_a_moment_on_the_cpu_belongs_to_the_innermost_operation() -> None:
    events = [
        step(0, 100),
        op("aten::linear", 10, 40),
        op("aten::mm", 20, 35),
        op("aten::copy_", 36, 38),
        op("_BlockedAttention", 50, 70),
        op("aten::bmm", 52, 60),
        op("optimizer", 80, 95, kind="user_annotation"),
        op("aten::mm", 82, 84),
    ]
    found = summarise(events)
    assert micro(found) == {"GEMM": 28, "elementwise": 2, "attention": 20, "optimizer": 15, "idle": 35}
    assert sum(found.seconds.values()) == pytest.approx(found.wall) and found.wall == pytest.approx(100e-6)


def test_waiting_for_a_collective_is_communication_and_what_runs_beside_it_is_not() -> None:
    events = [
        step(0, 100),
        op("c10d::allreduce_", 10, 15),
        op("gloo:all_reduce", 15, 60, OTHER),
        op("aten::mm", 20, 40),
    ]
    assert micro(summarise(events)) == {"communication": 5 + 5 + 20, "GEMM": 20, "idle": 50}


def test_a_function_of_python_waits_where_a_collective_is_under_way() -> None:
    """A tensor-parallel layer waits inside its autograd function, a pipeline on its own thread between other work."""
    events = [
        step(0, 100),
        op("_Linear", 0, 40),
        op("gloo:all_reduce", 5, 35, OTHER),
        op("aten::addmm_", 10, 20),
        op("gloo:recv", 50, 80, kind="user_annotation"),
        op("aten::mm", 45, 60),
        op("aten::mul", 75, 90),  # ends after the operation under way, so it is not nested in it
        op("optimizer", 90, 100, kind="user_annotation"),
        op("gloo:all_reduce", 95, 99, OTHER),
    ]
    found = summarise(events)
    assert micro(found) == {"GEMM": 25, "elementwise": 15, "communication": 20 + 15 + 4, "optimizer": 6, "idle": 15}
    waits = next(o for o in found.slowest if o.name == "waiting for a collective")
    assert waits.calls == 3 and sum(found.seconds.values()) == pytest.approx(found.wall)


def test_attention_in_a_compiled_layer() -> None:
    """The trace has no function names there, only products and kernels."""
    events = [
        step(0, 100),
        op("CompiledFunction", 0, 60),
        op("## Call CompiledFxGraph abc ##", 5, 55),
        op("aten::bmm", 10, 20),
        op("megatron_native::block_gradients_", 20, 25),
        op("megatron_native::softmax_forward_", 25, 30),
        op("aten::mm", 30, 40),
    ]
    assert micro(summarise(events)) == {"attention": 20, "GEMM": 10, "elementwise": 20, "idle": 50}


def test_steps_are_averaged_and_what_lies_between_them_is_idle() -> None:
    events = [step(0, 40, 3), op("aten::mm", 0, 30), step(50, 100, 4), op("aten::mm", 60, 90)]
    found = summarise(events)
    assert (found.steps, micro(found)) == (2, {"GEMM": 30, "idle": 20})
    assert [(o.name, o.calls, round(1e6 * o.seconds)) for o in found.slowest] == [("aten::mm", 1, 30)]


def test_an_accelerator_is_judged_by_its_kernels() -> None:
    def kernel(name: str, start: float, end: float, stream: Any = STREAM) -> Event:
        return op(name, start, end, stream, "kernel")

    events = [
        step(0, 50),
        op("aten::mm", 5, 45),  # the CPU only hands it over
        kernel("nvjet_tst_128x256_64x4", 10, 40),
        kernel("flash_fwd_kernel", 40, 50),
        kernel("elementwise_kernel", 45, 55, STREAM2),  # 5 of it beside the attention
        kernel("ncclDevKernel_AllReduce_Sum_bf16", 30, 70, STREAM2),  # 25 of it beside work
        op("optimizer", 70, 90, STREAM, "gpu_user_annotation"),
        kernel("vectorized_elementwise_kernel", 72, 88),
        op("Memcpy DtoH", 90, 100, STREAM, "gpu_memcpy"),
    ]
    found = summarise(events)
    assert found.wall == pytest.approx(100e-6)
    assert micro(found) == {
        "GEMM": 30, "attention": 10, "elementwise": 5 + 10, "communication": 15, "optimizer": 16, "idle": 14,
    }  # fmt: skip
    assert found.hidden == pytest.approx(25e-6)
    assert "hidden communication" in found.table()


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"traceEvents": [{"ph": "X"}]}', b"\x1f\x8b broken"])
def test_what_is_no_trace_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    for name, data in (("t.json", content), ("t.json.gz", gzip.compress(content)), ("u.json.gz", content)):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=rf"{name}: (not a trace|cannot be read)"):
            read_trace(tmp_path / name)


def test_traces_of_a_stranger(tmp_path: Path) -> None:
    """Every untrusted trace gives a table, or one line."""
    kinds = {"op": "cpu_op", "mm": "kernel", "step 1": "user_annotation", "optimizer": "gpu_user_annotation"}
    events = [
        {"ph": "X", "name": name, "cat": kind, "ts": at, "dur": 5, "pid": 1, "tid": 1}
        for at, (name, kind) in enumerate(kinds.items())
    ]
    path = tmp_path / "t.json"

    def read(text: str) -> None:
        path.write_text(text)
        summarise(read_trace(path)).table()

    taken, refused = only_our_errors(read, texts({"traceEvents": events}, 300, 26))
    assert taken and refused
    only_our_errors(read, iter(['{"traceEvents": [1]}', '{"traceEvents": {"ph": 1}}', '{"traceEvents": "X"}']))
    only_our_errors(lambda name: read_trace(Path(name)), iter(["/dev/zero", str(tmp_path), "missing"]))


def test_a_trace_without_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not contain a whole step.*--profile"):
        summarise([op("aten::mm", 0, 1)])


def run(profiler: StepProfiler, iterations: range) -> None:
    x = torch.randn(64, 64)
    for iteration in iterations:
        profiler.before_iteration(iteration)
        torch.softmax(x @ x, -1)
        profiler.after_iteration(iteration)


def test_the_window_is_traced_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = ProfileConfig(profile=True, profile_step_start=2, profile_step_end=4, profile_dir=str(tmp_path / "p"))
    run(StepProfiler(config, 3, CPU), range(1, 8))
    assert [path.name for path in (tmp_path / "p").iterdir()] == ["rank3-iterations3-4.pt.trace.json.gz"]
    assert "2 steps of" in capsys.readouterr().out
    assert main([str(tmp_path / "p"), "--top", "2"]) == 0
    text = capsys.readouterr().out
    assert "GEMM" in text and all(category in text for category in CATEGORIES)


def test_a_step_that_fails_leaves_its_trace(tmp_path: Path) -> None:
    config = ProfileConfig(profile=True, profile_step_start=0, profile_step_end=9, profile_dir=str(tmp_path))
    profiler = StepProfiler(config, 0, CPU)
    run(profiler, range(1, 3))
    profiler.before_iteration(3)  # and fails: there is nothing after it but the end of the run
    profiler.on_end()
    (path,) = tmp_path.iterdir()
    assert path.name == "rank0-iterations1-3.pt.trace.json.gz" and summarise(read_trace(path)).steps == 3


def test_ranks_that_are_not_named_and_windows_that_are_past(capsys: pytest.CaptureFixture[str]) -> None:
    config = ProfileConfig(profile=True, profile_ranks=(1,))
    assert build_profiler(config, 0, CPU, 0, RankLog(0)) == []
    assert build_profiler(ProfileConfig(), 0, CPU, 0, RankLog(0)) == []
    assert len(build_profiler(config, 1, CPU, 0, RankLog(1))) == 1
    assert build_profiler(replace(config, profile_ranks=(0,)), 0, CPU, 12, RankLog(0)) == []
    assert capsys.readouterr().out.count("nothing is traced") == 1


def test_a_snapshot_that_there_will_not_be_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = ProfileConfig(profile=True, record_memory_history=True, memory_snapshot_path="m.pickle")
    build_profiler(config, 0, CPU, 0, RankLog(0))
    said = "--memory-snapshot-path m.pickle: requires a GPU, but there is none"
    assert said in "".join(capsys.readouterr())
    build_profiler(replace(config, memory_snapshot_path=None), 0, CPU, 0, RankLog(0))
    build_profiler(config, 0, torch.device("cuda"), 0, RankLog(0))
    assert "snapshot" not in "".join(capsys.readouterr())


def test_a_run_that_ends_within_the_window_leaves_its_trace(tmp_path: Path) -> None:
    config = ProfileConfig(profile=True, profile_step_start=2, profile_step_end=9, profile_dir=str(tmp_path))
    profiler = StepProfiler(config, 0, CPU)
    run(profiler, range(1, 5))
    assert not list(tmp_path.iterdir())
    profiler.on_end()
    (path,) = tmp_path.iterdir()
    assert path.name == "rank0-iterations3-4.pt.trace.json.gz" and summarise(read_trace(path)).steps == 2
    profiler.on_end()  # a second time there is nothing left to do
    assert list(tmp_path.iterdir()) == [path]


def test_a_window_that_the_run_never_reached_is_said_by_one_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ProfileConfig(profile=True, profile_ranks=(2, 1), profile_dir=str(tmp_path))
    for rank in (1, 2):
        profiler = StepProfiler(config, rank, CPU)
        run(profiler, range(1, 4))
        profiler.on_end()
    said = capsys.readouterr().out
    assert said == "warning: --profile-step-start 10: nothing was traced, because the run ended earlier\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("start", "traced"), [(1, ["rank0-iterations2-3.pt.trace.json.gz"]), (4, [])])
def test_a_run_that_stops_early(start: int, traced: list[str], tmp_path: Path, capfd: Any) -> None:
    """--exit-interval ends the run within the window, or before it."""
    window = {"profile": True, "profile_step_start": start, "profile_step_end": 5, "profile_dir": tmp_path / "p"}
    assert pretrain_here(flags(exit_interval=3, **window)) == 0
    assert [path.name for path in (tmp_path / "p").glob("*")] == traced
    assert ("nothing was traced, because the run ended earlier" in capfd.readouterr().out) == (not traced)


def test_a_folder_without_traces_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "train with --profile first" in capsys.readouterr().err


def test_a_real_run(tmp_path: Path) -> None:
    """Includes memory; products take most of a step, and the parts add up."""
    root = Path(__file__).resolve().parents[3]
    flags = (
        "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
        "--micro-batch-size 4 --train-iters 4 --lr 1e-3 --mock-data --vocab-size 1000 --eval-iters 0 --profile "
        "--profile-step-start 1 --profile-step-end 3 --record-memory-history --pytorch-profiler-collect-shapes"
    )
    command = [sys.executable, str(root / "pretrain_gpt.py"), *flags.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "profile" / "rank0-iterations2-3.pt.trace.json.gz"
    found = summarise(read_trace(path))
    assert found.steps == 2 and sum(found.seconds.values()) == pytest.approx(found.wall)
    for category in ("GEMM", "attention", "elementwise", "optimizer"):
        assert found.seconds[category] > 0, category
    raw = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert any(event["name"] == "[memory]" for event in raw)
    assert any("Input Dims" in event.get("args", {}) for event in raw)
