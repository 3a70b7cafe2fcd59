"""tools/check_layout.py --cluster N: proves on one machine that a launch on N ranks does not hang."""

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from megatron.checkpoint.step_source import OWN_STEPS, StepSource
from megatron.config import DataConfig, EvaluationConfig, KernelsConfig, RunConfig, TokenizerConfig, check_world
from megatron.config.sources import SettingsSource, no_other_file
from megatron.config.stages import stage_layers
from megatron.pipeline_schedules import SCHEDULES
from megatron.prove.check_layout.check import load_script
from megatron.prove.check_layout.reproducible import changed_settings, plain_run, shrink
from megatron.prove.order.classes import representatives
from megatron.prove.order.cluster import ClusterRecording, compared_ranks, record_runs
from megatron.prove.order.events import Mark, Op, Recording
from megatron.prove.order.record import FIRST_STEP, LATER
from megatron.prove.order.waits import INDEPENDENT, ONE_QUEUE
from megatron.training.settings import read_settings

_VOCABULARY = 127
_LONG = 4
"""Smallest number of stages of a pipeline that is shrunk further."""
_SHOWN = 6
"""Number of operations of a first step that are listed one by one."""


def prove(
    world_size: int,
    script: str | None,
    argv: Sequence[str],
    *,
    workers: int,
    source: StepSource = OWN_STEPS,
    other_file: SettingsSource = no_other_file,
) -> int:
    """Prints what is proved, what every class of ranks does in its first step, and the verdict; returns the exit code.
    At most `workers` processes record at a time. The `source` reads steps and models of other programs, `other_file`
    their settings."""
    module = load_script(script)
    given = read_settings(argv, needs_data=script is None, opens_files=False, source=source, other_file=other_file)
    check_world(given, world_size)
    started, threads = time.monotonic(), torch.get_num_threads()
    torch.set_num_threads(1)  # the model is tiny
    try:
        with tempfile.TemporaryDirectory(prefix="check-layout-") as cache:
            config = for_order(given, world_size, Path(cache))
            for line in _introduction(given, config, world_size):
                print(line, flush=True)
            report = _Progress(config, world_size)
            runs = record_runs(config, world_size, module, Path(cache), workers=workers, report=report)
    finally:
        torch.set_num_threads(threads)
    new = next(iter(runs.values()))
    for line in first_steps(new):
        print(line)
    found = []
    for name, cluster in runs.items():
        found += [f"{name}: {line}" for line in cluster.findings((ONE_QUEUE, INDEPENDENT))]
    for line in found:
        print(f"  {line}")
    count = sum(len(recording.ops) for cluster in runs.values() for recording in cluster.programs.values())
    took = f"{count} operations of {len(new.programs)} classes of ranks in {time.monotonic() - started:.0f} s"
    print(f"WOULD HANG on {world_size} ranks: {took}" if found else f"PROVED for {world_size} ranks: {took}")
    return 1 if found else 0


def for_order(config: RunConfig, world_size: int, cache: Path) -> RunConfig:
    """Keeps the settings that decide the order of operations, with the smallest model, batches and data."""
    plain = plain_run(config, world_size, 2)
    data = DataConfig(
        seq_length=config.data.seq_length,
        mock_data=True,
        num_workers=0,
        data_cache_path=str(cache),
        dataloader_type=config.data.dataloader_type,
        reset_position_ids=config.data.restarts_positions,
        reset_attention_mask=config.data.isolates_documents,
        eod_mask_loss=config.data.masks_loss,
    )
    same_order = replace(
        plain,
        training=replace(plain.training, check_for_nan_in_loss_and_grad=False),  # messages are made up
        parallel=replace(plain.parallel, check_replicas_every=config.parallel.check_replicas_every and 1),
        data=data,
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=_VOCABULARY),
        logging=replace(config.logging, log_interval=1, tensorboard_dir=None, metrics_jsonl=None, wandb_project=None),
        evaluation=EvaluationConfig(eval_interval=2, eval_iters=min(config.evaluation.eval_iters, 1)),
        kernels=KernelsConfig(kernels="ref"),
    )
    return _as_few_as_the_order_needs(shrink(same_order, world_size), world_size)


def _as_few_as_the_order_needs(config: RunConfig, world_size: int) -> RunConfig:
    """Shrinks pipelines of four or more stages, because the order of operations needs fewer layers than numerics. Two
    micro-batches more than stages fill the pipeline, alternate on every stage and empty the pipeline;
    tests/cluster/test_pipelines.py proves the rest. One layer per equal stage is enough if no operation begins in a
    layer and ends in the next. Interleaved chunks need whole rounds, and zero-bubble defers over two micro-batches:
    these schedules stay unchanged."""
    parallel, training, layers = config.parallel, config.training, config.model.num_layers
    pp, dp = parallel.pipeline_model_parallel_size, config.parallel.layout(world_size).dp
    if pp < _LONG or stage_layers(layers, parallel).chunks > 1 or SCHEDULES[parallel.schedule].defers_wgrads:
        return config
    assert training.global_batch_size is not None and training.micro_batch_size is not None
    few = min(training.global_batch_size, training.micro_batch_size * dp * (pp + 2))
    across = parallel.zero > 1 or parallel.context_parallel_size > 1 or config.moe.is_on or layers != 2 * pp
    alone = not across and config.recompute.recompute_granularity != "full"
    small = replace(
        config,
        training=replace(training, global_batch_size=few),
        model=replace(config.model, num_layers=pp) if alone else config.model,
    )
    check_world(small, world_size)
    return small


def _introduction(given: RunConfig, config: RunConfig, world_size: int) -> list[str]:
    layout = config.parallel.layout(world_size)
    named = [("tensor", layout.tp), ("context", layout.cp), ("expert", layout.ep), ("pipeline", layout.pp)]
    sizes = [f"{name} {size}" for name, size in (*named, ("data", layout.dp)) if size > 1]
    reduced = {"num_layers", "hidden_size", "global_batch_size", "micro_batch_size", "seq_length", "num_experts"}
    cut = [line for line in changed_settings(given, config) if line.split()[0].lstrip("-").replace("-", "_") in reduced]
    evaluations = "evaluations, " if config.evaluation.eval_iters else "no evaluation (--eval-iters 0), "
    between = given.checkpoint.save_interval is not None or given.checkpoint.non_persistent_ckpt_type is not None
    saves = "a save after each step" if between else "save"
    left_out = "; without the copies that --replication sends" if given.checkpoint.replication else ""
    return [
        f"{' x '.join(sizes)} on {world_size} ranks: one rank of each of {len(representatives(layout))} classes, and "
        f"{len(compared_ranks(config, world_size))} others, with made-up peers",
        f"two runs: start, two steps, {evaluations}{saves} and stop{left_out}; start, load of a "
        "checkpoint, a step and stop",
        f"reduced without changing the order of operations: {', '.join(cut)}",
        "rules (docs/proofs.md): A collective or a first message connects and waits for its peers. The operations of a "
        "communicator run in order. All streams share one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) or have "
        "their own",
    ]


class _Progress:
    """Shows progress; called after each recorded rank."""

    def __init__(self, config: RunConfig, world_size: int) -> None:
        classes = representatives(config.parallel.layout(world_size))
        self._done, self._all = 0, 2 * (len(classes) + len(compared_ranks(config, world_size)))

    def __call__(self) -> None:
        self._done += 1
        if sys.stderr.isatty():
            end = "\n" if self._done == self._all else ""
            print(f"\rrecorded {self._done} of {self._all}", end=end, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- what the ranks do


def first_steps(cluster: ClusterRecording) -> list[str]:
    """Returns a paragraph for each kind of first step, with the classes that do it."""
    doing: dict[tuple[str, ...], list[int]] = {}
    for rank, recording in cluster.programs.items():
        doing.setdefault(_first_step(recording, cluster), []).append(rank)
    lines = []
    for described, ranks in doing.items():
        lines.append(f"first step of the classes of {_ranks(ranks)}:")
        lines += [f"  {line}" for line in described]
    return lines


def _first_step(recording: Recording, cluster: ClusterRecording) -> tuple[str, ...]:
    names = [event.name if isinstance(event, Mark) else None for event in recording.events]
    begin, end = names.index(FIRST_STEP), names.index(LATER)
    ops = [event for event in recording.events[begin:end] if isinstance(event, Op)]
    said = [_said(op, recording, cluster) for op in ops]
    counts = Counter(f"{recording.groups[op.group].what} {op.kind}" for op in ops)
    return (
        f"begins with {'; '.join(said[:_SHOWN])}",
        f"in all {', '.join(f'{count} x {what}' for what, count in sorted(counts.items()))}",
    )


def _said(op: Op, recording: Recording, cluster: ClusterRecording) -> str:
    """Describes an operation. Peers are named by stage, so that ranks of different replicas get equal texts."""
    axis = recording.groups[op.group].what
    if op.is_collective:
        return f"{axis} {op}"
    stage = cluster.layout.coordinates
    parts = [
        f"{'send to' if message.side == 'send' else 'receive from'} stage {stage(message.peer).pp}, "
        f"{message.size} x {message.dtype}"
        for message in op.messages
    ]
    return f"{axis} {' and '.join(parts)}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) <= 8:
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return f"ranks {', '.join(map(str, ranks[:6]))}, ... {ranks[-1]} ({len(ranks)} classes)"
