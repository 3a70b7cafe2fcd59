"""Runs a whole preprocessing job: input files -> workers -> one dataset per key."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.data.indexed.record import read_record
from megatron.errors import ConfigError, DataError, MegatronError, PeerLostError
from megatron.preprocess.encoder import Advance, SegmentEncoder
from megatron.preprocess.input.files import InputFile, expand_inputs
from megatron.preprocess.input.locate import Assigned, assigned
from megatron.preprocess.input.segments import Segment, plan_segments, share_bytes
from megatron.preprocess.journal import WorkFolder, is_begun
from megatron.preprocess.merge import Merger, Report
from megatron.preprocess.options import PreprocessSettings, digest_of
from megatron.preprocess.outputs import refuse_existing, take_names_back
from megatron.preprocess.progress import ProgressDisplay
from megatron.preprocess.punkt import SentenceSplitter
from megatron.preprocess.sentences import prepare_splitter, texts_of_sample
from megatron.preprocess.worker_output import SegmentFailure, SegmentResult
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.utils.pool import WorkerDiedError, WorkerPool

Say = Callable[[str], None]


class Terminated(BaseException):
    """Raised when a signal ends the job, so that everything is cleaned up."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.kept = "nothing was written"


def preprocess(
    settings: PreprocessSettings, say: Say, uploaded: Callable[[str], bool] = lambda digest: False
) -> Report:
    """Preprocesses the input. `uploaded` takes a digest of settings, and returns True if all outputs made with these
    settings are uploaded already."""

    def is_complete(digest: str) -> bool:
        return all(is_of(output, digest) for output in settings.outputs) or uploaded(digest)

    tokenizer = build_tokenizer(settings.tokenizer)
    if settings.append_eod:
        tokenizer.eod  # noqa: B018  raises if the vocabulary has none
    sources = expand_inputs(settings.inputs)
    resumable = not any(source.kind == "stdin" for source in sources)
    if settings.resume and not resumable:
        raise ConfigError(
            f"--resume: {sources[0].path} cannot be read a second time; remove --resume, or give --overwrite"
        )
    with ended_by_signals():
        if not is_begun(settings.prefix) and not settings.overwrite and not settings.resume:
            refuse_existing(settings.prefix, settings.outputs)  # before anything needs cleaning up
        folder = WorkFolder(settings.prefix, resume=settings.resume, overwrite=settings.overwrite)
        with _saying_what_is_kept(folder), folder:
            splitter = prepare_splitter_for(settings, sources, say)
            deciding = settings.deciding(sources, tokenizer, splitter)
            if settings.resume and not folder.keeps_something and is_complete(digest_of(deciding)):
                say(f"--resume: {settings.prefix} is complete already")
                return Report()
            overwrite = folder.begin(deciding, resumable=resumable, overwrite=settings.overwrite)
            if folder.kept is not None and folder.kept.naming:
                take_names_back(folder.path, settings.outputs)
            if not overwrite:
                refuse_existing(settings.prefix, settings.outputs)
            try:
                return _Encoding(settings, sources, tokenizer, splitter, folder, say).run(deciding)
            except MegatronError as error:
                if folder.keeps_something:
                    raise type(error)(f"{error}; {_kept(folder)}") from None
                raise


def is_of(output: str, digest: str) -> bool:
    """True if this output is complete and was made with settings of this digest."""
    record = read_record(output)
    return record is not None and record.extra.get("settings") == digest


class _Encoding:
    """Encodes the missing segments with a pool of workers, and merges their results."""

    def __init__(
        self,
        settings: PreprocessSettings,
        sources: list[InputFile],
        tokenizer: Tokenizer,
        splitter: SentenceSplitter | None,
        folder: WorkFolder,
        say: Say,
    ) -> None:
        self._settings, self._sources, self._tokenizer = settings, sources, tokenizer
        self._folder, self._say = folder, say
        self._segment_bytes = settings.segment_size(sources)
        self._encoder = SegmentEncoder(settings, folder.path, splitter, tokenizer)
        self._merger = Merger(settings, folder, sources, tokenizer, say)
        self._assigned: dict[int, Assigned] = {}  # segments in flight

    def run(self, deciding: dict[str, Any]) -> Report:
        settings, merger = self._settings, self._merger
        total = share_bytes(self._sources, segment_bytes=self._segment_bytes, share=settings.share)
        with WorkerPool[Segment, SegmentResult | SegmentFailure](
            self._encoder, settings.workers, private=self._folder.open_files
        ) as pool:
            done = merger.restore(self._folder.kept)
            if merger.report.kept_segments:
                self._say(f"--resume: {merger.report.kept_segments} segments are already done")
            with ProgressDisplay(total, settings.log_interval, begun_at=merger.position) as progress:
                self._encode(pool, done, progress)
                report = merger.report
                report.seconds, report.megabytes_per_second = progress.seconds, progress.megabytes_per_second
        merger.finish(deciding)
        report.engine = self._tokenizer.engine
        return report

    def _encode(
        self,
        pool: WorkerPool[Segment, SegmentResult | SegmentFailure],
        done: dict[int, SegmentResult],
        progress: ProgressDisplay,
    ) -> None:
        def noted(advance: Advance) -> None:
            there = self._assigned[advance.number]
            there.done = advance.line
            plain = there.segment.source.kind == "lines"
            progress.update(
                documents=advance.documents,
                tokens=advance.tokens,
                read=advance.size,
                position=progress.position + (advance.size if plain else 0),
            )

        try:
            for result in pool.map(self._missing(done), described=self._describe, noted=noted):
                self._merger.add(result)
                for number in [number for number in self._assigned if number < self._merger.next]:
                    del self._assigned[number]
                progress.update(documents=0, tokens=0, read=0, position=self._merger.position)
        except WorkerDiedError as death:
            raise self._death(death) from None

    def _missing(self, done: dict[int, SegmentResult]) -> Iterator[Segment]:
        for segment in plan_segments(self._sources, segment_bytes=self._segment_bytes, share=self._settings.share):
            kept = done.pop(segment.number, None)
            if kept is None:
                yield segment
            elif (kept.source, kept.start, kept.stop) != (segment.source.path, segment.start, segment.stop):
                raise DataError(
                    f"--resume: {segment.source.path} is cut into other segments than before; give --overwrite to "
                    "start afresh"
                )

    def _describe(self, segment: Segment) -> Assigned:
        self._merger.sources[segment.source.path] = segment.source  # reading a pipe shows whether it holds an array
        kept = assigned(segment)
        self._assigned[segment.number] = kept
        return kept

    def _death(self, death: WorkerDiedError) -> PeerLostError:
        code = death.exit_code
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        if death.task is None:
            where, doing = self._merger.lines.place_waiting(self._sources[0]), "an idle worker process"
        else:
            lost: Assigned = death.task
            between = [self._assigned[i] for i in sorted(self._assigned) if i < lost.segment.number]
            where = self._merger.lines.place_range(lost, between)
            doing = "the worker process that tokenised them"
        return PeerLostError(
            f"{where}: {doing} {how} (out of memory?); nothing was written under the final names; run again, with "
            "fewer --workers if memory ran out"
        )


def prepare_splitter_for(settings: PreprocessSettings, sources: list[InputFile], say: Say) -> SentenceSplitter | None:
    if not settings.split_sentences:
        return None
    return prepare_splitter(
        language=settings.language,
        keep_newlines=settings.keep_newlines,
        parameters_file=settings.parameters_file,
        sample=lambda: texts_of_sample(sources, settings.json_keys),
        say=say,
        # --overwrite relearns, unless the input can be read only once. A partition must not replace the file that the
        # other partitions use.
        anew=settings.overwrite and settings.world == 1 and not any(source.kind == "stdin" for source in sources),
    )


@contextmanager
def _saying_what_is_kept(folder: WorkFolder) -> Iterator[None]:
    """Sets the text of `Terminated` about kept work, even if the signal arrives while the folder is removed."""
    try:
        yield
    except Terminated as end:
        if folder.complete:
            end.kept = f"{folder.prefix} is complete"
        elif folder.keeps_something:
            end.kept = _kept(folder)
        raise


def _kept(folder: WorkFolder) -> str:
    return f"finished work is kept in {folder.path}: --resume continues it, --overwrite starts afresh"


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turns SIGTERM, SIGINT and SIGHUP into `Terminated`, for the same cleanup as after an error."""

    def end(number: int, frame: object) -> None:
        for other in previous:
            signal.signal(other, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
        raise Terminated(number)

    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    for number in previous:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
