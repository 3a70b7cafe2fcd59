"""From gradients to new weights: AdamW and SGD with masters, clipping, loss scale, and the schedules of their rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from megatron.config.sections.optimizer import OptimizerConfig
from megatron.config.sections.precision import PrecisionConfig
from megatron.data_parallel import GradBuffers
from megatron.distributed.shard import ShardSpec
from megatron.ops import Kernels
from megatron.optimizer.inner import GroupRule
from megatron.optimizer.loss_scaler import ConstantLossScaler, DynamicLossScaler, LossScaler, build_loss_scaler
from megatron.optimizer.lr_schedule import Curves, Schedule, build_schedule
from megatron.optimizer.norms import SplitOver
from megatron.optimizer.optimizer import REPORT_SIZE, Optimizer, StepInfo, megatron_rule

__all__ = [
    "REPORT_SIZE",
    "ConstantLossScaler",
    "Curves",
    "DynamicLossScaler",
    "GroupRule",
    "LossScaler",
    "Optimizer",
    "Schedule",
    "StepInfo",
    "build_loss_scaler",
    "build_optimizer",
    "build_schedule",
    "megatron_rule",
]


def build_optimizer(
    grads: GradBuffers,
    optimizer: OptimizerConfig,
    precision: PrecisionConfig,
    *,
    rule: Callable[[str, nn.Parameter], GroupRule] = megatron_rule,
    split_over: Mapping[str, SplitOver] | None = None,
    norm_axes: Sequence[SplitOver] = (),
    specs: Mapping[str, ShardSpec] | None = None,
    kernels: Kernels | None = None,
    asynchronous: bool = False,
) -> Optimizer:
    """The optimizer of the parameters in `grads`."""
    return Optimizer(
        grads,
        optimizer,
        build_loss_scaler(precision),
        rule=rule,
        split_over=split_over,
        norm_axes=norm_axes,
        specs=specs,
        kernels=kernels,
        asynchronous=asynchronous,
    )
