"""Chooses the update rule of each parameter from the settings."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from megatron.config.sections.optimizer import OptimizerConfig
from megatron.data_parallel import TrainingStore
from megatron.errors import ConfigError
from megatron.optimizer.groups import GroupRule
from megatron.optimizer.matrices import Matrix, Update, WholeMatrices
from megatron.optimizer.rules.adafactor import Adafactor, Extent
from megatron.optimizer.rules.adam import Adam, AsWeights, Engine, Narrow, by_apex, by_formula, by_torch
from megatron.optimizer.rules.base import Control, Slots, UpdateRule
from megatron.optimizer.rules.eight_bit_moments import EightBits, InBlocks
from megatron.optimizer.rules.eight_bits import Blocks, Section
from megatron.optimizer.rules.lion import Lion
from megatron.optimizer.rules.muon import Muon, orthogonalised, scale_factor, steps_of
from megatron.optimizer.rules.sgd import Sgd
from megatron.state.shard import Shard, splits_columns

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Dtypes of moments by the names that flags use."""


def choose_rules(
    grads: TrainingStore,
    config: OptimizerConfig,
    groups: Mapping[str, GroupRule],
    specs: Mapping[str, Shard],
    device: torch.device,
    *,
    apex: bool = False,
) -> dict[str, UpdateRule]:
    """Returns the rule of each parameter by name. A collective with Muon. `apex`: use it for Adam, unless the moments
    are narrower than fp32."""
    if config.uses_muon:
        return _with_muon(grads, config, groups, device)
    if apex and config.optimizer == "adam" and not config.has_narrow_moments:
        return dict.fromkeys(grads.names, adam_rule(config, AsWeights(), by_apex))
    if config.optimizer == "adafactor":
        extents = {name: Extent.of(grads, name, matrix) for name, matrix in _matrices(groups).items()}
        return dict.fromkeys(grads.names, Adafactor(config, extents))
    if config.optimizer == "adam8bit":
        cut = {name: _in_blocks(grads, name, specs) for name in grads.names if grads.parameter(name).dim() > 1}
        rule: UpdateRule = replace(adam_rule(config, EightBits(cut), by_formula), decoupled=True)
    else:
        rule = elementwise_rule(config.optimizer, config, device)
    return dict.fromkeys(grads.names, rule)


def build_rule(config: OptimizerConfig, device: torch.device) -> UpdateRule:
    """Builds an elementwise rule, for tensors with unknown roles, as in a user's own model."""
    if config.uses_muon or config.optimizer in ("adafactor", "adam8bit"):
        raise ConfigError(
            "not supported for your own model, because it is unknown which parameters are hidden matrices; use AdamW, "
            "SGD or Lion, or give an optimizer of your own, such as torch.optim.Muon"
        )
    return elementwise_rule(config.optimizer, config, device)


def elementwise_rule(name: str, config: OptimizerConfig, device: torch.device) -> UpdateRule:
    """Builds a rule that updates each element independently. Adam and SGD use torch's fused kernel if the device has
    one."""
    if name == "lion":
        return Lion(config.lion_beta1, config.lion_beta2)
    if name == "adam" and config.has_narrow_moments:
        return adam_rule(config, Narrow(*(_TYPES[kind] for kind in config.moment_dtypes)), by_formula)
    rule: Adam | Sgd
    if name == "adam":
        rule = adam_rule(config, AsWeights(), by_torch)
    else:
        assert name == "sgd", name
        rule = Sgd(config.sgd_momentum, fused=True)
    return rule if runs_on(rule, device) else replace(rule, fused=False)


def adam_rule(config: OptimizerConfig, storage: AsWeights, engine: Engine) -> Adam:
    betas = config.adam_beta1, config.adam_beta2
    return Adam(*betas, config.adam_eps, storage, engine, decoupled=config.decoupled_weight_decay)


def runs_on(rule: Adam | Sgd, device: torch.device) -> bool:
    """True if this torch has the rule's kernel for the device; tried with an update of one element."""
    probe = torch.zeros(1, device=device)
    try:
        rule.step(
            Slots({"probe": rule.slot("probe", probe)}, lambda _: torch.zeros_like(probe)), ["probe"], Control(0.1, 0.0)
        )
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _with_muon(
    grads: TrainingStore, config: OptimizerConfig, groups: Mapping[str, GroupRule], device: torch.device
) -> dict[str, UpdateRule]:
    matrices = _matrices(groups)
    muon = Muon(config.muon_momentum, config.muon_nesterov, WholeMatrices(grads, matrices, _direction(config)))
    others = elementwise_rule(config.muon_scalar_optimizer, config, device)
    return {name: muon if name in matrices else others for name in grads.names}


def _matrices(groups: Mapping[str, GroupRule]) -> dict[str, Matrix]:
    return {name: group.matrix for name, group in groups.items() if group.matrix is not None}


def _direction(config: OptimizerConfig) -> Update:
    steps = steps_of(config.muon_coefficient_type, config.muon_num_ns_steps)
    extra, mode, narrow = config.muon_extra_scale_factor, config.muon_scale_mode, config.muon_fp32_matmul_prec

    def update(part: Tensor) -> Tensor:
        dtype = torch.bfloat16 if narrow == "medium" and part.dtype == torch.float32 else part.dtype
        return orthogonalised(part, steps, dtype).to(part.dtype) * (scale_factor(mode, *part.shape) * extra)

    return update


def _in_blocks(grads: TrainingStore, name: str, specs: Mapping[str, Shard]) -> InBlocks:
    parameter = grads.parameter(name)
    rows = parameter.shape[0]
    blocks = Blocks(rows, parameter.numel() // max(rows, 1), uncut_dim(specs.get(name), parameter))
    return InBlocks(Section(blocks, grads.held(name)), grads.divided_over(name))


def uncut_dim(spec: Shard | None, parameter: Tensor) -> int:
    """Dimension of a parameter's matrix that tensor parallelism never cuts."""
    cut = spec is not None and parameter.dim() > 1 and splits_columns(spec, parameter.shape[0])
    return 0 if cut else 1
