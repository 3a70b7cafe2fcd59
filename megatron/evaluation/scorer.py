"""Computes log-probabilities of tokens under a model in any layout, in batches of rows of similar length."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from megatron.distributed.collectives import all_reduce
from megatron.distributed.parallel_state import ParallelState
from megatron.engine.to_device import ToDevice
from megatron.errors import NonFiniteError
from megatron.evaluation.sequences import Scored
from megatron.inference.model import Subject
from megatron.model.gpt import GPT, Stage
from megatron.model.passes import Batch, Passes

_ROWS_AT_ONCE = 256
"""Number of tokens whose logits are computed at once to find the likeliest token."""


@dataclass(frozen=True)
class Scores:
    """Scores of each row."""

    logprobs: np.ndarray
    """Sum of the log-probabilities of its scored tokens, in nats; float64."""
    greedy: np.ndarray
    """True if each scored token is the model's likeliest one; all False if not requested."""


def score_step(model: GPT, batch: Batch) -> tuple[Tensor, Tensor]:
    """Forward step of an evaluation. Returns, per row, the sum of log-probabilities and the number of scored tokens
    that are the likeliest: [rows] each. The head runs only on the scored positions."""
    wanted = batch["wanted"]  # [rows, seq]
    layers = [int(name) for name in model.layers]
    body = Stage(range(layers[0], layers[-1] + 1), last=False)
    hidden = model(batch["tokens"], stage=body)[wanted].unsqueeze(0)  # [1, scored, hidden]
    labels = batch["labels"][wanted].unsqueeze(0)  # [1, scored]
    assert model.final_layernorm is not None and model.head_and_loss is not None, "not the last stage"
    sums = torch.zeros(2, len(wanted), dtype=torch.float64, device=wanted.device)
    if labels.numel():
        hidden = model.final_layernorm(hidden)
        losses = model.head_and_loss(hidden, model.head_weight, labels)
        row = wanted.nonzero()[:, 0]
        sums[0].index_add_(0, row, -losses[0].double())
        if batch["greedy"]:
            for piece, right, rows in zip(
                hidden.split(_ROWS_AT_ONCE, 1), labels[0].split(_ROWS_AT_ONCE), row.split(_ROWS_AT_ONCE), strict=True
            ):
                logits = model.head_and_loss(piece, model.head_weight, None)[0]  # [scored, vocabulary]
                sums[1].index_add_(0, rows, (logits.argmax(-1) == right).double())
    return sums[0], sums[1]


class Scorer:
    """Scores rows. All ranks of a model call `score` with the same rows; data-parallel ranks take batches in turn."""

    def __init__(
        self, model: nn.Module, passes: Passes, parallel: ParallelState, device: torch.device, *, tokens_per_pass: int
    ) -> None:
        self.model, self.passes, self.parallel, self.device = model, passes, parallel, device
        self.tokens_per_pass = tokens_per_pass
        self._to_device = ToDevice(device, parallel.cp)

    @torch.inference_mode()
    def score(
        self, rows: Sequence[Scored], *, greedy: bool = False, on_batch: Callable[[int], object] = lambda tokens: None
    ) -> Scores:
        """Returns scores in the order of `rows`. `on_batch` gets the number of tokens that all ranks read in a turn."""
        self.model.eval()
        totals = torch.zeros(2, len(rows), dtype=torch.float64, device=self.device)
        for turn in self._turns(rows):
            mine = turn[self.parallel.dp.rank % len(turn)]
            batch = self._batch([rows[number] for number in mine], greedy)
            found = self.passes.forward({**batch, "step": score_step})
            if found is not None and self.parallel.dp.rank < len(turn):
                totals[:, torch.tensor(mine, device=self.device)] = torch.stack(found).double()
            on_batch(sum(rows[number].length for batch in turn for number in batch))
        all_reduce(totals, self.parallel.dp_cp)
        all_reduce(totals, self.parallel.pp)  # only the last stage has nonzero totals
        logprobs, hits = totals.cpu().numpy()
        if not np.isfinite(logprobs).all():
            raise NonFiniteError("the model's log-probabilities are not finite; check the model's weights and --dtype")
        return Scores(logprobs, hits == np.array([row.count for row in rows]))

    def _turns(self, rows: Sequence[Scored]) -> Iterator[list[list[int]]]:
        """Yields groups of one batch per data-parallel rank. The last group may have fewer. `score` then makes the
        other ranks repeat a batch, because ranks that share experts must run equally many passes."""
        batches, size = list(self._batches(rows)), self.parallel.dp.size
        for first in range(0, len(batches), size):
            yield batches[first : first + size]

    def _batches(self, rows: Sequence[Scored]) -> Iterator[list[int]]:
        """Yields batches of row numbers, longest rows first: too little memory shows early, and padding is small."""
        batch: list[int] = []
        for number in sorted(range(len(rows)), key=lambda number: -rows[number].length):
            longest = rows[batch[0]].length if batch else 0
            if batch and (len(batch) + 1) * longest > self.tokens_per_pass:
                yield batch
                batch = []
            batch.append(number)
        if batch:
            yield batch

    def _batch(self, rows: Sequence[Scored], greedy: bool) -> Batch:
        """Makes a batch, padded at the end, where causal attention does not see it."""
        pieces = 2 * self.parallel.cp.size if self.parallel.cp.size > 1 else 1
        longest = -(-max(row.length for row in rows) // pieces) * pieces
        tokens = torch.zeros(2, len(rows), longest, dtype=torch.int64)
        wanted = torch.zeros(len(rows), longest, dtype=torch.bool)
        for number, row in enumerate(rows):
            given = torch.from_numpy(row.tokens)
            tokens[0, number, : row.length] = given[:-1]
            tokens[1, number, : row.length] = given[1:]
            wanted[number, row.first - 1 : row.length] = True
        return self._to_device({"tokens": tokens[0], "labels": tokens[1], "wanted": wanted, "greedy": greedy})


def scorer_of(subject: Subject) -> Scorer:
    """Makes the scorer and reads the weights; collective over all ranks."""
    run, tokens = subject.run, subject.options.batch_size * subject.window
    return Scorer(subject.model, subject.passes, run.parallel, run.device, tokens_per_pass=tokens)
