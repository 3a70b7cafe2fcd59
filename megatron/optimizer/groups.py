"""What tells one parameter from another in an update: its factors on the rates, and its matrix."""

from dataclasses import dataclass, field
from typing import NamedTuple

from megatron.optimizer.matrices import Matrix


@dataclass(frozen=True)
class GroupRule:
    """What an optimizer has to know of a parameter besides its tensors."""

    wd_mult: float = 1.0
    """Factors on the schedule's weight decay and learning rate."""
    lr_mult: float = 1.0
    decoupled: bool = False
    """Whether --decoupled-lr is its learning rate."""
    matrix: Matrix | None = field(default=None, compare=False)
    """What a rule that looks at more than one element works on; None where the rule is elementwise."""


class Rates(NamedTuple):
    """Learning rates and weight decay of one step."""

    lr: float
    weight_decay: float
    decoupled_lr: float | None = None

    def of(self, rule: GroupRule) -> tuple[float, float]:
        """Learning rate and weight decay of a group."""
        lr = self.decoupled_lr if rule.decoupled and self.decoupled_lr is not None else self.lr
        return lr * rule.lr_mult, self.weight_decay * rule.wd_mult
