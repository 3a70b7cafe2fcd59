"""Context parallelism: splits a sequence over ranks, and computes attention over all of it."""

from megatron.context_parallel.gathered import GatheredAttention
from megatron.context_parallel.ring import RingAttention
from megatron.context_parallel.sequence import ContextAttention, SharedSequence, slice_batch
from megatron.context_parallel.ulysses import UlyssesAttention
