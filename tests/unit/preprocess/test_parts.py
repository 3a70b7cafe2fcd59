"""Reader, encoder and pool by themselves."""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.preprocess import documents, outputs, pool, reader
from megatron.preprocess.encoder import ChunkEncoder
from megatron.preprocess.pool import WorkerDiedError, WorkerPool
from megatron.preprocess.progress import Progress, duration
from megatron.preprocess.reader import Chunk, read_chunks
from megatron.tokenizer import TokenizerSettings

# ---------------------------------------------------------------- reader


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_chunks_number_lines_by_file_and_positions_over_all(tmp_path: Path) -> None:
    files = [write(tmp_path / "a", b"1\n2\n3\n"), write(tmp_path / "b", b"4\n5")]
    chunks = list(read_chunks(files, 2))
    assert [(Path(c.path).name, c.first_line, c.lines) for c in chunks] == [
        ("a", 1, [b"1\n", b"2\n"]),
        ("a", 3, [b"3\n"]),
        ("b", 1, [b"4\n", b"5"]),
    ]
    assert [c.position for c in chunks] == [4, 6, 9]


def test_long_documents_close_a_chunk_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "CHUNK_BYTES", 10)
    chunks = read_chunks([write(tmp_path / "a", b"123456789abc\n1\n2\n3\n4\n5\n6\n")], 100)
    assert [len(chunk.lines) for chunk in chunks] == [1, 5, 1]


def test_a_line_over_the_limit_is_dropped_without_being_held(tmp_path: Path) -> None:
    chunk = next(read_chunks([write(tmp_path / "a", b"short\n" + b"x" * 5000 + b"\nnext\n")], 10, max_line_bytes=100))
    assert chunk.lines == [b"short\n", None, b"next\n"]
    with pytest.raises(documents.LineError, match="line too long"):
        documents.parse_line(None, ["text"])


def test_only_the_first_line_loses_its_mark(tmp_path: Path) -> None:
    chunk = next(read_chunks([write(tmp_path / "a", b"\xef\xbb\xbf1\n\xef\xbb\xbf2\n")], 10))
    assert chunk.lines == [b"1\n", b"\xef\xbb\xbf2\n"]


# ---------------------------------------------------------------- encoder


def null_encoder(append_eod: bool = False) -> ChunkEncoder:
    settings = TokenizerSettings(tokenizer_type="NullTokenizer", vocab_size=10)
    return ChunkEncoder(settings, ["text"], append_eod)


def chunk_of(*lines: bytes) -> Chunk:
    return Chunk("in", 5, list(lines), sum(map(len, lines)), 0)


def test_bad_lines_come_back_as_values_in_their_order() -> None:
    encoded = null_encoder()(
        chunk_of(b'{"text": "1 2"}', b"{", b'{"text": "99"}', b'{"text": 3}', b"", b'{"text": "4"}')
    )
    assert [(bad.number, bad.kind) for bad in encoded.bad_lines] == [
        (6, "not JSON"),
        (7, "refused by the tokenizer"),
        (8, "not text"),
    ]
    assert (encoded.documents, encoded.blank_lines) == (2, 1)
    assert encoded.blocks[0].tokens.tolist() == [1, 2, 4]
    assert encoded.blocks[0].sequence_lengths.tolist() == [2, 1]


def test_a_chunk_of_empty_documents() -> None:
    block = null_encoder(append_eod=True)(chunk_of(b'{"text": ""}', b'{"text": [" "]}')).blocks[0]
    assert block.tokens.tolist() == [] and block.sequences_per_document.tolist() == [0, 0]


# ---------------------------------------------------------------- pool


def double(task: int) -> int:
    time.sleep(0.01 * (task % 3))
    return 2 * task


def die_at_seven(task: int) -> int:
    if task == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return task


def fail_at_seven(task: int) -> int:
    if task == 7:
        raise ValueError("seven")
    return task


def run_out_at_seven(task: int) -> int:
    if task == 7:
        raise MemoryError
    return task


def unit_cost(task: int) -> int:
    return 1


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_answers_come_in_order_from_forked_and_fresh_workers(method: str) -> None:
    with WorkerPool[int, int](double, 2, method=method) as workers:
        answers = list(workers.map_ordered(range(20), cost=unit_cost, cost_in_flight=100))
    assert answers == [2 * i for i in range(20)]


def test_an_encoder_travels_to_a_fresh_process() -> None:
    with WorkerPool(null_encoder(), 1, method="spawn") as workers:
        [answer] = workers.map_ordered([chunk_of(b'{"text": "1 2"}')], cost=lambda c: 1, cost_in_flight=100)
    assert answer.blocks[0].tokens.tolist() == [1, 2]


@pytest.mark.parametrize("limit", [1, 5])
def test_reading_ahead_is_bounded(limit: int) -> None:
    taken = 0

    def tasks() -> Iterator[int]:
        nonlocal taken
        for i in range(50):
            taken += 1
            yield i

    with WorkerPool[int, int](double, 3) as workers:
        for done, _ in enumerate(workers.map_ordered(tasks(), cost=unit_cost, cost_in_flight=limit)):
            assert taken - done <= min(limit, pool.AHEAD * 3) + 1


def test_a_task_dearer_than_the_limit_still_runs() -> None:
    with WorkerPool[int, int](double, 2) as workers:
        assert list(workers.map_ordered([1, 2, 3], cost=lambda t: 1000, cost_in_flight=10)) == [2, 4, 6]


def test_the_task_of_a_dead_worker_is_known_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(WorkerDiedError) as death, WorkerPool[int, int](die_at_seven, 3) as workers:
        list(workers.map_ordered(range(100), cost=unit_cost, cost_in_flight=100))
    assert (death.value.task, death.value.exit_code) == (7, -signal.SIGKILL)
    assert time.monotonic() - started < 5


def test_a_worker_out_of_memory_counts_as_dead() -> None:
    with pytest.raises(WorkerDiedError) as death, WorkerPool[int, int](run_out_at_seven, 2) as workers:
        list(workers.map_ordered(range(100), cost=unit_cost, cost_in_flight=100))
    assert (death.value.task, death.value.exit_code) == (7, pool.OUT_OF_MEMORY)


def test_our_own_fault_in_a_worker_shows_its_traceback() -> None:
    with pytest.raises(AssertionError, match="ValueError: seven"), WorkerPool[int, int](fail_at_seven, 2) as workers:
        list(workers.map_ordered(range(100), cost=unit_cost, cost_in_flight=100))


def test_workers_that_cannot_be_started_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    start = WorkerPool._start
    started = []

    def limited(self: WorkerPool[int, int], handler: object) -> object:
        if len(started) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(start(self, handler))  # type: ignore[arg-type]
        return started[-1]

    monkeypatch.setattr(WorkerPool, "_start", limited)
    with pytest.raises(ConfigError, match="--workers 9: only 2 processes could be started"):
        WorkerPool[int, int](double, 9)
    assert all(not worker.process.is_alive() for worker in started)


# ---------------------------------------------------------------- the rest


def test_durations_read_as_hours() -> None:
    assert duration(0) == "0:00:00" and duration(3725.4) == "1:02:05"


def test_a_terminal_gets_a_bar() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    with Progress(1000, 1, stream=terminal) as progress:
        progress.update(documents=3, tokens=7, read=500, position=500)
    shown = terminal.getvalue()
    assert "50%" in shown and "Processed" not in shown


def test_an_unknown_size_gives_no_eta() -> None:
    stream = io.StringIO()
    with Progress(0, 1, stream=stream) as progress:
        progress.update(documents=3, tokens=7, read=500, position=500)
    assert "Processed 3 documents" in stream.getvalue() and "ETA" not in stream.getvalue()


def test_outputs_are_named_as_megatron_names_them() -> None:
    assert outputs.output_prefix("dir/my", "text") == "dir/my_text_document"
