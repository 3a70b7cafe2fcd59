"""Predicts the memory of a training on CPUs, before any weight is initialised."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from megatron.config import MoEConfig
from megatron.errors import ConfigError
from megatron.model.gpt import GPT
from megatron.training.activation_bytes import activation_bytes
from megatron.training.initialize import Run
from megatron.training.model import ModelProvider, count_by_stage
from megatron.training.state_bytes import state_bytes
from megatron.utils.device import human_bytes
from megatron.utils.memory_limit import memory_limit

_NEARLY = 0.9
"""Share of the machine's memory above which the run logs a warning."""


@dataclass(frozen=True)
class RankBytes:
    state: float
    """Weights, gradients and optimizer."""
    activations: float

    @property
    def total(self) -> float:
        return self.state + self.activations


def predicted(run: Run, model: GPT, ranks: Iterable[int], moe: MoEConfig | None = None) -> list[RankBytes]:
    """Peak bytes of each of these ranks; ranks of one pipeline stage need the same. `model` describes the whole model.
    `moe`: all its experts, if `model` was built with fewer."""
    layout, by_stage = run.config.parallel.layout(run.launch.world_size), {}
    stages = [layout.coordinates(rank).pp for rank in ranks]
    held = count_by_stage(run, model, moe)
    for stage in set(stages):
        by_stage[stage] = _of_stage(run, model, stage, held[stage])
    return [by_stage[stage] for stage in stages]


def _of_stage(run: Run, model: GPT, stage: int, held: int) -> RankBytes:
    config, plan = run.config, run.batch_plan
    layout = config.parallel.layout(run.launch.world_size)
    activations = activation_bytes(
        config,
        stage,
        micro_batch=plan.micro_batch_size,
        micro_batches=plan.micro_batches(plan.final_batch_size),
        vocabulary=model.padded_vocab_size,
        backend=run.kernels.backend,
    )
    return RankBytes(state_bytes(config, held, layout.expert_dp // layout.instances).total, activations.total)


def plan_rows(run: Run, model: nn.Module, moe: MoEConfig | None = None) -> list[tuple[str, str]]:
    """Rows of --dry-run about activations: none on accelerators or for a model other than the package's GPT."""
    if run.device.type != "cpu" or run.config.training.skip_train or not isinstance(model, GPT):
        return []
    needs, limit = predicted(run, model, range(run.launch.world_size), moe), memory_limit()
    total = sum(rank.total for rank in needs)
    allows = "" if limit is None else f"; this machine allows {human_bytes(limit)}"
    little = ": too little for them" if limit is not None and total > limit else ""
    return [
        ("activations", f"{human_bytes(max(rank.activations for rank in needs))} at most on a rank"),
        ("memory in all", f"{human_bytes(total)} for the ranks together{allows}{little}"),
    ]


def with_memory_checked(model_provider: ModelProvider) -> ModelProvider:
    """Wraps a provider: checks that a training of its model fits into memory, before weights have values."""

    def provider(run: Run) -> nn.Module:
        model = model_provider(run)
        _check_memory(run, model)
        return model

    return provider


def _check_memory(run: Run, model: nn.Module) -> None:
    """Rejects a training whose ranks on this machine need more memory than it has. Otherwise the system would kill one
    of them without a message. `model` describes the whole model. The prediction is a lower bound."""
    if run.device.type != "cpu" or run.config.training.skip_train or not isinstance(model, GPT):
        return
    launch = run.launch
    here = launch.ranks_here if launch.local_is_said or launch.single_node else [launch.rank]
    if (text := shortage(predicted(run, model, here))) is None:
        return
    line, short = text
    if short:
        raise ConfigError(
            f"--micro-batch-size {run.batch_plan.micro_batch_size}: {line}; lower it, add --recompute-granularity full "
            "--recompute-method uniform, or use --zero-stage 1, fewer ranks here or a smaller model"
        )
    run.log.warn(f"{line}: the system may end a rank (SIGKILL, exit code 137 or -9) if it needs more")


def shortage(needs: Iterable[RankBytes]) -> tuple[str, bool] | None:
    """Returns a warning if the ranks need nearly all the machine's memory; with True if they need more."""
    ranks, limit = list(needs), memory_limit()
    total = sum(rank.total for rank in ranks)
    if limit is None or total <= _NEARLY * limit:
        return None
    state = sum(rank.state for rank in ranks)
    many = "the rank here needs" if len(ranks) == 1 else f"the {len(ranks)} ranks here need"
    line = (
        f"{many} {human_bytes(total)} of memory ({human_bytes(state)} of weights, gradients and optimizer, "
        f"{human_bytes(total - state)} of activations), and this machine allows {human_bytes(limit)}"
    )
    return line, total > limit
