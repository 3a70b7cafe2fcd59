"""Bytes of activations that a rank keeps for the backward pass on a CPU.

Tensors saved by layers and the logits are counted; temporaries within an operation are not. The sum is therefore a
lower bound of the peak: a run cannot succeed if the sum exceeds the machine's memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.config import RunConfig
from megatron.config.stages import stage_layers
from megatron.pipeline_schedules import SCHEDULES

Backend = Callable[[str], str]
"""Maps an operation to its implementation: native, torch, cpu or ref."""

_LONGEST_SQUARE = {2: 2048, 4: 1024}
"""Bytes per number -> longest sequence, in tokens, whose attention probabilities are kept without the native kernel."""


@dataclass(frozen=True)
class ActivationBytes:
    layers: float
    """Activations of all micro-batches in flight."""
    logits: float

    @property
    def total(self) -> float:
        return self.layers + self.logits


def activation_bytes(
    config: RunConfig, stage: int, *, micro_batch: int, micro_batches: int, vocabulary: int, backend: Backend
) -> ActivationBytes:
    """Peak bytes of one rank of pipeline stage `stage`, in a step of `micro_batches` micro-batches of `micro_batch`
    samples. `vocabulary`: rows of the padded vocabulary, over all tensor-parallel ranks."""
    parallel, size = config.parallel, _size(config)
    tokens = micro_batch * config.data.seq_length / parallel.context_parallel_size
    runs = stage_layers(config.model.num_layers, parallel).of_rank(stage)
    chunks = [sum(_kept(config, run, backend)) * tokens for run in runs]
    last = stage == parallel.pipeline_model_parallel_size - 1
    rows = vocabulary / parallel.tensor_model_parallel_size if last else 0
    return ActivationBytes(_most_in_flight(config, stage, micro_batches, chunks), tokens * rows * size)


def _size(config: RunConfig) -> int:
    return 4 if config.precision.params_dtype == "float32" else 2


def _kept(config: RunConfig, layers: range, backend: Backend) -> list[float]:
    """Bytes per token of each layer, given the recomputation settings."""
    recompute, with_experts = config.recompute, config.moe.expert_layers(config.model.num_layers)
    whole = [_layer(config, layer in with_experts, backend) for layer in layers]
    if not recompute.full:
        return whole
    few, between = recompute.recompute_num_layers, _size(config) * config.model.hidden_size / _pieces(config)
    if recompute.recompute_method == "block":
        return [between if place < few else kept for place, kept in enumerate(whole)]
    return [between if place % few == 0 else 0.0 for place in range(len(whole))]


def _pieces(config: RunConfig) -> int:
    """Number of ranks over which each sequence is split outside of attention and MLP (sequence parallelism)."""
    return config.parallel.tensor_model_parallel_size if config.parallel.splits_sequence else 1


def _layer(config: RunConfig, has_experts: bool, backend: Backend) -> float:
    """Bytes per token of one layer that keeps everything but its recomputed parts."""
    model, recomputed = config.model, config.recompute.modules
    residual = (3 if model.use_parallel_residual else 4) + (2 if model.hidden_dropout else 0)
    residual -= 2 if "layernorm" in recomputed else 0
    numbers = residual * model.hidden_size / _pieces(config)
    numbers += _attention(config, "core_attn" in recomputed, backend) / config.parallel.tensor_model_parallel_size
    if ("moe" if has_experts else "mlp") not in recomputed:
        numbers += _experts(config, backend) if has_experts else _mlp(config, model.ffn_size, backend)
    return numbers * _size(config)


def _attention(config: RunConfig, recomputed: bool, backend: Backend) -> float:
    """Numbers kept per token: queries, keys, values, output, and the probabilities if they are kept."""
    model, seq = config.model, config.data.seq_length
    queries, keys = model.num_attention_heads * model.head_dim, model.query_groups * model.head_dim
    numbers: float = 2 * queries + 2 * keys
    if model.positions == "rope" and backend("rope") == "native":
        numbers += queries + keys
    if model.qk_layernorm:
        numbers += queries + keys
    kind, longest = backend("attention"), _LONGEST_SQUARE[_size(config)]
    if not recomputed and config.parallel.context_parallel_size == 1 and kind in ("cpu", "ref"):
        if kind == "ref":
            numbers += model.num_attention_heads * seq
        elif seq <= longest and config.precision.params_dtype != "float16":
            numbers += model.num_attention_heads * seq / 2  # a causal triangle
    return numbers


def _mlp(config: RunConfig, width: int, backend: Backend) -> float:
    """Numbers kept per token: input and output of the activation function."""
    gated = 2 if config.model.gated else 1
    own = 1 if config.model.gated and backend("swiglu") != "native" else 0
    return (gated + 1 + own) * width / config.parallel.tensor_model_parallel_size


def _experts(config: RunConfig, backend: Backend) -> float:
    """Numbers kept per token: input, hidden layer and output of each chosen expert, and the hidden layer of the shared
    expert."""
    model, moe, tp = config.model, config.moe, config.parallel.tensor_model_parallel_size
    width, per_width = moe.moe_ffn_hidden_size or model.ffn_size, 3 if model.gated else 2
    kept = per_width - 1 if "moe_act" in config.recompute.modules else per_width
    chosen = _rows_of_experts(config, backend) * (2 * model.hidden_size / _pieces(config) + kept * width / tp)
    return chosen + per_width * (moe.moe_shared_expert_intermediate_size or 0) / tp


def _rows_of_experts(config: RunConfig, backend: Backend) -> float:
    """Rows of all experts per token, with even routing. With a capacity, a GPU has buffers of that size; a CPU, where
    the products of experts are those of the formula, has only rows of accepted tokens."""
    factor = config.moe.moe_expert_capacity_factor
    if factor is None:
        return config.moe.moe_router_topk
    return config.moe.moe_router_topk * (factor if backend("grouped_linear") != "ref" else min(factor, 1.0))


def _most_in_flight(config: RunConfig, stage: int, micro_batches: int, chunks: Sequence[float]) -> float:
    """Largest number of bytes kept at once; `chunks` are the bytes of a micro-batch in each chunk of the stage."""
    parallel = config.parallel
    ranks, group = parallel.pipeline_model_parallel_size, parallel.micro_batch_group
    if ranks == 1:
        return sum(chunks)
    if SCHEDULES[parallel.schedule].keeps_all:
        return micro_batches * sum(chunks)
    if len(set(chunks)) == 1:  # equal chunks: the peak is just before the first backward pass
        warm_up = ranks - stage - 1
        if len(chunks) > 1:
            warm_up = 2 * warm_up + (len(chunks) - 1) * (group or ranks)
        return chunks[0] * min(warm_up + 1, micro_batches * len(chunks))
    # Further micro-batches do not change the peak.
    few = min(micro_batches, 4 * ranks) if group is None else min(micro_batches, 2 * group + micro_batches % group)
    return _most_of_interleaved(few, group or ranks, 2 * (ranks - stage - 1), chunks)


def _most_of_interleaved(micro_batches: int, group: int, later_ranks: int, chunks: Sequence[float]) -> float:
    """Largest number of bytes kept at once under the interleaved schedule, whose backward pass k follows forward pass k
    plus the warm-up. The sum changes linearly while both passes stay in one chunk, so only the ends of chunks are
    examined."""
    passes = micro_batches * len(chunks)
    warm_up = min(later_ranks + (len(chunks) - 1) * group, passes)
    ends = [
        start * len(chunks) + chunk * min(group, micro_batches - start)
        for start in range(0, micro_batches, group)
        for chunk in range(len(chunks) + 1)
    ]
    forward = {min(max(end + more, 1), passes) for end in ends for more in (0, warm_up + 1)}
    freed = chunks[::-1]
    return max(
        _of_first(count, micro_batches, group, chunks)
        - _of_first(max(count - 1 - warm_up, 0), micro_batches, group, freed)
        for count in forward
    )


def _of_first(passes: int, micro_batches: int, group: int, chunks: Sequence[float]) -> float:
    """Bytes of the first `passes` passes of a step. Groups of micro-batches go through one chunk after another."""
    whole = min(passes // (group * len(chunks)), micro_batches // group)
    rest, members = passes - whole * group * len(chunks), min(group, micro_batches - whole * group)
    begun = (size * min(max(rest - chunk * members, 0), members) for chunk, size in enumerate(chunks))
    return whole * group * sum(chunks) + sum(begun)
