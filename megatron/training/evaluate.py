"""Evaluation on the validation and test splits. It draws no random number and moves nothing that training reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from megatron.engine import Batch, Engine
from megatron.training.hooks import Hook
from megatron.training.metrics import EvalRecord
from megatron.training.progress import Progress
from megatron.utils.log import RankLog

# consumed samples -> this rank's micro-batches from there on; None when the split is empty.
BatchSource = Callable[[int], Iterator[Batch]]


class SplitEvaluator:
    """Every evaluation reads the next `eval_iters` global batches of the validation split, as Megatron does, or under
    --full-validation all of it once (but for what does not fill a batch)."""

    def __init__(
        self,
        engine: Engine,
        *,
        valid: BatchSource | None,
        test: BatchSource | None,
        eval_iters: int,
        full_validation: bool,
        micro_batches: int,
        global_batch_size: int,
        hooks: Sequence[Hook],
        log: RankLog,
    ) -> None:
        self._engine = engine
        self._sources = {"valid": valid, "test": test}
        self._eval_iters, self._micro_batches, self._global_batch_size = eval_iters, micro_batches, global_batch_size
        self._full_validation = full_validation
        self._hooks, self._log = hooks, log
        self._valid_batches: Iterator[Batch] | None = None

    def valid(self, progress: Progress, where: str) -> EvalRecord | None:
        source = self._sources["valid"]
        if self._eval_iters == 0 or source is None:
            return None
        if self._full_validation:
            return self._evaluate("valid", source(0), progress, where)
        if self._valid_batches is None:
            self._valid_batches = source(progress.consumed_valid_samples)
        record = self._evaluate("valid", self._next_batches(self._valid_batches), progress, where)
        progress.consumed_valid_samples += self._eval_iters * self._global_batch_size
        return record

    def test(self, progress: Progress, where: str) -> EvalRecord | None:
        source = self._sources["test"]
        if self._eval_iters == 0 or source is None:
            return None
        return self._evaluate("test", self._next_batches(source(0)), progress, where)

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
        self._log.info(record.block(where))
        for hook in self._hooks:
            hook.on_evaluate(record)
        return record
