"""The whole job: input files -> workers -> one dataset for each key."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from megatron.errors import DataError, PeerLostError
from megatron.preprocess.documents import BadLine
from megatron.preprocess.encoder import ChunkEncoder, EncodedChunk
from megatron.preprocess.outputs import KeyReport, Outputs, refuse_existing
from megatron.preprocess.pool import WorkerDiedError, WorkerPool
from megatron.preprocess.progress import Progress
from megatron.preprocess.reader import Chunk, expand_inputs, input_bytes, read_chunks
from megatron.tokenizer import TokenizerSettings, build_tokenizer

BYTES_IN_FLIGHT = 64 << 20
EXAMPLES_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class PreprocessSettings:
    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer: TokenizerSettings
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    workers: int = 1
    chunk_size: int = 512
    log_interval: int = 1000
    overwrite: bool = False
    on_error: Literal["stop", "skip"] = "stop"
    max_skip_fraction: float = 1.0


@dataclass
class Report:
    """What happened, for the summary."""

    keys: list[KeyReport] = field(default_factory=list)
    documents: int = 0
    blank_lines: int = 0
    bad_lines: Counter[str] = field(default_factory=Counter)  # by kind
    seconds: float = 0.0
    megabytes_per_second: float = 0.0

    @property
    def skipped(self) -> int:
        return sum(self.bad_lines.values())


class Terminated(BaseException):
    """A signal asked the job to end; everything on the way out cleans up."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def preprocess(settings: PreprocessSettings, *, say: Callable[[str], None] = print) -> Report:
    """Nothing is left under a final name unless all of it succeeded."""
    files = expand_inputs(settings.inputs)
    if not settings.overwrite:
        refuse_existing(settings.output_prefix, settings.json_keys)
    tokenizer = build_tokenizer(settings.tokenizer)
    encoder = ChunkEncoder(settings.tokenizer, settings.json_keys, settings.append_eod, tokenizer)
    report = Report()
    with (
        ended_by_signals(),
        WorkerPool[Chunk, EncodedChunk](encoder, settings.workers) as pool,
        # Opened after the fork, so that no worker holds the outputs or their locks.
        Outputs(settings.output_prefix, settings.json_keys, tokenizer, overwrite=settings.overwrite) as outputs,
        Progress(input_bytes(files), settings.log_interval) as progress,
    ):
        for encoded in _encoded_chunks(pool, read_chunks(files, settings.chunk_size)):
            _account(encoded, report, settings, say)
            outputs.write(encoded.blocks)
            progress.update(
                documents=encoded.documents,
                tokens=sum(len(block.tokens) for block in encoded.blocks),
                read=encoded.size,
                position=encoded.position,
            )
        _check_outcome(report, settings)
        report.keys = outputs.finish(files, append_eod=settings.append_eod)
        report.seconds, report.megabytes_per_second = progress.seconds, progress.megabytes_per_second
    return report


def _encoded_chunks(pool: WorkerPool[Chunk, EncodedChunk], chunks: Iterator[Chunk]) -> Iterator[EncodedChunk]:
    try:
        yield from pool.map_ordered(chunks, cost=lambda chunk: chunk.size, cost_in_flight=BYTES_IN_FLIGHT)
    except WorkerDiedError as death:
        code = death.exit_code
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        chunk: Chunk = death.task
        last = chunk.first_line + len(chunk.lines) - 1
        raise PeerLostError(
            f"{chunk.path}, lines {chunk.first_line} to {last}: the worker process that tokenised them {how} (out of "
            "memory?); nothing was written; run again, with fewer --workers or a smaller --chunk-size"
        ) from None


def _account(encoded: EncodedChunk, report: Report, settings: PreprocessSettings, say: Callable[[str], None]) -> None:
    report.documents += encoded.documents
    report.blank_lines += encoded.blank_lines
    for bad in encoded.bad_lines:
        if settings.on_error == "stop":
            raise DataError(f"{_where(encoded, bad)}; correct the line, or give --on-error skip to leave it out")
        report.bad_lines[bad.kind] += 1
        if report.skipped <= EXAMPLES_SHOWN:
            say(f"skipped {_where(encoded, bad)}")
        elif report.skipped == EXAMPLES_SHOWN + 1:
            say("further skipped lines are only counted")


def _where(encoded: EncodedChunk, bad: BadLine) -> str:
    return f"{encoded.path}:{bad.number}: {bad}"


def _check_outcome(report: Report, settings: PreprocessSettings) -> None:
    given = " ".join(settings.inputs)
    if not report.documents:
        seen = f"{report.blank_lines} blank and {report.skipped} bad lines"
        raise DataError(f"--input {given}: holds no documents ({seen}); nothing was written")
    fraction = report.skipped / (report.skipped + report.documents)
    if fraction > settings.max_skip_fraction:
        raise DataError(
            f"--max-skip-fraction {settings.max_skip_fraction:g}: {report.skipped} of "
            f"{report.skipped + report.documents} lines were bad ({fraction:.4f}); nothing was written"
        )


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP leave through the same exits as an error, so that temporary files are removed."""

    def end(number: int, frame: object) -> None:
        for other in previous:
            signal.signal(other, signal.SIG_IGN)  # the way out is short; a second signal must not cut it
        raise Terminated(number)

    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    for number in previous:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
