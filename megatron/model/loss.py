"""The head: maps hidden states to logits, or directly to the loss of every token."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.ops import Kernels
from megatron.ops.linear_cross_entropy import Workspace
from megatron.ops.packed import PackedWeight


class HeadAndLoss(nn.Module):
    """Head without parameters: its weight belongs to the output layer or, if tied, to the embedding."""

    def __init__(self, vocab_size: int, kernels: Kernels) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.kernels = kernels
        self.workspace = Workspace()
        self.packed: PackedWeight | None = None
        """Repacked copy of the current weight for logits without gradients (`megatron/inference/packed.py`)."""

    def forward(self, hidden: Tensor, weight: Tensor, labels: Tensor | None) -> Tensor:
        """hidden [batch, seq, hidden], weight [padded vocabulary, hidden], labels [batch, seq] or None.

        Returns logits [batch, seq, vocabulary], or the loss [batch, seq] in fp32. Padding rows are ignored.
        """
        if labels is None and self.packed is not None and not torch.is_grad_enabled():
            return self.packed(hidden, None)
        if labels is None:
            return F.linear(hidden, weight[: self.vocab_size])
        flat = hidden.reshape(-1, hidden.shape[-1])  # [batch * seq, hidden]
        loss = self.kernels.linear_cross_entropy(flat, weight, labels.reshape(-1), self.vocab_size, self.workspace)
        return loss.view(labels.shape)
