"""Norm of a vector that is split over the tensor-parallel ranks; mean and mean square are of the whole vector."""

import torch
from torch import Tensor

from megatron.config import ModelConfig
from megatron.distributed.parallel_state import Axis
from megatron.model.norm import Norm
from megatron.ops import Kernels
from megatron.tensor_parallel import mappings
from megatron.utils.dtype import widened


class SplitNorm(Norm):
    """Norm over the `width` features of the queries or keys of all heads. Each rank holds a share of these features."""

    def __init__(self, width: int, config: ModelConfig, kernels: Kernels, *, axis: Axis, local: int) -> None:
        """`local`: number of features on this rank. With fewer KV heads than ranks, each feature is on several ranks;
        the number of these ranks must be the same for every feature."""
        super().__init__(local, config, kernels)
        self.axis, self.counted = axis, local * axis.size
        assert self.counted % width == 0, f"{axis.size} ranks x {local} features is not a multiple of the width {width}"

    def forward(self, x: Tensor) -> Tensor:
        dtype, wide = self.weight.dtype, widened(x)
        if not self.is_rms:
            wide = wide - self._mean(wide)
        normed = wide * torch.rsqrt(self._mean(wide.square()) + self.eps)
        weight = self.weight + 1 if self.one_plus else self.weight
        scaled = normed.to(x.dtype) * weight
        return (scaled if self.bias is None else scaled + self.bias).to(dtype)

    def _mean(self, x: Tensor) -> Tensor:
        """Mean [..., 1] over the whole width. Every rank uses it for other features, so its gradient is summed over the
        ranks."""
        total = mappings.summed(x.sum(-1, keepdim=True), self.axis)
        return mappings.copied(total, self.axis) / self.counted
