"""Table of the GPT's parameters: the single source of their names, shapes, splits and initial values.

A row describes all parameters of one name, in every layer and expert: logical view, stored matrix, tensor-parallel
split, initial value and weight decay. Initialisation, sharding, checkpoints and converters read the rows. A new kind of
layer adds a group of rows here, a module, and a test.

Weights are stored 2-D or 1-D. The logical view gives the dimensions to split: a fused QKV is split by head, a gated MLP
by its width. Pure Python: no torch.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from megatron.config import ModelConfig, MoEConfig

Shape = tuple[int, ...]
Kind = Literal["copied", "column", "row", "heads", "vocabulary", "expert"]
"""Division over tensor-parallel ranks. Copied: every rank holds the whole parameter. Column or row: the output or input
features of a linear layer are split. Heads: a rank holds the parts of its heads. Vocabulary: the rows of the table are
split. Expert: expert parallelism deals out whole experts, and tensor parallelism splits their width."""

# Names, as the modules of the model spell them.
WORDS = "embedding.word_embeddings"
POSITIONS = "embedding.position_embeddings"
INPUT_NORM = "layers.{layer}.input_layernorm"
QKV = "layers.{layer}.self_attention.query_key_value"
Q_NORM = "layers.{layer}.self_attention.q_layernorm"
K_NORM = "layers.{layer}.self_attention.k_layernorm"
ATTENTION_OUT = "layers.{layer}.self_attention.dense"
POST_ATTENTION_NORM = "layers.{layer}.post_attention_layernorm"
ATTENTION_OUTPUT_NORM = "layers.{layer}.attention_output_layernorm"
MLP_OUTPUT_NORM = "layers.{layer}.mlp_output_layernorm"
MLP = "layers.{layer}.mlp"
ROUTER = "layers.{layer}.mlp.router"
EXPERT = "layers.{layer}.mlp.experts.{expert}"
SHARED_EXPERT = "layers.{layer}.mlp.shared_expert"
UP, DOWN = "dense_h_to_4h", "dense_4h_to_h"
FINAL_NORM = "final_layernorm"
HEAD = "output_layer"

WORD_TABLE, HEAD_TABLE = f"{WORDS}.weight", f"{HEAD}.weight"
VOCABULARY_TABLES = (WORD_TABLE, HEAD_TABLE)


@dataclass(frozen=True)
class Normal:
    std: float


@dataclass(frozen=True)
class Uniform:
    """Uniform distribution between -bound and bound."""

    bound: float


@dataclass(frozen=True)
class Row:
    name: str
    """The parameter's name, with `{layer}` and `{expert}` in place of their numbers in the whole model."""
    shape: Shape
    """The shape of the logical view of the whole parameter."""
    row_dims: int = 1
    """Number of leading dimensions of the view that form the rows of the stored matrix; the others form its columns."""
    kind: Kind = "copied"
    split_dim: int | None = None
    """The dimension of the view that tensor parallelism splits."""
    fold: int = 1
    """Number of dimensions, from `split_dim` on, that are flattened before the split."""
    after_split: bool = False
    """True for a copied parameter with split input: each rank computes only a part of its gradient."""
    start: float | Normal | Uniform = 0.0
    """The initial value: a constant, or a distribution."""
    trained: bool = True
    """False: a buffer of the model, which gets no gradient."""

    @property
    def stored_shape(self) -> Shape:
        return stored_shape(self.shape, self.row_dims)

    @property
    def decays(self) -> bool:
        """True for matrices. Biases and norm weights have no weight decay."""
        return len(self.stored_shape) > 1

    @property
    def is_linear_map(self) -> bool:
        """True for a matrix that multiplies vectors, False for a lookup table. The output head counts as a table,
        because it may be tied to the token embedding."""
        is_table = self.kind == "vocabulary" or self.name == f"{POSITIONS}.weight"
        return self.trained and len(self.stored_shape) == 2 and not is_table

    @property
    def fused_maps(self) -> tuple[int, tuple[int, ...]] | None:
        """Linear maps that are stored as one matrix: (dimension of the view that separates them, length of each map in
        it). None if the matrix is a single map."""
        if self.name == f"{QKV}.weight":
            return 1, (self.shape[1] - 2, 1, 1)  # queries, keys, values
        if self.name.endswith(f"{UP}.weight") and self.row_dims == 2:
            return 0, (1, 1)  # gate, up
        return None

    @property
    def is_qk_norm(self) -> bool:
        """True for weight and bias of query and key norms, which --apply-wd-to-qk-layernorm gives weight decay."""
        return self.name.rpartition(".")[0] in (Q_NORM, K_NORM)


@dataclass(frozen=True)
class Parameter:
    """One parameter of one model: its row, its layer and its expert."""

    row: Row
    layer: int | None = None
    expert: int | None = None

    @property
    def name(self) -> str:
        return self.row.name.format(layer=self.layer, expert=self.expert)

    @property
    def shape(self) -> Shape:
        """The shape of the logical view."""
        return self.row.shape

    @property
    def stored_shape(self) -> Shape:
        return self.row.stored_shape


def stored_shape(view: Sequence[int], row_dims: int) -> Shape:
    """The 2-D or 1-D shape that stores a logical view whose `row_dims` leading dimensions are rows."""
    rows, columns = view[:row_dims], view[row_dims:]
    return (prod(rows), prod(columns)) if columns else (prod(rows),)


def parameters(config: ModelConfig, vocab_size: int, moe: MoEConfig | None = None) -> dict[str, Parameter]:
    """Returns all parameters of one whole GPT by name, in model order, including buffers that are state."""
    return {parameter.name: parameter for parameter in _in_order(config, vocab_size, moe or MoEConfig())}


def counted_rows(
    config: ModelConfig, vocab_size: int, moe: MoEConfig, layers: Sequence[int], experts: int
) -> Iterator[tuple[Row, int]]:
    """Yields every row with the number of parameters that it describes in these layers, with `experts` experts each."""
    with_experts = set(moe.expert_layers(config.num_layers))
    routed = sum(layer in with_experts for layer in layers)
    before, each, after = _moe_rows(config, moe) if routed else ([], [], [])
    for rows, count in (
        (_embedding_rows(config, vocab_size), 1),
        (_attention_rows(config), len(layers)),
        (_mlp_rows(config, MLP, config.ffn_size), len(layers) - routed),
        ([*before, *after], routed),
        (each, routed * experts),
        (_norm_rows(config, FINAL_NORM, config.hidden_size), 1),
        ([] if config.tied else [_vocabulary_row(config, HEAD_TABLE, vocab_size)], 1),
    ):
        yield from ((row, count) for row in rows)


def _in_order(config: ModelConfig, vocab_size: int, moe: MoEConfig) -> Iterator[Parameter]:
    attention, mlp = _attention_rows(config), _mlp_rows(config, MLP, config.ffn_size)
    with_experts = moe.expert_layers(config.num_layers)
    before, each, after = _moe_rows(config, moe) if with_experts else ([], [], [])
    yield from map(Parameter, _embedding_rows(config, vocab_size))
    for layer in range(config.num_layers):
        yield from (Parameter(row, layer) for row in attention)
        if layer not in with_experts:
            yield from (Parameter(row, layer) for row in mlp)
            continue
        yield from (Parameter(row, layer) for row in before)
        for expert in range(moe.num_experts or 0):
            yield from (Parameter(row, layer, expert) for row in each)
        yield from (Parameter(row, layer) for row in after)
    yield from map(Parameter, _norm_rows(config, FINAL_NORM, config.hidden_size))
    if not config.tied:
        yield Parameter(_vocabulary_row(config, HEAD_TABLE, vocab_size))


# ---------------------------------------------------------------- the rows


def _embedding_rows(config: ModelConfig, vocab_size: int) -> Iterator[Row]:
    yield _vocabulary_row(config, WORD_TABLE, vocab_size)
    if config.positions == "learned":
        shape = (config.max_position_embeddings, config.hidden_size)
        yield _drawn(config, Row(f"{POSITIONS}.weight", shape))


def _vocabulary_row(config: ModelConfig, name: str, vocab_size: int) -> Row:
    """Row of the true size, without the padding of the stored table."""
    return _drawn(config, Row(name, (vocab_size, config.hidden_size), kind="vocabulary", split_dim=0))


def _attention_rows(config: ModelConfig) -> list[Row]:
    """Rows of a layer's attention and its two norms."""
    hidden, heads, groups, width = config.hidden_size, config.num_attention_heads, config.query_groups, config.head_dim
    qkv = Row(f"{QKV}.weight", (groups, heads // groups + 2, width, hidden), 3, "column", split_dim=0, fold=2)
    dense = Row(f"{ATTENTION_OUT}.weight", (hidden, heads, width), kind="row", split_dim=1)
    first, second = _layer_norms(config)
    rows = [*_norm_rows(config, first, hidden), _drawn(config, qkv)]
    if config.qkv_bias:
        rows.append(replace(qkv, name=f"{QKV}.bias", shape=qkv.shape[:-1]))
    if config.qk_layernorm:
        rows += [*_qk_norm_rows(config, Q_NORM, heads), *_qk_norm_rows(config, K_NORM, groups)]
    rows += [_drawn(config, dense, into_residual=True), *_norm_rows(config, second, hidden)]
    if config.linear_bias:
        rows.append(Row(f"{ATTENTION_OUT}.bias", (hidden,)))
    return rows


def _layer_norms(config: ModelConfig) -> tuple[str, str]:
    """Names of a layer's two norms, which depend on their placement."""
    after = config.norm_placement == "after"
    return (ATTENTION_OUTPUT_NORM, MLP_OUTPUT_NORM) if after else (INPUT_NORM, POST_ATTENTION_NORM)


def _qk_norm_rows(config: ModelConfig, name: str, heads: int) -> list[Row]:
    """Rows of a query or key norm: one vector [head_dim] that all heads share, or one [heads, head_dim], which is split
    by head."""
    rows = _norm_rows(config, name, config.head_dim)
    if config.qk_layernorm_scope == "head":
        return [replace(row, after_split=True) for row in rows]
    return [replace(row, shape=(heads, config.head_dim), row_dims=2, kind="heads", split_dim=0) for row in rows]


def _mlp_rows(config: ModelConfig, name: str, width: int) -> list[Row]:
    """Rows of the two linear layers. In a gated MLP the first one's rows are [gate; up]."""
    hidden, inner = config.hidden_size, (2, width) if config.gated else (width,)
    dims, expert = len(inner), name == EXPERT
    up = Row(f"{name}.{UP}.weight", (*inner, hidden), dims, "expert" if expert else "column", split_dim=dims - 1)
    down = Row(f"{name}.{DOWN}.weight", (hidden, width), kind="expert" if expert else "row", split_dim=1)
    rows = [_drawn(config, up), _drawn(config, down, into_residual=True)]
    if config.linear_bias:
        rows += [replace(up, name=f"{name}.{UP}.bias", shape=inner), Row(f"{name}.{DOWN}.bias", (hidden,))]
    return rows


def _moe_rows(config: ModelConfig, moe: MoEConfig) -> tuple[list[Row], list[Row], list[Row]]:
    """Returns the rows of an MoE layer: of the router, of each expert, and of the shared expert."""
    assert moe.num_experts is not None
    router = [_drawn(config, Row(f"{ROUTER}.weight", (moe.num_experts, config.hidden_size)))]
    if moe.moe_router_enable_expert_bias:
        router.append(Row(f"{ROUTER}.expert_bias", (moe.num_experts,), trained=False))
    each = _mlp_rows(config, EXPERT, moe.moe_ffn_hidden_size or config.ffn_size)
    shared = moe.moe_shared_expert_intermediate_size
    return router, each, [] if shared is None else _mlp_rows(config, SHARED_EXPERT, shared)


def _norm_rows(config: ModelConfig, name: str, width: int) -> list[Row]:
    weight = Row(f"{name}.weight", (width,), start=0.0 if config.apply_layernorm_1p else 1.0)
    return [weight] if config.normalization != "LayerNorm" else [weight, Row(f"{name}.bias", (width,))]


def _drawn(config: ModelConfig, row: Row, *, into_residual: bool = False) -> Row:
    """Adds the initial distribution to a row. The two matrices per layer that write to the residual stream start
    smaller."""
    if config.init_method_xavier_uniform:
        fan_out, fan_in = row.stored_shape
        return replace(row, start=Uniform(math.sqrt(6.0 / (fan_in + fan_out))))
    shrunk = math.sqrt(2.0 * config.num_layers) if into_residual else 1.0
    return replace(row, start=Normal(config.init_method_std / shrunk))


# ---------------------------------------------------------------- names in the classic checkpoint

_OF_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_NESTED = (WORD_TABLE, f"{POSITIONS}.weight", HEAD_TABLE)
_FINAL_NORM = (f"{FINAL_NORM}.weight", f"{FINAL_NORM}.bias")


def layer_of(name: str) -> int | None:
    match = _OF_LAYER.fullmatch(name)
    return None if match is None else int(match[1])


def classic_path(name: str, first_layer: int = 0) -> tuple[str, ...]:
    """Path of a parameter under `model` in a Megatron 23.06 checkpoint. Layer numbers restart at each pipeline stage's
    `first_layer`. A name that is not GPT's is returned unchanged as the only component."""
    if name in _NESTED:
        return ("language_model", *name.split("."))
    if match := _OF_LAYER.fullmatch(name):
        return ("language_model", "encoder", f"layers.{int(match[1]) - first_layer}.{match[2]}")
    if name in _FINAL_NORM:
        return ("language_model", "encoder", name)
    return (name,)
