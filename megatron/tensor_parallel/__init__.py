"""Layers whose weights are split over the tensor-parallel ranks. Each can be used alone, in any nn.Module."""

from megatron.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron.tensor_parallel.norm import SplitNorm
from megatron.tensor_parallel.vocabulary import VocabParallelHead, VocabParallelTable
