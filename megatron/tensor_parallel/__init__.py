"""Layers whose weights are split over the tensor-parallel ranks; each can be used alone, in any nn.Module."""

from megatron.tensor_parallel.embedding import VocabParallelTable
from megatron.tensor_parallel.head import VocabParallelHead
from megatron.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "VocabParallelHead", "VocabParallelTable"]
