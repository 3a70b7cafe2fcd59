"""Benchmark beside peers, on the smallest shape and a CPU: it runs, ends in time, and names missing peers."""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_peers
from benchmarks.gpu_steps import NAMED, PEAK
from benchmarks.parts.peers import NotInstalledError, Place, Shape, transformers_step

TINY = gpu_peers.Task(NAMED["tiny"], "cpu", "", warm_up=1, workers=0)


def test_it_runs_on_a_cpu(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables torch.compile: compiling the peer for a CPU takes a minute and shows nothing about a GPU."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")  # in the contenders' processes
    out = tmp_path / "peers.json"
    words = ["--sizes", "tiny", "--device", "cpu", "--rounds", "2", "--steps", "2", "--warm-up", "1", "--workers", "0"]
    words += ["--only", "ours-graphs", "transformers", "plain", "--json", str(out)]
    assert gpu_peers.main(words, {"part": "peers"}) == 0
    record = json.loads(out.read_text())
    (result,) = record["results"]
    assert record["part"] == "peers" and set(result["contenders"]) == {"ours", "transformers", "plain"}
    assert "needs a CUDA device" in result["left_out"]["ours-graphs"]
    for found in result["contenders"].values():
        assert len(found["blocks"]) == 2 and found["peak_bytes"] > 0
        assert found["tokens_per_second"] == pytest.approx(2 * 64 / (found["ms"] / 1e3))
        assert found["utilisation"] == pytest.approx(found["tflops"] * 1e12 / PEAK)
        assert 6 < found["loss"] < 8  # of 1000 entries, hardly trained
    assert result["contenders"]["ours"]["kernels"]["attention"] in ("native", "cpu")
    said = capfd.readouterr().out
    assert "ours-graphs            left out: ConfigError" in said and "the fastest peer" in said


def test_it_ends_in_time_and_leaves_a_record(tmp_path: Path) -> None:
    out, begun = tmp_path / "peers.json", time.monotonic()
    words = ["--sizes", "tiny", "--device", "cpu", "--only", "plain", "--seconds", "0", "--json", str(out)]
    assert gpu_peers.main(words) == 1
    assert time.monotonic() - begun < 60
    (result,) = json.loads(out.read_text())["results"]
    assert result["contenders"] == {} and set(result["left_out"]) == {"ours", "plain"}


def test_a_peer_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(NotInstalledError, match="pip install transformers"):
        transformers_step(Shape(1, 8, 1, 4, 16, 1), Place(torch.float32), lambda: (torch.zeros(1), torch.zeros(1)))


def test_everybody_computes_the_same_products() -> None:
    """Megatron's formula, 72 B s L h^2 (1 + s / 6h + V / 12Lh) for a step, and the padded vocabulary."""
    assert (TINY.vocab, TINY.shape.vocab) == (1024, 1024)
    layers, hidden, seq = 2, 64, 64
    formula = 72 * layers * hidden**2 * (1 + seq / (6 * hidden) + 1024 / (12 * layers * hidden))
    assert TINY.flops_per_token == pytest.approx(formula)


def test_where_the_host_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def step() -> None:
        warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    (place,) = gpu_peers.host_waits(step)
    assert place.startswith(f"{__file__}:") and modes == ["warn", "default"]
    assert gpu_peers.host_waits(lambda: None) == []
    said = gpu_peers.verdicts(NAMED["tiny"], {"ours": {"host_waits": [place], "ms": 1.0}})
    assert said == [f"ours: a step has host syncs: {place}"]


def turns(*seconds: float) -> list[dict[str, float]]:
    return [{"seconds": s, "loss": 1.0, "peak_bytes": 2.0**30 * s} for s in seconds]


def test_the_verdict_is_about_the_fastest() -> None:
    measured = {
        "ours": turns(1, 1), "ours-graphs": turns(0.5, 0.5), "compiled": turns(0.8, 1.2), "transformers": turns(2, 2)
    }  # fmt: skip
    task = gpu_peers.Task(NAMED["110M"], "cuda", "", 1, 1)
    result = gpu_peers.summary(task, measured, {"plain": "RuntimeError: CUDA out of memory"})
    assert result["contenders"]["compiled"]["our_speed_over_theirs"] == pytest.approx(1.0)
    assert result["contenders"]["compiled"]["peak_bytes"] == 1.2 * 2**30
    said = gpu_peers.table(task.size, result)
    assert "plain                  left out: RuntimeError: CUDA out of memory" in said
    assert "ours-graphs against compiled, the fastest peer: 2.000x: ahead" in said
    assert f"ours-graphs: {12 * 1024 / 0.5 / 85_000:.2f}x of the published result" in said


@pytest.mark.parametrize(("failures", "made"), [(0, True), (2, True), (4, True), (5, False)])
def test_first_steps_wait_for_the_memory_of_others(failures: int, made: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[str] = []
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: freed.append("cache"))
    waited: list[float] = []
    tries: list[int] = []

    def block(steps: int) -> float:
        tries.append(steps)
        if len(tries) <= failures:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 1.0

    if made:
        gpu_peers.first_steps(block, 7, waited.append)
    else:
        with pytest.raises(torch.OutOfMemoryError):
            gpu_peers.first_steps(block, 7, waited.append)
    assert tries == [7] * min(failures + 1, 5)
    assert waited == list(gpu_peers.WAITS[:failures]) and len(freed) == len(waited)


def test_what_is_held_is_given_back_after_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory stays reserved within a turn: the timed steps replay what the settling ones recorded."""
    did: list[str] = []

    def block(steps: int) -> float:
        did.append(f"{steps} steps")
        return 1.0

    ready = gpu_peers.Ready(block, {}, lambda: did.append("gives back"))
    monkeypatch.setitem(gpu_peers.CONTENDERS, "plain", gpu_peers.Contender(lambda task: ready))
    turn = gpu_peers.prepare("plain", TINY)
    for _ in range(2):
        assert turn(5)["loss"] == 1.0
    settling = gpu_peers.SETTLING
    assert did == [f"{TINY.warm_up} steps", "5 steps", "gives back", f"{settling} steps", "5 steps", "gives back"]
