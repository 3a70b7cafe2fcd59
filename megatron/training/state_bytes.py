"""What a rank keeps of the model between steps, in bytes."""

from dataclasses import dataclass

from megatron.config import OptimizerConfig, RunConfig

_TYPES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class StateBytes:
    """On the device. Padding to whole rows or equal pieces is not counted."""

    parameters: float
    """Where weights are divided (ZeRO 2 and 3), the fp32 masters."""
    gradients: float
    optimizer: float
    """Moments, and masters beside half-precision weights."""

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def state_bytes(
    config: RunConfig, elements: int, ranks: int, *, offloaded: float = 0.0, on_host: bool = False
) -> StateBytes:
    """The bytes for `elements` parameters, which each of `ranks` data-parallel ranks holds whole, or which they divide
    under ZeRO (then `ranks` are those of one instance of the optimizer). `offloaded`: the share of the optimizer's
    state that is elsewhere. `on_host`: parameters are in host memory, where one rank alone keeps them as several do, as
    masters."""
    half = config.precision.params_dtype != "float32"
    moments = moment_bytes(config.optimizer)
    masters = (2 if config.optimizer.store_param_remainders else 4) if half else 0
    gradients = 2 if half and config.parallel.grad_reduce_in_bf16 else 4
    whole, piece, stage = elements, elements / ranks, config.parallel.zero if ranks > 1 or on_host else 0
    if stage >= 2:
        return StateBytes(4 * piece, 4 * piece, moments * piece * (1.0 - offloaded))
    own = whole if stage == 0 else piece
    return StateBytes((2 if half else 4) * whole, gradients * whole, (moments + masters) * own * (1.0 - offloaded))


def copy_bytes(config: RunConfig, elements: int, ranks: int) -> float:
    """What --async-save keeps in host memory on the rank that has most of it: of `elements` parameters the weights,
    which one of `ranks` data-parallel ranks writes, and a share of the optimizer's state, with whole masters."""
    half = config.precision.params_dtype != "float32"
    shared = (4 if half else 0) + moment_bytes(config.optimizer) if config.checkpoint.save_optim else 0
    return (2 if half else 4) * elements + shared * elements / ranks


def moment_bytes(optimizer: OptimizerConfig) -> float:
    """The bytes of the moments of one parameter. For Muon those of parameters that are not matrices, which have the
    most; for Adafactor those of matrices, without the factored row and column means."""
    if optimizer.optimizer == "sgd":
        return 4 if optimizer.sgd_momentum else 0
    if optimizer.optimizer == "lion":
        return 4
    if optimizer.optimizer == "adafactor":
        return 4 if optimizer.adafactor_beta1 else 0
    if optimizer.optimizer == "adam8bit":
        return 2
    return sum(map(_TYPES.__getitem__, optimizer.moment_dtypes)) if optimizer.has_narrow_moments else 8
