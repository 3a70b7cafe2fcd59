"""Expert parallelism: the experts of a layer are distributed over ranks, and tokens are sent to them and back."""

from megatron.expert_parallel.dispatch import ExpertDispatcher
from megatron.expert_parallel.exchange import exchanged, permuted

__all__ = ["ExpertDispatcher", "exchanged", "permuted"]
