"""Computes a model's loss over batches, without gradients."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.data_parallel import FullySharded
from megatron.distributed.collectives import all_reduce
from megatron.distributed.parallel_state import ParallelState
from megatron.engine.to_device import ToDevice
from megatron.errors import DataError
from megatron.model.passes import Batch, Passes


@dataclass(frozen=True)
class EvaluationResult:
    lm_loss: float
    counted_tokens: int
    counted_bytes: int | None = None
    """Bytes of text of the counted tokens; None if unknown."""


class Evaluation:
    """Evaluates a model with its passes."""

    def __init__(
        self,
        model: nn.Module,
        passes: Passes,
        parallel: ParallelState,
        *,
        device: torch.device,
        divided: FullySharded | None = None,
    ) -> None:
        """`model`: this rank's part. `divided`: store of its weights, if data-parallel ranks divide them."""
        self.model, self.passes, self.parallel, self.device = model, passes, parallel, device
        self.divided = divided
        self._to_device = ToDevice(device, parallel.cp)

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every parameter of this rank's part, whole. A collective if the ranks divide weights."""
        if self.divided is None:
            yield from self.model.named_parameters()
        else:
            for name in self.divided.all_names:
                yield name, self.divided.whole_weight(name)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch], byte_lengths: Tensor | None = None) -> EvaluationResult:
        """Mean loss over the counted tokens of all ranks' batches. Training is unaffected, bit for bit.

        `byte_lengths`: number of text bytes of each token id, [vocabulary], on the device.
        """
        was_training = self.model.training
        self.model.eval()  # no dropout, so no random number is drawn
        totals = torch.zeros(3, dtype=torch.float64, device=self.device)
        for batch in batches:
            mine = self._to_device(batch)
            result = self.passes.forward(mine)
            if result is not None:
                totals[:2] += totals_of([result], self.device)
                if byte_lengths is not None:
                    totals[2] += counted_bytes(mine, byte_lengths)
        self.model.train(was_training)
        summed = sum_over_ranks(totals, self.parallel)
        with self.parallel.comm_log.read_back("reading the loss of an evaluation"):
            loss, counted, size = summed.tolist()
        check_counted(counted)
        return EvaluationResult(loss / counted, int(counted), None if byte_lengths is None else int(size))


def totals_of(results: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> Tensor:
    """[summed loss, counted tokens] of this rank's batches."""
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for loss_sum, count in results:
        totals += torch.stack([loss_sum.double(), count.double()])
    return totals


def sum_over_ranks(totals: Tensor, parallel: ParallelState) -> Tensor:
    all_reduce(totals, parallel.dp_cp)
    return all_reduce(totals, parallel.pp)  # only the last stage's are not zero


def counted_bytes(batch: Batch, byte_lengths: Tensor) -> Tensor:
    """Number of text bytes of the predicted tokens that count towards the loss: shape [], int64."""
    return (byte_lengths[batch["labels"]] * (batch["loss_mask"] > 0)).sum()


def check_counted(counted: float) -> None:
    if counted == 0:
        raise DataError(
            "no token of this global batch counts towards the loss: every loss mask is zero; "
            "check --eod-mask-loss and the data"
        )
