"""Context parallelism: how a sequence is split over ranks, and attention over the whole of it."""

from megatron.context_parallel.gathered import GatheredAttention
from megatron.context_parallel.ring import RingAttention
from megatron.context_parallel.sequence import ContextAttention, SharedSequence, slice_batch
from megatron.context_parallel.ulysses import UlyssesAttention
