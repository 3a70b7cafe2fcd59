"""From gradients to new weights: the update rules with masters, clipping, loss scale, and the schedules of rates."""

from megatron.compat.client_update import ClientUpdate, refuse_whole_matrices
from megatron.compat.on_pieces import differs_on_pieces
from megatron.compat.rule_optimizer import RuleOptimizer
from megatron.optimizer.build_update import no_place_for_remainders, offloads
from megatron.optimizer.deepspeed_schedules import DeepSpeedCurve
from megatron.optimizer.groups import GroupRule, Rates
from megatron.optimizer.loss_scaler import ConstantLossScaler, DynamicLossScaler, LossScaler, build_loss_scaler
from megatron.optimizer.lr_schedule import Curves, Schedule, build_schedule
from megatron.optimizer.matrices import Matrix
from megatron.optimizer.optimizer import REPORT_SIZE, Optimizer, StepInfo, megatron_rule, state_spec
from megatron.optimizer.rules.choose import build_rule

__all__ = [
    "REPORT_SIZE",
    "ClientUpdate",
    "ConstantLossScaler",
    "Curves",
    "DeepSpeedCurve",
    "DynamicLossScaler",
    "GroupRule",
    "LossScaler",
    "Matrix",
    "Optimizer",
    "Rates",
    "RuleOptimizer",
    "Schedule",
    "StepInfo",
    "build_loss_scaler",
    "build_rule",
    "build_schedule",
    "differs_on_pieces",
    "megatron_rule",
    "no_place_for_remainders",
    "offloads",
    "refuse_whole_matrices",
    "state_spec",
]
