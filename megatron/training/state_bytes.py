"""Bytes of model state that a rank keeps between steps."""

from dataclasses import dataclass

from megatron.config import OptimizerConfig, RunConfig

_TYPES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class StateBytes:
    """Bytes on the device. Padding to whole rows or equal pieces is not counted."""

    parameters: float
    """Weights; with ZeRO 2 and 3, the fp32 masters."""
    gradients: float
    optimizer: float
    """Moments, and masters of half-precision weights."""

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def state_bytes(
    config: RunConfig, elements: int, ranks: int, *, offloaded: float = 0.0, on_host: bool = False
) -> StateBytes:
    """Bytes for `elements` parameters on a rank. The `ranks` are the data-parallel ones; under ZeRO only the ones of
    one optimizer instance, which divide the state. A share `offloaded` of the optimizer's state is stored elsewhere.
    With `on_host` parameters are in host memory; even a single rank then keeps them as masters."""
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
    """Bytes of --async-save's copy in host memory, on the rank with the largest copy. This rank writes the weights of
    `elements` parameters, and a share of the optimizer's state (among `ranks` data-parallel ranks), with whole
    masters."""
    half = config.precision.params_dtype != "float32"
    shared = (4 if half else 0) + moment_bytes(config.optimizer) if config.checkpoint.save_optim else 0
    return (2 if half else 4) * elements + shared * elements / ranks


def moment_bytes(optimizer: OptimizerConfig) -> float:
    """Bytes of the moments of one parameter. For Muon: of non-matrix parameters, which have the most. For Adafactor: of
    matrices, without the factored row and column means."""
    if optimizer.optimizer == "sgd":
        return 4 if optimizer.sgd_momentum else 0
    if optimizer.optimizer == "lion":
        return 4
    if optimizer.optimizer == "adafactor":
        return 4 if optimizer.adafactor_beta1 else 0
    if optimizer.optimizer == "adam8bit":
        return 2
    return sum(map(_TYPES.__getitem__, optimizer.moment_dtypes)) if optimizer.has_narrow_moments else 8
