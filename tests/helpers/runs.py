"""Small training runs for tests: in this process (one rank), on gloo ranks, or as a user starts them."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megatron.config import RunConfig
from megatron.distributed.launch import LaunchInfo
from megatron.interop.source import OTHER_PROGRAMS
from megatron.pretrain import pretrain
from megatron.training.assemble import Parts, assemble
from megatron.training.hooks import Hook
from megatron.training.initialize import Run, build_run
from megatron.training.metrics import TrainRecord
from tests.helpers.other_programs import parse_args
from tests.helpers.scripts import load_script
from tests.helpers.warm import warm_python

REPOSITORY = Path(__file__).parents[2]

LLAMA_SHAPE: dict[str, Any] = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "position_embedding_type": "rope",
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}
TINY: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": 6,
    "lr": 1e-2,
    "vocab_size": 97,
    "mock_data": True,
    "num_workers": 0,
    "log_interval": 1,
    "eval_iters": 0,
    "make_vocab_size_divisible_by": 16,
    "device": "cpu",
}


def flags(**changes: Any) -> list[str]:
    """Command line of TINY with changes: True is a bare flag; None leaves a flag out."""
    words: list[str] = []
    for name, value in {**TINY, **changes}.items():
        flag = "--" + name.replace("_", "-").replace("opt-param", "opt_param")
        if value is None or value is False:
            continue
        words.append(flag)
        if value is not True:
            words += [str(v) for v in value] if isinstance(value, list | tuple) else [str(value)]
    return words


def pretrain_gpt() -> ModuleType:
    """Imports the script as a module."""
    return load_script("pretrain_gpt.py")


def make_run(config: RunConfig, *, rank: int = 0, world_size: int = 1, dtype: torch.dtype | None = None) -> Run:
    """A run in the test's process group; `dtype` float64 is for tests only."""
    launch = LaunchInfo(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
    return build_run(config, launch, device=torch.device("cpu"), dtype=dtype, source=OTHER_PROGRAMS)


def make_parts(argv: Sequence[str], hooks: Sequence[Hook] = (), **where: Any) -> tuple[Run, Parts]:
    run, script = make_run(parse_args(argv), **where), pretrain_gpt()
    return run, assemble(run, script.datasets_provider, script.model_provider, script.forward_step, hooks=hooks)


def train_here(argv: Sequence[str]) -> dict[str, Any]:
    """Trains in this process; returns the metrics records, the last weights and the reason of the end."""
    records: list[dict[str, Any]] = []
    run, parts = make_parts(argv, hooks=[Recorder(records)])
    with parts:
        reason = parts.trainer.fit()
    weights = {name: p.detach().clone() for name, p in parts.engine.model.named_parameters()}
    return {"records": records, "weights": weights, "reason": reason, "parts": parts, "run": run}


def pretrain_here(argv: Sequence[str]) -> int:
    """Runs `pretrain_gpt.py` in this process and returns its exit code."""
    script = pretrain_gpt()
    return program_here(lambda: pretrain(script.datasets_provider, script.model_provider, script.forward_step, argv))


def program_here(main: Callable[[], object]) -> int:
    """Runs a program in this process, whose state it restores, and returns the exit code."""
    threads, products = torch.get_num_threads(), torch.backends.mkldnn.matmul.fp32_precision
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        main()
        return 0
    except SystemExit as error:
        return int(error.code or 0)
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)
        torch.set_num_threads(threads)
        torch.backends.mkldnn.matmul.fp32_precision = products


def generate_here(*words: Any) -> int:
    from megatron.cli.generate import main

    return program_here(lambda: main([str(word) for word in words]))


class Recorder(Hook):
    def __init__(self, into: list[dict[str, Any]]) -> None:
        self.into = into

    def on_log(self, record: TrainRecord) -> None:
        self.into.append(dataclasses.asdict(record) | dict(record.reported))


def launch(
    argv: Sequence[str],
    *,
    ranks: int = 1,
    script: Path = REPOSITORY / "pretrain_gpt.py",
    launcher: str = "run",
    cwd: Path = REPOSITORY,
    timeout: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Starts a script as a user does: plain python for one rank, torchrun (`launcher` "run") or "launch" for more.
    Processes are warm (tests/helpers/warm); tests of starting itself use `launch_command`."""
    command = [*launch_command(script, ranks, launcher, python=warm_python()), *argv]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout)


def launch_command(script: Path, ranks: int, launcher: str = "run", *, python: str = sys.executable) -> list[str]:
    if ranks == 1:
        return [python, str(script)]
    module = f"torch.distributed.{launcher}"
    return [python, "-m", module, "--standalone", "--nproc_per_node", str(ranks), str(script)]


def read_metrics(path: Path, split: str = "train") -> list[dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [record for record in records if record["split"] == split]


def same_numbers(record: dict[str, Any]) -> dict[str, Any]:
    """The part of a record that two equal runs share: all digits, except clocks."""
    clocks = re.compile(r"second|tflops|utilisation|eta")
    return {key: repr(value) for key, value in record.items() if not clocks.search(key)}


def samples_of_evaluations(parts: Parts) -> list[list[int]]:
    """List that collects the ids of the samples of each evaluation from here on."""
    seen: list[list[int]] = []
    evaluate = parts.engine.evaluate

    def recording(batches: Any, *rest: Any) -> Any:
        kept = list(batches)
        seen.append([number for batch in kept for number in batch["sample_ids"].tolist()])
        return evaluate(kept, *rest)

    parts.engine.evaluate = recording  # type: ignore[method-assign]
    return seen
