"""Expert parallelism: distributes the experts of a layer over ranks, and sends tokens to them and back."""

from megatron.expert_parallel.dispatch import ExpertDispatcher, exchanged
