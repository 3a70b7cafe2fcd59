"""Host syncs that work on GPU speed has yet to remove, with their counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.config import RunConfig
from megatron.model.moe import MoE
from megatron.training.assemble import Parts
from tests.cluster.fake_device import CUDA
from tests.cluster.host_waits import Known

OUTCOME = "megatron/utils/device.py:values"
EVALUATION = "megatron/engine/evaluation.py:evaluate"
_PARAMS_NORM = "megatron/training/training_log.py:step"
_TIMES = "megatron/training/training_log.py:_log_times"
_MEMORY = "megatron/training/training_log.py:_log_memory"
_MOE = "megatron/model/moe.py:_routed"
_HERE = "megatron/model/factory.py:run_here"
_DISPATCH = "megatron/expert_parallel/dispatch.py"
_ENDS = "megatron/ops/grouped_linear.py:_ends"


def _shares(names: Mapping[str, Any], tensor: Tensor) -> list[int]:
    """Splits the existing rows as evenly as possible."""
    rows, parts = names["rows"].shape[0], tensor.numel()
    return [rows // parts + (part < rows % parts) for part in range(parts)]


def _outcome(names: Mapping[str, Any], tensor: Tensor | None) -> list[float] | None:
    return None if tensor is None else [1.0] * tensor.numel()  # the event, then the numbers: a step that went well


def _on_device(names: Mapping[str, Any], tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA)


KNOWN = (
    Known(OUTCOME, "the outcome of a step, read within the next one: no wait while the device has work", _outcome),
    Known(EVALUATION, "the loss of an evaluation, at its end", _outcome),
    Known(_PARAMS_NORM, "--log-params-norm, where it is logged", lambda names, tensor: 1.0),
    Known(_TIMES, "--timing-log-level, where it is logged: ranks tell each other", _outcome),
    Known(_MEMORY, "--log-memory-interval, where it is logged: ranks tell each other", _outcome),
    Known(_MOE, "an expert's capacity: how many choices are left", lambda names, mask: names["order"]),
    Known(_HERE, "the rows of each expert", _shares),
    Known(f"{_DISPATCH}:forward", "the rows for each rank, and those from each rank", _shares),
    Known(f"{_DISPATCH}:_sliced", "the rows of each rank", lambda names, t: [names["rows"].shape[0]] * t.numel()),
    Known(f"{_DISPATCH}:_by_expert", "the rows of each expert", _shares),
    Known(_ENDS, "the ends of the groups, copied to the device", _on_device),
)


def expected_waits(config: RunConfig, parts: Parts, micro_batches: int, evaluated: int = 0) -> Counter[str]:
    """Known waits of one step on this rank, and of an evaluation of `evaluated` micro-batches."""
    parallel, moe = parts.engine.parallel, config.moe
    layers = sum(isinstance(module, MoE) for module in parts.engine.model.modules())
    again = 2 if config.recompute.recompute_granularity == "full" or "moe" in config.recompute.modules else 1
    passes = layers * (micro_batches * again + evaluated)
    sent = parallel.ep.size > 1 or parallel.tp.size > 1
    deferred = parallel.pp.size > 1 and config.parallel.schedule == "zero-bubble"
    products = layers * (micro_batches * (2 * again + (2 if deferred else 4)) + 2 * evaluated)
    counts = {
        OUTCOME: 1,
        EVALUATION: 1 if evaluated else 0,
        _PARAMS_NORM: 1 if config.logging.log_params_norm else 0,
        _TIMES: 1 if config.logging.timing_log_level > 0 else 0,
        _MEMORY: 1 if config.logging.log_memory_interval is not None else 0,
        _MOE: passes if moe.moe_expert_capacity_factor is not None else 0,
        _HERE: 0 if sent else passes,
        f"{_DISPATCH}:forward": 2 * passes if sent else 0,
        f"{_DISPATCH}:_sliced": passes if config.parallel.splits_sequence and parallel.tp.size > 1 else 0,
        f"{_DISPATCH}:_by_expert": passes if sent else 0,
        _ENDS: products if layers and config.precision.bf16 else 0,  # torch has no grouped product of others
    }
    return +Counter(counts)
