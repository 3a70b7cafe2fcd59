"""From gradients to new weights: AdamW and SGD with masters, clipping, loss scale, and the schedules of their rates."""

from megatron.optimizer.loss_scaler import ConstantLossScaler, DynamicLossScaler, LossScaler, build_loss_scaler
from megatron.optimizer.lr_schedule import Curves, Schedule, build_schedule
from megatron.optimizer.optimizer import REPORT_SIZE, Optimizer, StepInfo, megatron_rule, no_place_for_remainders
from megatron.optimizer.update_rules import GroupRule

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
    "build_schedule",
    "megatron_rule",
    "no_place_for_remainders",
]
