"""Builds the model of one rank from the plain model, the table of parameters and the layout."""

from megatron.parallelize.divide import divide_weights, is_called, units_of
from megatron.parallelize.parallel import Parallel, check_can_be_split, held_parameters, is_plain, parallelize
from megatron.parallelize.replicas import ReplicaSums
from megatron.parallelize.specs import await_weights, initialise_part, persistent_buffers, split_axes, whole_parts
