"""Copies of one model on several ranks: flat gradient buffers, summed once per step. Works on any nn.Module."""

from megatron.data_parallel.broadcast import broadcast_parameters
from megatron.data_parallel.fully_sharded import FullySharded
from megatron.data_parallel.grad_buffers import DEFAULT_BUCKET_SIZE, GradBuffers
from megatron.data_parallel.gradients import FlatPieces, Gradients, are_masters, piece_alone
from megatron.data_parallel.sharding_units import Unit

__all__ = [
    "DEFAULT_BUCKET_SIZE",
    "FlatPieces",
    "FullySharded",
    "GradBuffers",
    "Gradients",
    "Unit",
    "are_masters",
    "broadcast_parameters",
    "piece_alone",
]
