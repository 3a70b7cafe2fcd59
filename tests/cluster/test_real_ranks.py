"""Start, training, evaluation, save, stop and load, recorded on real ranks over gloo. What a rank does follows from
what it receives; sizes that a router decides are compared too."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.config import parse_args
from megatron.distributed.launch import LaunchInfo
from megatron.prove.order.agreement import disagreements
from megatron.prove.order.events import Recording
from megatron.prove.order.peers import gloo_peers
from megatron.prove.order.recorder import recorded
from megatron.prove.order.waits import STRICTEST, play
from megatron.training.assemble import assemble
from megatron.training.checkpointing import held_save_directory
from megatron.training.initialize import build_run
from megatron.training.program import train_and_evaluate
from megatron.utils.log import RankLog
from tests.equivalence.test_moe import DEEPSEEK, EP, PP, SP, TP
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import few_batches
from tests.helpers.runs import flags, pretrain_gpt

RANKS = 4
COMMON = {
    "num_layers": 4,
    "train_iters": 2,
    "eval_interval": 1,
    "eval_iters": 1,
    "save_interval": 1,
    "lr_decay_iters": 3,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor and pipeline": {TP: 2, PP: 2, **SP, "exit_signal_handler": True},
    "interleaved": {PP: 2, "num_layers_per_virtual_pipeline_stage": 1, "overlap_grad_reduce": True},
    "context and pipeline": {"context_parallel_size": 2, PP: 2, "pipeline_schedule": "zero-bubble"},
    "experts": {**DEEPSEEK, EP: 2, TP: 2, **SP, "check_replicas_every": 1},
}


def run_all(rank: int, folder: Path) -> dict[str, tuple[Recording, Recording]]:
    torch.set_num_threads(1)
    dist.barrier()  # a rank that leaves while another still connects closes its connection
    dist.destroy_process_group()
    return {
        name: (train(rank, folder / name, 2, axes), train(rank, folder / name, 3, axes))
        for name, axes in LAYOUTS.items()
    }


def train(rank: int, folder: Path, iterations: int, axes: dict[str, Any]) -> Recording:
    """Starts a new training, or resumes one if its checkpoint exists."""
    save = {"save": str(folder / "steps"), "load": str(folder / "steps") if iterations > 2 else None}
    config = parse_args(flags(**{**COMMON, **few_batches(RANKS, axes, {}), **save, "train_iters": iterations}))
    folder.mkdir(exist_ok=True)
    store, script = dist.FileStore(str(folder / f"store{iterations}"), RANKS), pretrain_gpt()
    with recorded(rank, RANKS, peers=gloo_peers, store=store) as tape:
        launch = LaunchInfo(rank=rank, world_size=RANKS, local_rank=rank, local_world_size=RANKS)
        run = build_run(config, launch, device=torch.device("cpu"), log=RankLog(rank, io.StringIO()))
        with (
            held_save_directory(run) as (history, _),
            assemble(run, script.datasets_provider, script.model_provider, script.forward_step, history) as parts,
        ):
            assert train_and_evaluate(run, parts).kind == "done" and parts.progress.iteration == iterations
        dist.barrier()
        return tape.recording


def test_no_run_hangs_from_its_start_to_its_stop(tmp_path: Path) -> None:
    results = run_ranks(RANKS, run_all, tmp_path, timeout=240.0)
    for name in LAYOUTS:
        for part in (0, 1):
            recordings = {rank: result[name][part] for rank, result in enumerate(results)}
            assert disagreements(recordings, peers_are_real=True) == [], (name, part)
            assert play(recordings, STRICTEST).stuck == [], (name, part)
