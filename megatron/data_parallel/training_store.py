"""A `Store` during training: what a step does with it over the data-parallel ranks."""

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor

from megatron.distributed.parallel_state import Axis
from megatron.state.store import Store


class TrainingStore(Store):
    axes: Mapping[str, Axis]
    """The ranks that hold the same parameter, whole or divided."""

    def divided_over(self, name: str) -> Axis:
        """The ranks that hold the parts of a parameter; of size 1 where every rank's part is whole."""
        axis = self.axes[name]
        return axis if self.divisions[name] is not None else Axis.single(axis.name)

    @abstractmethod
    def whole_of(self, name: str, part: Tensor) -> Tensor:
        """The whole tensor of all ranks' parts, in the parameter's shape: the part itself where that is whole. A
        collective of `divided_over`: its ranks ask for the same tensors in the same order."""

    @abstractmethod
    def zero(self) -> None:
        """Begins a step."""

    def arm(self) -> None:
        """Announces the last backward of the step. A no-op where every backward pass reduces."""

    @abstractmethod
    def reduce(self) -> None:
        """Sums over the ranks. Afterwards `grad` is the sum."""

    @abstractmethod
    def publish(self) -> None:
        """After an update of the parts: begins to give all ranks the whole weights."""

    def wait_for_weights(self) -> None:
        """Until they are there. A forward pass of the model waits by itself."""

    def close(self) -> None:
        """Leaves the model as a plain one, unless it is divided: then it stays so."""
