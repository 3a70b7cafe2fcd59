"""Turns gradients into new weights: update rules with fp32 masters, clipping, loss scale, learning-rate schedules."""

from megatron.optimizer.build_update import no_place_for_remainders, offloads
from megatron.optimizer.deepspeed_schedules import DeepSpeedCurve
from megatron.optimizer.groups import GroupRule, Rates
from megatron.optimizer.loss_scaler import ConstantLossScaler, DynamicLossScaler, LossScaler, build_loss_scaler
from megatron.optimizer.lr_schedule import Curves, Schedule, build_schedule
from megatron.optimizer.matrices import Matrix
from megatron.optimizer.optimizer import REPORT_SIZE, Optimizer, StepInfo, megatron_rule, state_shards, state_spec
from megatron.optimizer.rules.choose import build_rule
from megatron.optimizer.update_rules import UserUpdate
