"""One optimizer step over one global batch, for our GPT and for any nn.Module.

The loss is the sum over tokens divided by the global number of counted tokens, so it moves neither with the
micro-batch size nor with the number of ranks. That number is known only when the whole batch has been seen; the graph
divides by the count that is expected (so fp16 does not overflow) and the gradients are corrected once at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.data_parallel import GradBuffers
from megatron.distributed.collectives import all_reduce
from megatron.distributed.state import ParallelState
from megatron.errors import DataError, NonFiniteError
from megatron.optimizer import Optimizer
from megatron.utils.timers import Timers

Batch = Mapping[str, Any]

# (model, batch) -> (sum of the losses over the counted tokens, number of counted tokens); both are 0-d tensors.
ForwardStep = Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    lm_loss: float
    counted_tokens: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    loss_scale: float
    grad_norm: float
    skipped: bool  # the update was left out because a gradient was not finite
    num_zeros: int | None = None

    @property
    def finite(self) -> bool:
        return math.isfinite(self.lm_loss)


@dataclass(frozen=True)
class EvaluationResult:
    lm_loss: float
    counted_tokens: int


class Engine:
    """`train_step` is the whole of training; everything around it (data, schedule, files) is the trainer's."""

    def __init__(
        self,
        model: nn.Module,
        forward_step: ForwardStep,
        grads: GradBuffers,
        optimizer: Optimizer,
        parallel: ParallelState,
        *,
        device: torch.device,
        stop_on_nonfinite: bool = True,
        timers: Timers | None = None,
    ) -> None:
        self.model = model
        self.forward_step = forward_step
        self.grads = grads
        self.optimizer = optimizer
        self.parallel = parallel
        self.device = device
        self.stop_on_nonfinite = stop_on_nonfinite
        self.timers = timers or Timers()

    def train_step(
        self,
        micro_batches: Sequence[Batch],
        *,
        batch_size: int,
        tokens_per_sample: int,
        lr: float,
        weight_decay: float,
        count_zeros: bool = False,
    ) -> StepResult:
        """Forward and backward over this rank's micro-batches of one global batch, reduction, update."""
        expected_tokens = batch_size * tokens_per_sample
        loss_scale = self.optimizer.loss_scale
        with self.timers("forward-backward"):
            totals = self._forward_backward(micro_batches, loss_scale / expected_tokens)
        with self.timers("all-grads-sync"):
            self.grads.reduce()
            loss, counted = self._global_mean(totals)
        if self.stop_on_nonfinite and not math.isfinite(loss):
            self._stop("the loss")
        with self.timers("optimizer"):
            zeros = self.optimizer.count_zeros() if count_zeros else None
            update = self.optimizer.step(lr, weight_decay, loss_scale * counted / expected_tokens)
        if update.skipped and self.stop_on_nonfinite:
            self._stop("a gradient")
        return StepResult(
            lm_loss=loss,
            counted_tokens=counted,
            batch_size=batch_size,
            learning_rate=lr,
            weight_decay=weight_decay,
            loss_scale=loss_scale,
            grad_norm=update.grad_norm,
            skipped=update.skipped,
            num_zeros=zeros,
        )

    def _forward_backward(self, micro_batches: Sequence[Batch], factor: float) -> Tensor:
        """Gradients of the summed loss times `factor`; returns this rank's summed loss and counted tokens."""
        self.model.train()
        self.grads.zero()
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        for index, batch in enumerate(micro_batches):
            if index == len(micro_batches) - 1:
                self.grads.arm()
            loss_sum, count = self.forward_step(self.model, self._to_device(batch))
            (loss_sum * factor).backward()
            totals += torch.stack([loss_sum.detach().double(), count.detach().double()])
        return totals

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> EvaluationResult:
        """The mean loss over the counted tokens of all ranks' batches. Leaves training untouched, bit for bit."""
        was_training = self.model.training
        self.model.eval()  # no dropout: no random number is drawn
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in batches:
            loss_sum, count = self.forward_step(self.model, self._to_device(batch))
            totals += torch.stack([loss_sum.double(), count.double()])
        self.model.train(was_training)
        loss, counted = self._global_mean(totals)
        return EvaluationResult(loss, counted)

    def _global_mean(self, totals: Tensor) -> tuple[float, int]:
        all_reduce(totals, self.parallel.dp)
        loss_sum, counted = totals.tolist()
        if counted == 0:
            raise DataError(
                "no token of this global batch counts towards the loss: every loss mask is zero; "
                "check --eod-mask-loss and the data"
            )
        return loss_sum / counted, int(counted)

    def _to_device(self, batch: Batch) -> Batch:
        return {
            key: value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value
            for key, value in batch.items()
        }

    def _stop(self, what: str) -> None:
        names = self.optimizer.find_nonfinite()
        where = f"; first in: {', '.join(names[:4])}" if names else ""
        raise NonFiniteError(
            f"{what} is not finite{where}. The update was not made. Resume from the last checkpoint, lower --lr, or "
            "use --no-check-for-nan-in-loss-and-grad to skip such steps"
        )
