"""The table of how each parameter is split, and what follows from it: specs, parallel layers, initial values."""

from megatron.parallelize.initialise import initialise_gpt
from megatron.parallelize.replicas import ReplicaSums
from megatron.parallelize.table import Row, foreign_specs, gpt_specs, gpt_table, match_table, persistent_buffers
from megatron.parallelize.tensor import split_tensors

__all__ = [
    "ReplicaSums",
    "Row",
    "foreign_specs",
    "gpt_specs",
    "gpt_table",
    "initialise_gpt",
    "match_table",
    "persistent_buffers",
    "split_tensors",
]
