"""Makes the modules of a GPT. The modules are plain; `parallelize` overrides those that a parallel layout changes.

All constructors receive the factory. A module takes its settings and replaceable parts from it. A module requests
linear layers by their parameter names in the whole model, so that a layout finds their rows in `model/parameters.py`.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import ModelConfig, MoEConfig, RecomputeConfig
from megatron.model.attention import CoreAttention, SequenceView
from megatron.model.linear import Linear
from megatron.model.loss import HeadAndLoss
from megatron.model.moe_losses import RouterReports
from megatron.model.norm import Norm
from megatron.model.recompute import Recomputation
from megatron.model.table import Table
from megatron.model.wgrads import WgradRoute
from megatron.ops import Kernels
from megatron.ops.expert_rows import RowGroups
from megatron.ops.grouped_linear import least_rows

Dropout = Callable[[Tensor, float, bool], Tensor]
"""(x, probability, training) -> x with dropout."""


T = TypeVar("T")

RunExperts = Callable[[Tensor, RowGroups], Tensor]
"""(rows [rows, hidden] sorted by expert, rows of each expert) -> the experts' results in the same order."""


class Dispatcher(Protocol):
    """Calls the experts, on this rank or on the ranks that hold them."""

    padding: int
    """Rows of zeros to add after each expert's rows."""

    def __call__(
        self, rows: Tensor, groups: RowGroups, experts: RunExperts, meanwhile: Callable[[], T]
    ) -> tuple[Tensor, T]:
        """Returns the experts' results for `rows` [rows, hidden], sorted by expert like these, and the result of
        `meanwhile`, which runs while rows travel. `groups`: the rows of all experts."""


class LocalDispatcher:
    """Calls the experts on this rank, which holds all of them."""

    def __init__(self, padding: int) -> None:
        self.padding = padding

    def __call__(
        self, rows: Tensor, groups: RowGroups, experts: RunExperts, meanwhile: Callable[[], T]
    ) -> tuple[Tensor, T]:
        return experts(rows, groups), meanwhile()


class ModuleFactory:
    dropout: Dropout = staticmethod(F.dropout)
    """Dropout on the residual stream."""
    pieces_of_sequence = 1
    """Number of ranks that each hold a different part of every sequence."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        moe: MoEConfig | None = None,
        recompute: RecomputeConfig | None = None,
        wgrads: WgradRoute | None = None,
    ) -> None:
        self.config, self.kernels, self.moe = config, kernels, moe or MoEConfig()
        self.recompute, self.wgrads = recompute or RecomputeConfig(), wgrads or WgradRoute()
        self.recomputation = Recomputation()
        self.layers_with_experts = self.moe.expert_layers(config.num_layers) if self.moe.is_on else ()
        on = self.moe.is_on
        self.routers = RouterReports(self.moe, config.num_layers, self.pieces_of_sequence) if on else None

    def linear(self, name: str, in_features: int, out_features: int, *, bias: bool) -> Linear:
        """Makes a linear layer. Sizes count the whole layer; the factory of a layout makes only this rank's part."""
        return Linear(in_features, out_features, bias=bias, wgrads=self.wgrads)

    def norm(self, width: int) -> Norm:
        return Norm(width, self.config, self.kernels)

    def head_norm(self, name: str, heads: int) -> Norm:
        """Makes a norm of queries or keys: over each head, or over all `heads` of the whole model together."""
        together = self.config.qk_layernorm_scope == "all"
        return self.norm(self.config.head_dim * (heads if together else 1))

    def vocabulary_table(self, rows: int) -> Table:
        """Makes the token embedding or output head. `rows` counts the whole table, padding included."""
        return Table(rows, self.config.hidden_size)

    def position_table(self) -> Table:
        return Table(self.config.max_position_embeddings, self.config.hidden_size)

    def sequence(self) -> SequenceView:
        """Positions and visibility of the tokens of a forward pass."""
        return SequenceView()

    def core_attention(self, layer: int) -> nn.Module:
        return CoreAttention(self.config, layer + 1, self.kernels)

    def head_and_loss(self, vocab_size: int) -> nn.Module:
        return HeadAndLoss(vocab_size, self.kernels)

    def experts(self) -> range:
        """Indices of this rank's experts."""
        return range(self.moe.num_experts or 0)

    def dispatcher(self) -> Dispatcher:
        return LocalDispatcher(least_rows(self.kernels.grouped_linear))

    def sum_of_sequence(self, counts: Tensor) -> Tensor:
        """Sums per-sequence counts over the ranks that share each sequence."""
        return counts
