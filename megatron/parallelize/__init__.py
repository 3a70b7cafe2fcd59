"""Builds the model of one rank from the plain model, the table of parameters and the layout."""

from megatron.parallelize.build import Parallel, held_parameters, is_plain, parallelize
from megatron.parallelize.replicas import ReplicaSums
from megatron.parallelize.specs import await_weights, initialise_part, persistent_buffers

__all__ = [
    "Parallel",
    "ReplicaSums",
    "await_weights",
    "held_parameters",
    "initialise_part",
    "is_plain",
    "parallelize",
    "persistent_buffers",
]
