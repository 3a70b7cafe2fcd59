"""The end of a transformer branch: bias, dropout and the residual sum."""

from collections.abc import Callable

from torch import Tensor

from megatron.ops.operation import Operation


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, dropout: Callable[[Tensor], Tensor]) -> Tensor:
    return residual + dropout(x if bias is None else x + bias)


OPERATIONS = (Operation("bias_dropout_add", bias_dropout_add),)
