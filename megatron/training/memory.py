"""Predicts the memory of a training run before any weight is initialised, and rejects a run that cannot fit on a
CPU."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from megatron.config import MoEConfig
from megatron.errors import ConfigError
from megatron.model.gpt import GPT
from megatron.optimizer import offloads
from megatron.training.activation_bytes import activation_bytes
from megatron.training.initialize import Run
from megatron.training.model import ModelProvider, count_by_stage
from megatron.training.state_bytes import StateBytes, state_bytes
from megatron.utils.device import human_bytes
from megatron.utils.memory_limit import memory_limit

NEARLY = 0.9
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
    `moe`: the true MoE settings, if `model` was built with fewer experts."""
    layout, by_stage = run.config.parallel.layout(run.launch.world_size), {}
    stages = [layout.coordinates(rank).pp for rank in ranks]
    held = count_by_stage(run, model, moe)
    for stage in set(stages):
        by_stage[stage] = _of_stage(run, model, stage, held[stage])
    return [by_stage[stage] for stage in stages]


def _of_stage(run: Run, model: GPT, stage: int, held: int) -> RankBytes:
    plan = run.batch_plan
    activations = activation_bytes(
        run.config,
        stage,
        micro_batch=plan.micro_batch_size,
        micro_batches=plan.micro_batches(plan.final_batch_size),
        vocabulary=model.padded_vocab_size,
        backend=(lambda operation: "native") if on_accelerator(run) else run.kernels.backend,
    )
    return RankBytes(state_of(run, held).total, activations.total)


def on_accelerator(run: Run) -> bool:
    return run.device.type != "cpu" or run.config.runtime.device_memory is not None


def state_of(run: Run, held: int) -> StateBytes:
    """Bytes of weights, gradients and optimizer on a rank that holds `held` parameters."""
    config, layout = run.config, run.config.parallel.layout(run.launch.world_size)
    return state_bytes(
        config,
        held,
        layout.expert_dp // layout.instances,
        offloaded=offloaded_share(run),
        on_host=config.parallel.parameters_on_host and on_accelerator(run),
    )


def offloaded_share(run: Run) -> float:
    """Share of the optimizer's state that is not in the device's memory."""
    config = run.config
    if config.parallel.parameters_on_host and on_accelerator(run):
        return 0.0
    device = torch.device("meta") if on_accelerator(run) else run.device
    return config.optimizer.optimizer_offload_fraction if offloads(config.optimizer, device) else 0.0


def with_memory_checked(model_provider: ModelProvider) -> ModelProvider:
    """Wraps a provider: before weights have values, checks that training its model fits into memory."""

    def provider(run: Run) -> nn.Module:
        model = model_provider(run)
        _check_memory(run, model)
        return model

    return provider


def _check_memory(run: Run, model: nn.Module) -> None:
    """Rejects a training run whose ranks on this machine need more memory than the machine has. Otherwise the system
    would kill a rank without a message. `model` describes the whole model. The prediction is a lower bound."""
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
    """Returns (warning, exceeds) if the ranks need nearly all of the machine's memory or exceed it, else None."""
    ranks, limit = list(needs), memory_limit()
    total = sum(rank.total for rank in ranks)
    if limit is None or total <= NEARLY * limit:
        return None
    state = sum(rank.state for rank in ranks)
    many = "the rank here needs" if len(ranks) == 1 else f"the {len(ranks)} ranks here need"
    line = (
        f"{many} {human_bytes(total)} of memory ({human_bytes(state)} of weights, gradients and optimizer, "
        f"{human_bytes(total - state)} of activations), and this machine allows {human_bytes(limit)}"
    )
    return line, total > limit
