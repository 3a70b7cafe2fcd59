"""Rows of --dry-run about memory: whether the run fits, and the flags that would save most."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from megatron.config import MoEConfig, RunConfig, check_settings, check_world
from megatron.distributed.parallel_state import ParallelState
from megatron.errors import ConfigError
from megatron.model.gpt import GPT
from megatron.training.initialize import Run
from megatron.training.memory import NEARLY, RankBytes, on_accelerator, predicted
from megatron.utils.device import human_bytes, total_memory
from megatron.utils.memory_limit import memory_limit

_CHANGES_SHOWN = 3
_ONE_MACHINE = 8  # usual number of GPUs


@dataclass(frozen=True)
class Room:
    """Memory that the run must fit into."""

    of: str
    limit: int | None
    shared: bool
    """True if the ranks share it: CPUs of one machine."""

    @staticmethod
    def of_run(run: Run) -> "Room":
        given = run.config.runtime.device_bytes
        if given is not None:
            return Room(f"--device-memory {run.config.runtime.device_memory}", given, shared=False)
        if run.device.type == "cpu":
            return Room("this machine", memory_limit(), shared=True)
        return Room("this device", total_memory(run.device), shared=False)

    def needed(self, run: Run, stages: list[RankBytes]) -> float:
        """Returns the bytes to compare with the limit; `stages` has one rank per pipeline stage."""
        needs = [rank.total for rank in stages]
        return sum(needs) * run.launch.world_size / len(stages) if self.shared else max(needs)


def plan_rows(run: Run, model: nn.Module, moe: MoEConfig | None = None) -> list[tuple[str, str]]:
    """Returns table rows (name, text); none for a script's own model, or for a run that only evaluates."""
    if run.config.training.skip_train or not isinstance(model, GPT):
        return []
    room, needs = Room.of_run(run), _of_stages(run, model, moe)
    total = room.needed(run, needs)
    whose = "the ranks together" if room.shared else "the rank that needs most"
    most = human_bytes(max(rank.activations for rank in needs))
    rows = [
        ("activations", f"{most} on the rank with most (estimate, without temporary tensors)"),
        ("total memory", f"{human_bytes(total)} for {whose} (estimate){_verdict(total, room)}"),
    ]
    saved = {words: total - room.needed(other, _of_stages(other, model, moe)) for words, other in _changes(run)}
    best = sorted((words for words in saved if saved[words] > 0), key=lambda words: -saved[words])[:_CHANGES_SHOWN]
    return rows + [("saves memory", f"{human_bytes(saved[words])} with {words}") for words in best]


def _of_stages(run: Run, model: GPT, moe: MoEConfig | None) -> list[RankBytes]:
    """Returns the memory that one rank of each pipeline stage needs."""
    return predicted(run, model, run.config.parallel.layout(run.launch.world_size).group_of("pp", 0), moe)


def _verdict(total: float, room: Room) -> str:
    if room.limit is None:
        return ""
    words = "fits" if total <= NEARLY * room.limit else "may not fit" if total <= room.limit else "does not fit"
    margin = ", as temporary tensors are not counted" if words == "may not fit" else ""
    return f": {words} into the {human_bytes(room.limit)} of {room.of}{margin}"


def _changes(run: Run) -> Iterator[tuple[str, Run]]:
    """Yields (flags that save memory, this run with these flags). Combinations that the checks reject are omitted."""
    for words, section, values in _candidates(run):
        config = replace(run.config, **{section: replace(getattr(run.config, section), **values)})
        try:
            check_settings(config, needs_data=False)
            check_world(config, run.launch.world_size)
        except ConfigError:
            continue
        layout = config.parallel.layout(run.launch.world_size)
        yield words, replace(run, config=config, parallel=ParallelState.plan(layout, 0))


def _candidates(run: Run) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields (flags, section of the settings, new values of its fields)."""
    config, micro_batch = run.config, run.batch_plan.micro_batch_size
    if not config.recompute.full:
        full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_activations": False}
        yield "--recompute-granularity full --recompute-method uniform", "recompute", full
    if not config.recompute.full and not config.recompute.modules:
        yield "--recompute-granularity selective", "recompute", {"recompute_granularity": "selective"}
    if micro_batch > 1:
        fewer = {"micro_batch_size": micro_batch // 2}
        yield f"--micro-batch-size {micro_batch // 2}", "training", fewer
    if config.precision.params_dtype == "float32":
        yield "--bf16", "precision", {"bf16": True}
    if on_accelerator(run):
        yield "--optimizer-cpu-offload", "optimizer", {"optimizer_cpu_offload": True}
    yield from _layouts(config)


def _layouts(config: RunConfig) -> Iterator[tuple[str, str, dict[str, Any]]]:
    parallel = config.parallel
    for stage in range(parallel.zero + 1, 4):
        yield f"--zero-stage {stage}", "parallel", {"zero_stage": stage, "use_distributed_optimizer": False}
    if not parallel.sequence_parallel:
        yield "--sequence-parallel", "parallel", {"sequence_parallel": True}
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        size = 2 * getattr(parallel, name)
        if name.startswith("tensor") and size > _ONE_MACHINE:
            continue  # tensor-parallel ranks send much data in every layer, so they must be on one machine
        yield f"--{name.replace('_', '-')} {size}", "parallel", {name: size}
