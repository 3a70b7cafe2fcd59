"""Evaluation on the validation and test splits. It draws no random number and changes nothing that training reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from megatron.engine import Evaluation
from megatron.model.passes import Batch
from megatron.training.batches import BatchMaker, Data
from megatron.training.hooks import Hook
from megatron.training.initialize import Run
from megatron.training.log_lines import LOG_FORMS
from megatron.training.metrics import EvalRecord
from megatron.training.resume import Progress


class SplitEvaluator:
    """Every evaluation of the validation split, or of each validation set, reads its next `eval_iters` global batches,
    as Megatron does, or under --full-validation all of it once. The test split is always read from its start. A split
    of None is empty."""

    def __init__(self, run: Run, engine: Evaluation, data: Data, batches: BatchMaker, hooks: Sequence[Hook]) -> None:
        self._engine, self._hooks, self._log = engine, hooks, run.log
        self._batches, self._validated, self._test = batches, data.datasets.validated, data.datasets.test
        self._line_of = LOG_FORMS[run.config.logging.log_format].evaluation
        evaluation = run.config.evaluation
        self._eval_iters, self._full_validation = evaluation.eval_iters, evaluation.full_validation
        self._global_batch_size = run.batch_plan.evaluation_batch_size
        self._micro_batches = run.batch_plan.evaluation_micro_batches
        self._valid_batches: dict[str, Iterator[Batch]] = {}  # kept: the next evaluation goes on where this one ended

    def valid(self, progress: Progress, where: str) -> EvalRecord | None:
        """The record of the validation split, or of the last of several validation sets."""
        record = None
        if self._eval_iters == 0 or not self._validated:
            return record
        for name, dataset in self._validated.items():
            place = where if name == "valid" else f"{where} ({name})"
            record = self._evaluate(name, self._batches_of(name, dataset, progress), progress, place)
        if not self._full_validation:
            progress.consumed_valid_samples += self._eval_iters * self._global_batch_size
        return record

    def _batches_of(self, name: str, dataset: Any, progress: Progress) -> Iterator[Batch]:
        if self._full_validation:
            return self._batches.once(dataset)
        if name not in self._valid_batches:
            self._valid_batches[name] = self._batches.evaluation(dataset, progress.consumed_valid_samples)
        return self._next_batches(self._valid_batches[name])

    def test(self, progress: Progress, where: str) -> EvalRecord | None:
        if self._eval_iters == 0 or self._test is None:
            return None
        return self._evaluate("test", self._next_batches(self._batches.evaluation(self._test, 0)), progress, where)

    def _next_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        return islice(batches, self._eval_iters * self._micro_batches)

    def _evaluate(self, split: str, batches: Iterator[Batch], progress: Progress, where: str) -> EvalRecord:
        result = self._engine.evaluate(batches)
        record = EvalRecord(
            split=split,
            iteration=progress.iteration,
            consumed_train_samples=progress.consumed_train_samples,
            lm_loss=result.lm_loss,
            counted_tokens=result.counted_tokens,
        )
        self._log.info(self._line_of(record, where))
        for hook in self._hooks:
            hook.on_evaluate(record)
        return record
