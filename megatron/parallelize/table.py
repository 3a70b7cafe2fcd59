"""Which parameter means what: its logical view, and the dimension of that view that tensor parallelism splits.

Weights are stored 2-D and 1-D; the logical view is what a slice of them means (a fused QKV is split by KV group,
a gated MLP by its ffn dimension). This is the only place that knows; the checkpoint, the initialisation and the
parallel layers read it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from megatron.config import ModelConfig, MoEConfig
from megatron.distributed.shard import Range, ShardSpec, even_ranges
from megatron.distributed.state import Axis
from megatron.errors import ConfigError

VOCABULARY_TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")
LAYER = r"layers\.\d+\."


@dataclass(frozen=True)
class Row:
    """All parameters whose whole name matches `pattern` have this logical view."""

    pattern: str
    logical_shape: tuple[int, ...]
    split_dim: int | None = None  # of the logical view; None: every tensor-parallel rank holds a copy
    fold: int = 1  # the split counts through so many dimensions from split_dim on
    after_split: bool = False  # a copied parameter that works on split activations, so that its gradient is a part


def gpt_table(config: ModelConfig, vocab_size: int, moe: MoEConfig | None = None) -> list[Row]:
    """The rows of one GPT. Every row must match a parameter, and every parameter exactly one row."""
    moe = moe or MoEConfig()
    with_experts = len(moe.expert_layers(_known(config.num_layers)))
    return [
        *_embedding_rows(config, vocab_size),
        *_attention_rows(config),
        *(_mlp_rows(config, "mlp", config.ffn_size) if with_experts < config.num_layers else []),
        *(_moe_rows(config, moe) if with_experts else []),
        *_norm_rows(config),
    ]


def _embedding_rows(config: ModelConfig, vocab_size: int) -> list[Row]:
    hidden = _known(config.hidden_size)
    rows = [Row(r"embedding\.word_embeddings\.weight", (vocab_size, hidden), split_dim=0)]
    if config.positions == "learned":
        rows.append(Row(r"embedding\.position_embeddings\.weight", (_known(config.max_position_embeddings), hidden)))
    if not config.tied:
        rows.append(Row(r"output_layer\.weight", (vocab_size, hidden), split_dim=0))
    return rows


def _attention_rows(config: ModelConfig) -> list[Row]:
    hidden, heads = _known(config.hidden_size), _known(config.num_attention_heads)
    groups, width = config.query_groups, config.head_dim
    qkv = (groups, heads // groups + 2, width)
    attention = LAYER + r"self_attention\."
    rows = [
        Row(attention + r"query_key_value\.weight", (*qkv, hidden), split_dim=0, fold=2),
        Row(attention + r"dense\.weight", (hidden, heads, width), split_dim=1),
    ]
    if config.qkv_bias:
        rows.append(Row(attention + r"query_key_value\.bias", qkv, split_dim=0, fold=2))
    if config.linear_bias:
        rows.append(Row(attention + r"dense\.bias", (hidden,)))
    if config.qk_layernorm:
        rows.append(Row(attention + r"[qk]_layernorm\.(weight|bias)", (width,), after_split=True))
    return rows


def _mlp_rows(config: ModelConfig, name: str, ffn: int) -> list[Row]:
    hidden = _known(config.hidden_size)
    inner, inner_dim = ((2, ffn), 1) if config.gated else ((ffn,), 0)
    mlp = LAYER + name + r"\."
    rows = [
        Row(mlp + r"dense_h_to_4h\.weight", (*inner, hidden), split_dim=inner_dim),
        Row(mlp + r"dense_4h_to_h\.weight", (hidden, ffn), split_dim=1),
    ]
    if config.linear_bias:
        rows.append(Row(mlp + r"dense_h_to_4h\.bias", inner, split_dim=inner_dim))
        rows.append(Row(mlp + r"dense_4h_to_h\.bias", (hidden,)))
    return rows


def _moe_rows(config: ModelConfig, moe: MoEConfig) -> list[Row]:
    experts, shared = _known(moe.num_experts), moe.moe_shared_expert_intermediate_size
    rows = [Row(LAYER + r"mlp\.router\.weight", (experts, _known(config.hidden_size)))]
    if moe.moe_router_enable_expert_bias:
        rows.append(Row(LAYER + r"mlp\.router\.expert_bias", (experts,)))
    rows += _mlp_rows(config, r"mlp\.experts\.\d+", moe.moe_ffn_hidden_size or config.ffn_size)
    return rows + (_mlp_rows(config, r"mlp\.shared_expert", shared) if shared is not None else [])


def _norm_rows(config: ModelConfig) -> list[Row]:
    hidden = (_known(config.hidden_size),)
    return [
        Row(LAYER + r"(input|post_attention)_layernorm\.(weight|bias)", hidden),
        Row(r"final_layernorm\.(weight|bias)", hidden),
    ]


def match_table(table: Sequence[Row], names: Iterable[str]) -> dict[str, Row]:
    """The one row of every name. A name without a row, with two, or a row without a name is our own mistake."""
    compiled = [(re.compile(row.pattern), row) for row in table]
    matched: dict[str, Row] = {}
    used: set[str] = set()
    for name in names:
        rows = [row for pattern, row in compiled if pattern.fullmatch(name)]
        assert len(rows) == 1, f"parameter {name} matches {len(rows)} rows of the table, not one"
        matched[name] = rows[0]
        used.add(rows[0].pattern)
    idle = [row.pattern for row in table if row.pattern not in used]
    assert not idle, f"rows of the table that match no parameter: {idle}"
    return matched


def gpt_specs(
    model: nn.Module,
    config: ModelConfig,
    vocab_size: int,
    *,
    moe: MoEConfig | None = None,
    tp: Axis | None = None,
    padded_vocab_size: int | None = None,
    sequence_parallel: bool = False,
) -> dict[str, ShardSpec]:
    """name -> ShardSpec of all that a GPT is: what the tensor-parallel rank `tp` holds of it (None: all of it)."""
    buffers = persistent_buffers(model)
    rows = match_table(gpt_table(config, vocab_size, moe), [*(name for name, _ in model.named_parameters()), *buffers])
    tp = tp or Axis.single("tp")
    cut = Cut(tp, padded_vocab_size or vocab_size, config.query_groups, sequence_parallel)
    specs = {name: cut.spec(name, row) for name, row in rows.items()}
    return specs | {name: replace(specs[name], replica_axes=()) for name in buffers}  # which have no gradients


@dataclass(frozen=True)
class Cut:
    """How one tensor-parallel rank's part follows from a row of the table."""

    tp: Axis
    padded_vocab_size: int
    query_groups: int
    sequence_parallel: bool

    def spec(self, name: str, row: Row) -> ShardSpec:
        fold = row.fold if self.tp.size > 1 else 1  # what is whole is seen in its own dimensions
        spec = ShardSpec(name=name, logical_shape=row.logical_shape, dim=row.split_dim or 0, fold=fold)
        if self.tp.size == 1:
            return spec
        if row.split_dim is None:
            summed = ("tp",) if row.after_split or self.sequence_parallel else ()
            copies = ((0, spec.size),) if self.tp.rank else ()
            return replace(spec, replica_axes=summed, copies=copies)
        if name in VOCABULARY_TABLES:
            return replace(spec, ranges=self._vocabulary(spec.size))
        if row.fold == 2:
            return self._query_key_value(spec)
        return replace(spec, ranges=even_ranges(spec.size, self.tp.size, self.tp.rank))

    def _vocabulary(self, size: int) -> tuple[Range, ...]:
        """Even parts of the padded table; the padding lies behind the true rows, so late ranks may hold little."""
        rows = self.padded_vocab_size // self.tp.size
        start = min(self.tp.rank * rows, size)
        return ((start, min(start + rows, size)),)

    def _query_key_value(self, spec: ShardSpec) -> ShardSpec:
        """Whole KV groups; with fewer groups than ranks, some of a group's queries with a copy of its key and value."""
        tp, groups = self.tp, self.query_groups
        per_group = spec.size // groups
        if groups % tp.size == 0:
            return replace(spec, ranges=even_ranges(spec.size, tp.size, tp.rank))
        sharing = tp.size // groups  # ranks that share a group
        group, place = divmod(tp.rank, sharing)
        first, queries = group * per_group, (per_group - 2) // sharing
        own = (first + place * queries, first + (place + 1) * queries)
        shared = (first + per_group - 2, first + per_group)
        return replace(spec, ranges=(own, shared), replica_axes=("tp",), copies=(shared,) if place else ())


def foreign_specs(model: nn.Module) -> Mapping[str, ShardSpec]:
    """For a model that is not ours: each tensor of its state is whole, and means what its shape says."""
    tensors = {**dict(model.named_parameters()), **persistent_buffers(model)}
    return {name: ShardSpec(name=name, logical_shape=tuple(tensor.shape)) for name, tensor in tensors.items()}


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to a model's state, such as running means, or the bias of a router.

    State that is no tensor would be left out of a checkpoint, so a model that has some is refused.
    """
    state = model.state_dict(keep_vars=True)
    foreign = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if foreign:
        raise ConfigError(
            f"the model keeps state that is no tensor ({', '.join(foreign)}), which a checkpoint cannot hold; "
            "register it as a buffer instead of using get_extra_state"
        )
    return {name: buffer for name, buffer in model.named_buffers() if name in state}


def _known(value: int | None) -> int:
    assert value is not None, "RunConfig's checks come before any model is built"
    return value
