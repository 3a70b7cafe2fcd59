"""Expert parallelism: the experts of a layer are distributed over ranks, and tokens are sent to them and back."""

from megatron.expert_parallel.dispatch import ExpertDispatcher, exchanged, permuted
