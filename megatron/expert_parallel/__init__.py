"""Experts of one layer shared by several ranks: tokens travel to them and back."""

from megatron.expert_parallel.dispatch import ExpertDispatcher
from megatron.expert_parallel.exchange import exchanged, permuted

__all__ = ["ExpertDispatcher", "exchanged", "permuted"]
