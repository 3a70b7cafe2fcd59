"""A `Store` for training, with the collectives that a step calls over the data-parallel ranks."""

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor

from megatron.distributed.parallel_state import Axis
from megatron.state.store import Store


class TrainingStore(Store):
    axes: Mapping[str, Axis]
    """Parameter name -> axis of the ranks that hold the parameter, whole or divided."""

    def divided_over(self, name: str) -> Axis:
        """Ranks that hold the parts of a parameter; an axis of size 1 if every rank's part is whole."""
        axis = self.axes[name]
        return axis if self.divisions[name] is not None else Axis.single(axis.name)

    @abstractmethod
    def whole_of(self, name: str, part: Tensor) -> Tensor:
        """Assembles all ranks' parts in the parameter's shape; returns a whole part unchanged. A collective over
        `divided_over(name)`: its ranks must call it for the same parameters in the same order."""

    @abstractmethod
    def zero(self) -> None:
        """Begins a step."""

    def arm(self) -> None:
        """Announces the last backward of the step. A no-op if every backward pass reduces."""

    @abstractmethod
    def reduce(self) -> None:
        """Sums over the ranks; `grad` is then the sum."""

    @abstractmethod
    def publish(self) -> None:
        """Starts the all-gather of the weights, after each rank has updated its part."""

    def wait_for_weights(self) -> None:
        """Waits for the all-gather that `publish` started. Needed before weights are read outside of the model's
        forward pass, which waits itself."""

    def close(self) -> None:
        """Removes hooks from the model. Divided weights stay divided."""
