"""Implements `--cuda-graphs`: records forward and backward of a micro-batch once as a CUDA graph, and replays it.

A graph has fixed addresses. A micro-batch and the factor on its loss are therefore copied into tensors of the
recording, and results are copied out before the next replay. A graph also has no control flow in Python: a replay
cannot test whether it is the first one of a step. The gradient buffers are therefore zeroed when a step begins, and
every replay adds to them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.data_parallel import BucketStore
from megatron.errors import ConfigError
from megatron.model.passes import Batch, SinglePass
from megatron.ops.documents import Documents
from megatron.utils.cuda import CudaGraph

Signature = tuple[tuple[str, Any, Any], ...]

_MOST = 4
"""Largest number of recorded shapes; each recording holds the memory of a whole pass."""


@dataclass(frozen=True)
class _Recording:
    graph: CudaGraph
    inputs: dict[str, Tensor | Documents]
    factor: Tensor
    loss_sum: Tensor
    count: Tensor

    def fits(self, batch: Batch) -> bool:
        """True unless the batch has more documents than this graph takes."""
        return all(place.fits(batch[name]) for name, place in self.inputs.items() if isinstance(place, Documents))

    def run(self, batch: Batch, factor: float | Tensor) -> tuple[Tensor, Tensor]:
        for name, place in self.inputs.items():
            place.copy_(batch[name])
        self.factor.fill_(factor) if isinstance(factor, float) else self.factor.copy_(factor)
        self.graph.replay()
        return self.loss_sum.clone(), self.count.clone()


class GraphedPasses:
    """Runs the training passes of `SinglePass` as CUDA graphs. Evaluation passes are not recorded."""

    def __init__(self, plain: SinglePass, grads: BucketStore, make_graph: Callable[[], CudaGraph]) -> None:
        assert grads.flat, "a graph needs gradients at fixed addresses"
        self._plain, self._grads, self._make_graph = plain, grads, make_graph
        self._recordings: dict[Signature, _Recording] = {}

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self._plain.forward(batch)

    def forward_backward(
        self, batches: Sequence[Batch], factor: float | Tensor, arm: Callable[[], None]
    ) -> list[tuple[Tensor, Tensor]]:
        """Replays all batches. Never calls `arm`: no reduction starts before the last replay."""
        for batch in batches:
            recording = self._recordings.get(_signature(batch))
            if recording is None:
                self._recordings[_signature(batch)] = self._record(batch)
            elif not recording.fits(batch):
                del self._recordings[_signature(batch)], recording  # frees its memory
                self._recordings[_signature(batch)] = self._record(batch)
        self._grads.fill_with_zeros()  # also after a warm-up
        return [self._recordings[_signature(batch)].run(batch, factor) for batch in batches]

    def forget(self) -> None:
        """Frees the recordings and their memory; the next passes are recorded again."""
        self._recordings.clear()

    def _record(self, batch: Batch) -> _Recording:
        if len(self._recordings) == _MOST:
            shapes = ", ".join(f"{name} {list(shape)}" for name, shape, _ in _signature(batch))
            raise ConfigError(
                f"--cuda-graphs: micro-batches have more than {_MOST} shapes (new: {shapes}), and the recording of "
                "each holds the memory of a whole pass; give all micro-batches one shape, or remove the flag"
            )
        inputs = {name: _place_for(value) for name, value in batch.items() if isinstance(value, (Tensor, Documents))}
        device = next(value.device for value in inputs.values() if isinstance(value, Tensor))
        factor = torch.ones((), dtype=torch.float32, device=device)

        def work() -> tuple[Tensor, Tensor]:
            loss_sum, count = self._plain.forward(inputs)
            (loss_sum * factor.to(loss_sum.dtype)).backward()
            return loss_sum.detach(), count.detach()

        self._grads.fill_with_zeros()
        graph = self._make_graph()
        graph.warm_up(work)
        loss_sum, count = graph.capture(work)
        return _Recording(graph, inputs, factor, loss_sum, count)


def _place_for(value: Tensor | Documents) -> Tensor | Documents:
    return value.for_recording() if isinstance(value, Documents) else value.clone()


def _signature(batch: Batch) -> Signature:
    return tuple((name, tuple(v.shape), v.dtype) for name, v in sorted(batch.items()) if isinstance(v, Tensor))
