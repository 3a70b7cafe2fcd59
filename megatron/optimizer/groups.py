"""Per-parameter settings of an update: factors on the rates, and the weight matrix."""

from dataclasses import dataclass, field
from typing import NamedTuple

from megatron.optimizer.matrices import Matrix


@dataclass(frozen=True)
class GroupRule:
    """Facts about a parameter that an optimizer needs besides its tensors."""

    wd_mult: float = 1.0
    """Factor on the schedule's weight decay. `lr_mult` is the factor on the learning rate."""
    lr_mult: float = 1.0
    decoupled: bool = False
    """True if the parameter has the learning rate --decoupled-lr."""
    matrix: Matrix | None = field(default=None, compare=False)
    """Matrix for rules that are not elementwise; None for elementwise rules."""


class Rates(NamedTuple):
    """Learning rates and weight decay of one step."""

    lr: float
    weight_decay: float
    decoupled_lr: float | None = None

    def of(self, rule: GroupRule) -> tuple[float, float]:
        """Learning rate and weight decay of a group."""
        lr = self.decoupled_lr if rule.decoupled and self.decoupled_lr is not None else self.lr
        return lr * rule.lr_mult, self.weight_decay * rule.wd_mult
