"""Host syncs that work on GPU speed has yet to remove, with their counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megatron.config import RunConfig
from megatron.model.moe import MoE
from megatron.training.assemble import Parts
from tests.cluster.host_waits import Known

OUTCOME = "megatron/utils/device.py:values"
EVALUATION = "megatron/engine/evaluation.py:evaluate"
_PARAMS_NORM = "megatron/training/training_log.py:step"
_TIMES = "megatron/training/training_log.py:_log_times"
_MEMORY = "megatron/training/training_log.py:_log_memory"
_SIZES = "megatron/expert_parallel/dispatch.py:_sizes"
_ON_HOST = "megatron/ops/expert_rows.py:on_host"


def _even(rows: int, parts: int) -> list[int]:
    """Splits rows as evenly as possible."""
    return [rows // parts + (part < rows % parts) for part in range(parts)]


def _sizes(names: Mapping[str, Any], tensor: Tensor) -> list[int]:
    """Rows to and from each rank, rows of each tensor-parallel rank, and rows of each expert."""
    dispatcher, rows = names["self"], names["groups"].rows
    ep, senders = dispatcher.ep.size, dispatcher.senders.size
    return [*_even(rows, ep) * 2, *[rows] * senders, *_even(rows * senders, tensor.numel() - 2 * ep - senders)]


def _rows_of_experts(names: Mapping[str, Any], tensor: Tensor) -> list[int]:
    return _even(names["self"].rows, tensor.numel())


def _outcome(names: Mapping[str, Any], tensor: Tensor | None) -> list[float] | None:
    return None if tensor is None else [1.0] * tensor.numel()  # the event, then the numbers: a step that went well


KNOWN = (
    Known(OUTCOME, "the outcome of a step, read within the next one: no wait while the device has work", _outcome),
    Known(EVALUATION, "the loss of an evaluation, at its end", _outcome),
    Known(_PARAMS_NORM, "--log-params-norm, where it is logged", lambda names, tensor: 1.0),
    Known(_TIMES, "--timing-log-level, where it is logged: ranks tell each other", _outcome),
    Known(_MEMORY, "--log-memory-interval, where it is logged: ranks tell each other", _outcome),
    Known(_SIZES, "the rows that ranks with experts send each other", _sizes),
    Known(_ON_HOST, "the rows of each expert, where there is one product per expert", _rows_of_experts),
)


def expected_waits(config: RunConfig, parts: Parts, micro_batches: int, evaluated: int = 0) -> Counter[str]:
    """Known waits of one step on this rank, and of an evaluation of `evaluated` micro-batches."""
    parallel, moe = parts.engine.parallel, config.moe
    layers = sum(isinstance(module, MoE) for module in parts.engine.model.modules())
    passes = layers * (micro_batches + evaluated)
    exchanges = parallel.ep.size > 1 or (config.parallel.splits_sequence and parallel.tp.size > 1)
    fixed = moe.moe_expert_capacity_factor is not None
    again = 2 if config.recompute.recompute_granularity == "full" or "moe" in config.recompute.modules else 1
    queued = parallel.pp.size > 1 and config.parallel.schedule == "zero-bubble"
    # Torch has no grouped product of other types. Queued gradients, which only backward reads, have one per expert.
    reads = micro_batches * again + evaluated if not config.precision.bf16 else micro_batches if queued else 0
    counts = {
        OUTCOME: 1,
        EVALUATION: 1 if evaluated else 0,
        _PARAMS_NORM: 1 if config.logging.log_params_norm else 0,
        _TIMES: 1 if config.logging.timing_log_level > 0 else 0,
        _MEMORY: 1 if config.logging.log_memory_interval is not None else 0,
        _SIZES: passes if exchanges and not fixed else 0,
        _ON_HOST: layers * reads if not exchanges and not fixed else 0,
    }
    return +Counter(counts)
