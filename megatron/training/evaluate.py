"""Evaluates on the validation and test splits, without drawing random numbers or changing what training reads."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from megatron.engine import Engine, Evaluation
from megatron.model.passes import Batch
from megatron.training.batches import BatchMaker, Data, is_token_dataset, validation_plan_of
from megatron.training.hooks import Hook
from megatron.training.initialize import Run
from megatron.training.log_lines import LOG_FORMS
from megatron.training.metrics import EvalRecord
from megatron.training.resume import Progress


class SplitEvaluator:
    """Evaluates the validation split, or several validation sets, and the test split. With a `ValidationPlan`, every
    evaluation of a validation set reads the same samples. Without a plan, it reads the next `eval_iters` global
    batches, as in Megatron. The test split is always read from its start. A split of None is empty."""

    def __init__(
        self, run: Run, engine: Engine | Evaluation, data: Data, batches: BatchMaker, hooks: Sequence[Hook]
    ) -> None:
        self._engine, self._hooks, self._log = engine, hooks, run.log
        self._batches, self._validated, self._test = batches, data.datasets.validated, data.datasets.test
        self._line_of = LOG_FORMS[run.config.logging.log_format].evaluation
        self._eval_iters, self._plan = run.config.evaluation.eval_iters, validation_plan_of(run)
        self._global_batch_size = run.batch_plan.evaluation_batch_size
        self._micro_batches = run.batch_plan.evaluation_micro_batches
        self._valid_batches: dict[str, Iterator[Batch]] = {}  # kept, so that the next evaluation continues there
        self._byte_lengths: Tensor | None = None
        if self._eval_iters and (self._validated or self._test is not None):
            self._byte_lengths = byte_lengths_of(run)

    def valid(self, progress: Progress, where: str) -> EvalRecord | None:
        """Record of the validation split, or of the last of several validation sets."""
        record = None
        if self._eval_iters == 0 or not self._validated:
            return record
        for name, dataset in self._validated.items():
            place = where if name == "valid" else f"{where} ({name})"
            record = self._evaluate(name, dataset, self._batches_of(name, dataset, progress), progress, place)
        if self._plan is None:
            progress.consumed_valid_samples += self._eval_iters * self._global_batch_size
        return record

    def _batches_of(self, name: str, dataset: Any, progress: Progress) -> Iterator[Batch]:
        if self._plan is not None:
            return self._batches.once(dataset, self._plan.of(name))
        if name not in self._valid_batches:
            self._valid_batches[name] = self._batches.evaluation(dataset, progress.consumed_valid_samples)
        return self._next_batches(self._valid_batches[name])

    def test(self, progress: Progress, where: str) -> EvalRecord | None:
        if self._eval_iters == 0 or self._test is None:
            return None
        batches = self._next_batches(self._batches.evaluation(self._test, 0))
        return self._evaluate("test", self._test, batches, progress, where)

    def _next_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        return islice(batches, self._eval_iters * self._micro_batches)

    def _evaluate(
        self, split: str, dataset: Any, batches: Iterator[Batch], progress: Progress, where: str
    ) -> EvalRecord:
        result = self._engine.evaluate(batches, self._byte_lengths if is_token_dataset(dataset) else None)
        record = EvalRecord(
            split=split,
            iteration=progress.iteration,
            consumed_train_samples=progress.consumed_train_samples,
            lm_loss=result.lm_loss,
            counted_tokens=result.counted_tokens,
            counted_bytes=result.counted_bytes,
        )
        self._log.info(*self._line_of(record, where).split("\n"))
        for hook in self._hooks:
            hook.on_evaluate(record)
        return record


def byte_lengths_of(run: Run) -> Tensor | None:
    """Number of text bytes of each token id; None, with a log line, if the ids do not represent text."""
    lengths = None
    if run.tokenizer is not None and not run.config.data.mock_data:
        lengths = run.tokenizer.byte_lengths()
    if lengths is None:
        run.log.info("evaluations report no bits per byte: the token ids of this data do not represent text")
        return None
    return torch.from_numpy(lengths.astype("int64")).to(run.device)
