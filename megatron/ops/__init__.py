"""Operations and their fast implementations. `resolve` selects one implementation of each, once, for the model."""

from megatron.ops.select import OPS, Choice, Kernels, resolve
