"""Fast math. `resolve` picks one implementation of every operation, once; models are handed the result."""

from megatron.ops.select import OPS, Choice, Kernels, resolve
