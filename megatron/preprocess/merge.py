"""Merges the workers' outputs into datasets, in input order, in the parent process."""

import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron.data.indexed.builder import give_names
from megatron.data.indexed.checksums import FileChecksums
from megatron.data.indexed.dataset import IndexedDataset
from megatron.data.indexed.index_file import token_dtype
from megatron.data.indexed.record import FIRST_TOKENS, first_tokens, make_record, write_record
from megatron.errors import DataError, StorageError
from megatron.preprocess.encoder import EXAMPLES_SHOWN, remove_files
from megatron.preprocess.input.files import InputFile
from megatron.preprocess.input.locate import Lines
from megatron.preprocess.journal import Kept, WorkFolder
from megatron.preprocess.options import PreprocessSettings, digest_of
from megatron.preprocess.outputs import GrowingOutput, shard_is_whole
from megatron.preprocess.worker_output import SegmentFailure, SegmentResult, Totals
from megatron.tokenizer import Tokenizer
from megatron.utils.durable import writing
from megatron.utils.plain_text import conversion
from megatron.utils.process import signals_held


@dataclass
class KeyReport:
    """Output of one key."""

    prefix: str
    dtype: str
    totals: Totals


@dataclass
class Report:
    """Counts of a run, for its summary."""

    keys: list[KeyReport] = field(default_factory=list)
    documents: int = 0
    blank_lines: int = 0
    bad_lines: Counter[str] = field(default_factory=Counter)  # by kind
    engine: str = ""
    seconds: float = 0.0
    megabytes_per_second: float = 0.0
    kept_segments: int = 0  # of an earlier run

    @property
    def skipped(self) -> int:
        return sum(self.bad_lines.values())


class Merger:
    """Takes results in any order and merges them in input order."""

    def __init__(
        self,
        settings: PreprocessSettings,
        folder: WorkFolder,
        sources: list[InputFile],
        tokenizer: Tokenizer,
        say: Callable[[str], None],
    ) -> None:
        self._settings, self._folder, self._tokenizer, self._say = settings, folder, tokenizer, say
        self.sources = {source.path: source for source in sources}
        self._files = sources
        dtype = token_dtype(tokenizer.vocab_size)
        self._keys = [GrowingOutput(folder.path, key, dtype) for key in range(len(settings.json_keys))]
        self._pending: dict[int, SegmentResult | SegmentFailure] = {}
        self.next = 0  # segments before this one are merged
        self.position = 0  # in the input, in bytes on disk
        self.report = Report()
        self.lines = Lines()

    def restore(self, kept: Kept | None) -> dict[int, SegmentResult]:
        """Restores the results of an earlier run whose files match their checksums. Removes the rest."""
        usable: dict[int, SegmentResult] = {}
        with writing(self._folder.path):
            if kept is not None:
                self._restore_merged(kept)
                usable = {
                    number: result
                    for number, result in kept.results.items()
                    if number >= self.next and self._fits(result) and shard_is_whole(result, self._folder.path)
                }
            stems = {result.stem for result in usable.values()}
            for path in self._folder.path.iterdir():
                if "-" in path.name and path.name.split(".")[0] not in stems:
                    path.unlink()
            for merged in self._keys:
                merged.open()
        done = {number: result for number, result in (kept.results if kept else {}).items() if number < self.next}
        self.report.kept_segments = self.next + len(usable)
        self._pending.update(usable)
        self._merge_pending()
        return {**done, **usable}

    def _restore_merged(self, kept: Kept) -> None:
        for number in range(kept.merged):
            result = kept.results.get(number)
            if result is None or not self._fits(result) or not all(merged.holds(result) for merged in self._keys):
                self._say(f"{self._folder.path}: segment {number} differs from what was written; it is encoded again")
                break
            for merged in self._keys:
                merged.take(result)
            self._account(result)
            self.next = number + 1

    def _fits(self, result: SegmentResult) -> bool:
        return len(result.outputs) == len(self._keys) and result.source in self.sources

    def add(self, result: SegmentResult | SegmentFailure) -> None:
        if isinstance(result, SegmentResult):
            self._folder.done(result)
        self._pending[result.number] = result
        self._merge_pending()

    def _merge_pending(self) -> None:
        while self.next in self._pending:
            result = self._pending.pop(self.next)
            if isinstance(result, SegmentFailure):
                raise result.error(self._located(result))
            self._merge(result)
            self._account(result)
            self.next += 1
            self._folder.merged(self.next)
            remove_files(result, self._folder.path, len(self._keys))

    def _located(self, failure: SegmentFailure) -> str:
        if failure.line is None:
            return failure.message
        self.lines.enter(failure.source, failure.start)
        return f"{self.lines.place(failure.line)}: {failure.message}"

    def _merge(self, result: SegmentResult) -> None:
        for merged in self._keys:
            with writing(merged.path("tokens")):
                whole = merged.append(result)
            if not whole:
                raise StorageError(
                    f"{result.file(self._folder.path, merged.key, 'tokens')}: content differs from what was written; "
                    "check the disk, and give --resume"
                )

    def _account(self, result: SegmentResult) -> None:
        report = self.report
        self.lines.enter(self.sources[result.source], result.start)
        shown = report.skipped
        for line, reason in result.examples:
            if self._settings.on_error == "stop":  # the interrupted run used --on-error skip
                raise DataError(f"{self.lines.place(line)}: {reason}; give --on-error skip to skip it")
            if shown < EXAMPLES_SHOWN:
                self._say(f"skipped {self.lines.place(line)}: {reason}")
            shown += 1
        before = report.skipped
        report.bad_lines.update(result.bad)
        if before <= EXAMPLES_SHOWN < report.skipped:
            self._say("further skipped lines are only counted")
        report.documents += result.documents
        report.blank_lines += result.blank
        self.lines.leave(result)
        self.position = result.position

    def finish(self, deciding: dict[str, Any]) -> None:
        self._check_outcome()
        with writing(self._folder.path):
            for merged in self._keys:
                merged.write_index(self._settings.dataset_impl)
        self._folder.naming()
        with signals_held(signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # until all files have their final names
            for merged, key, output in zip(self._keys, self._settings.json_keys, self._settings.outputs, strict=True):
                give_names(output, merged.path("tokens"), merged.path("idx"))
                self.report.keys.append(KeyReport(output, merged.dtype.name, merged.totals))
                self._write_record(merged, key, output, deciding)
            self._folder.complete = True
        for merged in self._keys:
            merged.close()

    def _check_outcome(self) -> None:
        report, given = self.report, " ".join(self._settings.inputs)
        if not report.documents and self._settings.world == 1:
            self._folder.resumable = False  # the same input would give the same outcome
            seen = f"{report.blank_lines} blank and {report.skipped} bad lines"
            fixes = [f"; {fix}" for source in self.sources if (fix := conversion(source))][:1]
            raise DataError(f"--input {given}: holds no documents ({seen}); nothing was written{''.join(fixes)}")
        fraction = report.skipped / max(report.skipped + report.documents, 1)
        if fraction > self._settings.max_skip_fraction:
            raise DataError(
                f"--max-skip-fraction {self._settings.max_skip_fraction:g}: {report.skipped} of "
                f"{report.skipped + report.documents} lines were bad ({fraction:.4f}); nothing was written; "
                "correct the lines, or raise --max-skip-fraction"
            )
        for merged, key in zip(self._keys, self._settings.json_keys, strict=True):
            if not merged.totals.tokens and self._settings.world == 1:
                self._folder.resumable = False
                raise DataError(
                    f"--json-keys {key}: every document is empty; nothing was written; give the key of the text"
                )

    def _write_record(self, merged: GrowingOutput, key: str, output: str, deciding: dict[str, Any]) -> None:
        settings = self._settings
        extra: dict[str, Any] = {
            "tokenizer_type": self._tokenizer.name,
            "json_key": key,
            "append_eod": settings.append_eod,
            "settings": digest_of(deciding),
        }
        if settings.world > 1:
            extra["partition"] = settings.partition(deciding, self._files)
        extra[FIRST_TOKENS] = first_tokens(IndexedDataset(output), self._tokenizer)
        record = make_record(
            output,
            tokenizer_fingerprint=self._tokenizer.fingerprint,
            vocab_size=self._tokenizer.vocab_size,
            eod_id=self._tokenizer.eod_id,
            max_id=merged.totals.max_id,
            source=tuple(source.path.rpartition("/")[2] for source in self._files),
            extra=extra,
            bin_checksums=FileChecksums.of(merged.checksums),
        )
        write_record(output, record)
