"""Copies of one model on several ranks: flat gradient buffers, summed once per step. Works on any nn.Module."""

from megatron.data_parallel.grad_buffers import GradBuffers, broadcast_parameters

__all__ = ["GradBuffers", "broadcast_parameters"]
