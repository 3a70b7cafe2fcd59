"""Makes the modules of one rank's GPT in a parallel layout. Each module gets its axes, its weight shard, its random
stream and its dispatcher at construction."""

from collections.abc import Mapping
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import ParallelConfig
from megatron.context_parallel import GatheredAttention, RingAttention, SharedSequence, UlyssesAttention
from megatron.distributed import collectives
from megatron.distributed.parallel_state import ParallelState
from megatron.distributed.rng import SplitRandom
from megatron.expert_parallel import ExpertDispatcher
from megatron.model.attention import CoreAttention, SequenceView
from megatron.model.factory import Dispatcher, ModuleFactory
from megatron.model.linear import Linear
from megatron.model.norm import Norm
from megatron.model.parameters import Parameter, Shape
from megatron.model.table import Table
from megatron.model.wgrads import WgradRoute
from megatron.ops.grouped_linear import least_rows
from megatron.state.shard import Shard
from megatron.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    SplitNorm,
    VocabParallelHead,
    VocabParallelTable,
    mappings,
)
from megatron.tensor_parallel.vocabulary import SequenceSlicedTable

CONTEXT_ATTENTION: dict[str, type[RingAttention] | type[UlyssesAttention] | type[GatheredAttention]] = {
    "p2p": RingAttention,
    "a2a": UlyssesAttention,
    "allgather": GatheredAttention,
}


class ParallelFactory(ModuleFactory):
    def __init__(
        self,
        plain: ModuleFactory,
        table: Mapping[str, Parameter],
        shards: Mapping[str, Shard],
        config: ParallelConfig,
        state: ParallelState,
        experts: range,
        device: torch.device,
        wgrads: WgradRoute,
    ) -> None:
        """`plain`: factory of the whole model. `table`: parameters of the whole model. `shards` and `experts`: those
        that this rank holds."""
        self._table, self._shards, self._experts = table, shards, experts
        self._splits_sequence, self._cp_attention = config.splits_sequence, config.cp_attention
        self._tp, self._cp, self._ep = state.tp, state.cp, state.ep
        # The axes that a sequence is split over.
        self._sharing = [axis for axis in (self._cp, *([self._tp] if self._splits_sequence else [])) if axis.size > 1]
        self.pieces_of_sequence = prod(axis.size for axis in self._sharing)
        self._split_random = SplitRandom(self._tp, device)
        if self._splits_sequence:
            self.dropout = self._dropout_of_own_stream
        super().__init__(plain.config, plain.kernels, plain.moe, plain.recompute, wgrads)

    def linear(self, name: str, in_features: int, out_features: int, *, bias: bool) -> Linear:
        kind, (rows, columns) = self._table[f"{name}.weight"].row.kind, self._stored(f"{name}.weight")
        if self._tp.size == 1 or kind == "expert":  # the dispatcher sums over the shards of all experts at once
            return Linear(columns, rows, bias=bias, wgrads=self.wgrads)
        assert kind in ("column", "row"), f"{name} is a linear layer, but {kind} in the table"
        parallel_linear = ColumnParallelLinear if kind == "column" else RowParallelLinear
        return parallel_linear(
            in_features,
            out_features,
            axis=self._tp,
            bias=bias,
            sequence_parallel=self._splits_sequence,
            local_features=rows if kind == "column" else columns,
            wgrads=self.wgrads,
        )

    def _stored(self, name: str) -> Shape:
        stored = self._shards[name].stored
        assert stored is not None, name
        return stored

    def head_norm(self, name: str, heads: int) -> Norm:
        if self._tp.size == 1 or self.config.qk_layernorm_scope == "head":
            return super().head_norm(name, heads)
        (local,) = self._stored(f"{name}.weight")
        return SplitNorm(heads * self.config.head_dim, self.config, self.kernels, axis=self._tp, local=local)

    def _dropout_of_own_stream(self, x: Tensor, probability: float, training: bool) -> Tensor:
        """Dropout of a split sequence, where each rank draws from its own random stream."""
        if not training or probability == 0.0:
            return F.dropout(x, probability, training)
        with self._split_random.fork():
            return F.dropout(x, probability, training)

    def vocabulary_table(self, rows: int) -> Table:
        if self._tp.size == 1:
            return Table(rows, self.config.hidden_size)
        sequence_parallel = self._splits_sequence
        local = rows // self._tp.size
        return VocabParallelTable(local, self.config.hidden_size, axis=self._tp, sequence_parallel=sequence_parallel)

    def position_table(self) -> Table:
        rows, width = self.config.max_position_embeddings, self.config.hidden_size
        if self._tp.size == 1 or not self._splits_sequence:
            return Table(rows, width)
        return SequenceSlicedTable(rows, width, axis=self._tp)

    def sequence(self) -> SequenceView:
        if self._cp.size == 1:
            return SequenceView()
        return SharedSequence(self._cp, CONTEXT_ATTENTION[self._cp_attention])

    def core_attention(self, layer: int) -> nn.Module:
        plain = CoreAttention(self.config, layer + 1, self.kernels)
        core: nn.Module = plain
        if self._cp.size > 1:
            core = CONTEXT_ATTENTION[self._cp_attention](plain, self._cp, self.config.window)
        if self._tp.size > 1 and self.config.attention_dropout:
            core = _OwnStream(core, self._split_random)
        return core

    def head_and_loss(self, vocab_size: int) -> nn.Module:
        if self._tp.size == 1:
            return super().head_and_loss(vocab_size)
        sequence_parallel = self._splits_sequence
        return VocabParallelHead(vocab_size, self.kernels, axis=self._tp, sequence_parallel=sequence_parallel)

    def experts(self) -> range:
        return self._experts

    def dispatcher(self) -> Dispatcher:
        if self._ep.size == 1 and self._tp.size == 1:
            return super().dispatcher()
        return ExpertDispatcher(
            self._ep,
            self._tp,
            split_tokens=self._splits_sequence,
            copied=mappings.copied,
            summed=mappings.summed,
            padding=least_rows(self.kernels.grouped_linear),
            taken=self.kernels.taken,
            recomputation=self.recomputation,
        )

    def sum_of_sequence(self, counts: Tensor) -> Tensor:
        if not self._sharing:
            return counts
        counts = counts.clone()
        for axis in self._sharing:
            collectives.all_reduce(counts, axis)
        return counts


class _OwnStream(nn.Module):
    """Core attention whose dropout draws from this rank's own stream, because each rank has other heads."""

    def __init__(self, core: nn.Module, stream: SplitRandom) -> None:
        super().__init__()
        self.core, self.stream = core, stream

    def forward(self, *args: object) -> Tensor:
        if not self.training:
            return self.core(*args)
        with self.stream.fork():
            return self.core(*args)
