"""Preprocessing under injected faults: bad lines, killed workers, signals, full disks."""

from __future__ import annotations

import gzip
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.preprocess.support import (
    Workshop,
    expected_documents,
    expected_files,
    make_workshop,
    sample_documents,
)

BAD_LINES: dict[str, tuple[bytes, str]] = {
    "broken": (b'{"text": "a"', "not JSON"),
    "not an object": (b'["a"]', "not a JSON object"),
    "a bare text": (b'"a"', "not a JSON object"),
    "missing key": (b'{"txt": "a"}', "key missing"),
    "null": (b'{"text": null}', "not text"),
    "number": (b'{"text": 7}', "not text"),
    "true": (b'{"text": true}', "not text"),
    "list of numbers": (b'{"text": ["a", 7]}', "not text"),
    "object": (b'{"text": {"a": "b"}}', "not text"),
    "bad UTF-8": (b'{"text": "\xff\xfe"}', "not UTF-8"),
    "encoded surrogate": (b'{"text": "\xed\xa0\x80"}', "not UTF-8"),
    "lone surrogate": (b'{"text": "a\\ud800"}', "lone surrogate"),
    "raw NUL": (b'{"text": "a\x00b"}', "not JSON"),
    "truncated": (b'{"text": "abc', "not JSON"),
    "nested": (b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not JSON"),
    "plain text": (b"Once upon a time", "not JSON"),
    "two objects": (b'{"text": "a"} {"text": "b"}', "not JSON"),
}
FLAGS = ("--input", "in.jsonl", "--output-prefix", "out", "--append-eod")


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return make_workshop(tmp_path)


def good_lines(count: int) -> list[bytes]:
    return [b'{"text": "document %d"}' % i for i in range(count)]


def assert_refused(workshop: Workshop, done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr
    assert workshop.leftovers("out_") == []


# ---------------------------------------------------------------- bad lines


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_stops_the_run_and_is_named(workshop: Workshop, name: str) -> None:
    line, kind = BAD_LINES[name]
    lines = good_lines(9)
    lines.insert(4, line)
    workshop.corpus("in.jsonl", lines)
    assert_refused(workshop, workshop.run(*FLAGS, "--workers", "2", "--chunk-size", "2"), 11, f"in.jsonl:5: {kind}")


@pytest.mark.parametrize("place", [0, 5, 10])
def test_first_middle_and_last_line(workshop: Workshop, place: int) -> None:
    lines = good_lines(10)
    lines.insert(place, BAD_LINES["broken"][0])
    workshop.corpus("in.jsonl", lines)
    assert_refused(workshop, workshop.run(*FLAGS, "--chunk-size", "3"), 11, f"in.jsonl:{place + 1}: not JSON")


def test_of_several_bad_lines_the_first_is_named_with_any_number_of_workers(workshop: Workshop) -> None:
    lines = good_lines(60)
    for place in (50, 40, 20):
        lines.insert(place, BAD_LINES["null"][0])
    workshop.corpus("in.jsonl", lines)
    for workers in ("1", "4"):
        done = workshop.run(*FLAGS, "--workers", workers, "--chunk-size", "1")
        assert_refused(workshop, done, 11, "in.jsonl:21: not text")


def test_skipping_goes_on_with_exact_counts(workshop: Workshop) -> None:
    lines: list[bytes] = []
    for i, (line, _) in enumerate(BAD_LINES.values()):
        lines += [b'{"text": "document %d"}' % i, line, b""]
    workshop.corpus("in.jsonl", lines)
    done = workshop.run(*FLAGS, "--on-error", "skip", "--chunk-size", "4")
    assert done.returncode == 0, done.stderr
    texts = [f"document {i}" for i in range(len(BAD_LINES))]
    assert workshop.output("out") == expected_files(expected_documents(workshop.tokenizer, texts, eod=True))
    for kind, count in (("not JSON", 6), ("not a JSON object", 2), ("key missing", 1), ("not UTF-8", 2)):
        assert f"bad lines skipped: {count} ({kind})" in done.stdout
    assert f"blank lines skipped: {len(BAD_LINES)}" in done.stdout
    assert "in.jsonl:2: not JSON" in done.stderr


def test_plain_text_and_another_key_are_told_the_way_out(workshop: Workshop) -> None:
    workshop.corpus("in.jsonl", [b"Once upon a time", b"", "é".encode()])
    for skip in ((), ("--on-error", "skip")):
        done = workshop.run(*FLAGS, *skip)
        assert done.returncode == 11 and "the line begins with 'Once upon a time'" in done.stderr, done.stderr
        message = done.stderr.splitlines()[-1]
        command = re.findall(r"convert the file: (.*) ; then give --input in\.jsonl\.jsonl$", message)
        subprocess.run(command[0], shell=True, check=True, cwd=workshop.folder)
        assert (
            workshop.folder / "in.jsonl.jsonl"
        ).read_text() == '{"text": "Once upon a time\\n"}\n{"text": "\\u00e9\\n"}\n'
    workshop.corpus("in.jsonl", [{"content": "a"}])
    assert_refused(workshop, workshop.run(*FLAGS), 11, "'content'); change --json-keys text to the key of the text")


def test_a_line_that_is_bad_for_one_key_is_left_out_of_all(workshop: Workshop) -> None:
    workshop.corpus("in.jsonl", [{"a": "x", "b": "y"}, {"a": "only"}, {"a": "z", "b": "w"}])
    done = workshop.run(*FLAGS, "--json-keys", "a", "b", "--on-error", "skip")
    assert done.returncode == 0, done.stderr
    for key, texts in (("a", ["x", "z"]), ("b", ["y", "w"])):
        assert workshop.output("out", key) == expected_files(expected_documents(workshop.tokenizer, texts, eod=True))


def test_too_many_skipped_lines_fail(workshop: Workshop) -> None:
    workshop.corpus("in.jsonl", [*good_lines(8), b"{", b"{"])
    flags = (*FLAGS, "--on-error", "skip", "--max-skip-fraction")
    done = workshop.run(*flags, "0.19")
    assert done.returncode == 11 and "--max-skip-fraction 0.19: 2 of 10 lines were bad" in done.stderr
    assert workshop.leftovers("out_") == []
    assert "--resume" in done.stderr
    assert workshop.run(*flags, "0.2", "--resume").returncode == 0


@pytest.mark.parametrize("content", [[], ["", "  "]])
def test_an_input_without_documents_is_refused(workshop: Workshop, content: list[str]) -> None:
    workshop.corpus("in.jsonl", content)
    assert_refused(workshop, workshop.run(*FLAGS), 11, "holds no documents")
    assert not (workshop.folder / "out.preprocessing").exists()  # resuming would give the same outcome


def test_documents_that_are_all_empty_are_refused(workshop: Workshop) -> None:
    workshop.corpus("in.jsonl", [{"text": ""}, {"text": ""}])
    assert_refused(workshop, workshop.run(*FLAGS), 11, "--json-keys text: every document is empty")
    assert not (workshop.folder / "out.preprocessing").exists()


def test_a_name_too_long_for_the_file_system(workshop: Workshop) -> None:
    workshop.corpus("in.jsonl", [{"text": "a"}])
    done = workshop.run("--input", "in.jsonl", "--output-prefix", "n" * 300)
    assert_refused(workshop, done, 2, "nnn... (300 characters): File name too long; choose another")


def test_an_item_of_an_array_that_comes_by_a_pipe_is_named_so(workshop: Workshop) -> None:
    workshop.corpus("in.jsonl", ['[{"text": "a"}, 3, {"text": "b"}]'])
    command = workshop.command("--input", "-", "--output-prefix", "out", "--on-error", "skip")
    with open(workshop.folder / "in.jsonl", "rb") as pipe:
        done = subprocess.run(command, cwd=workshop.folder, stdin=pipe, capture_output=True, text=True, check=True)
    assert "skipped standard input, item 2: not a JSON object" in done.stderr


def test_a_damaged_gzip_file_is_named(workshop: Workshop) -> None:
    path = workshop.folder / "in.jsonl.gz"
    lines = b"\n".join(b'{"text": "%s"}' % os.urandom(2000).hex().encode() for _ in range(200))
    path.write_bytes(gzip.compress(lines)[:-2000])
    done = workshop.run("--input", path.name, "--output-prefix", "out")
    assert_refused(workshop, done, 11, "in.jsonl.gz: damaged gzip file after line")
    path.write_bytes(b"no gzip at all")
    again = workshop.run("--input", path.name, "--output-prefix", "out", "--overwrite")
    assert_refused(workshop, again, 11, "damaged gzip file")


def test_a_line_of_many_megabytes_is_bounded(workshop: Workshop) -> None:
    workshop.corpus("in.jsonl", [{"text": "word " * 400_000}, {"text": "x" * 300_000}])
    started = time.monotonic()
    done = workshop.run(*FLAGS)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 30


# ---------------------------------------------------------------- processes that die


def start_long_run(workshop: Workshop, *flags: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Starts a run that will not end soon; returns it with its workers' process ids."""
    text = "".join(chr(0x4E00 + i % 5000) for i in range(20_000))
    workshop.corpus("in.jsonl", [f'{{"text": "{text}"}}'] * 600)
    command = workshop.command(*FLAGS, "--workers", "3", "--chunk-size", "1", "--encoder", "exact", *flags)
    process = subprocess.Popen(
        command, cwd=workshop.folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    journal = workshop.folder / "out.preprocessing" / "journal"
    deadline = time.monotonic() + 30
    while not (journal.exists() and b"merged" in journal.read_bytes()):
        assert time.monotonic() < deadline and process.poll() is None, "the first segment is done"
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 3
    return process, [int(child) for child in children]


def gone(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def assert_ended(process: subprocess.Popen[str], workers: list[int], code: int) -> str:
    started = time.monotonic()
    _, errors = process.communicate(timeout=10)
    assert process.returncode == code, errors
    assert time.monotonic() - started < 10
    deadline = time.monotonic() + 5
    while not all(map(gone, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(map(gone, workers)), "no worker outlives the run"
    return errors.strip().rpartition("\n")[2]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_worker_ends_the_run_and_names_the_lines(workshop: Workshop, victim: int) -> None:
    process, workers = start_long_run(workshop)
    os.kill(workers[victim], signal.SIGKILL)
    last = assert_ended(process, workers, 17)
    assert "was killed by signal 9" in last
    if "in.jsonl, after line " not in last:  # it may just have finished a segment
        first, _, end = last.partition("in.jsonl, lines ")[2].partition(":")[0].partition(" to ")
        assert 0 <= int(end) - int(first) < 15, "the rest of that worker's segment, and no other"
    assert workshop.leftovers("out_") == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_run_cleanly(workshop: Workshop, number: signal.Signals) -> None:
    process, workers = start_long_run(workshop)
    process.send_signal(number)
    assert assert_ended(process, workers, 128 + number) == (
        f"preprocess_data.py: ended by signal {int(number)}; finished work is kept in out.preprocessing: --resume "
        "continues it, --overwrite starts afresh"
    )
    assert workshop.leftovers("out_") == []


def test_a_killed_parent_takes_its_workers_along_and_leaves_no_dataset(workshop: Workshop) -> None:
    process, workers = start_long_run(workshop)
    process.kill()
    assert_ended(process, workers, -signal.SIGKILL)
    assert not [name for name in workshop.leftovers("out_") if name.endswith((".bin", ".idx", ".json"))]
    workshop.corpus("in.jsonl", sample_documents(5))
    done = workshop.run(*FLAGS)
    assert done.returncode == 2 and "--resume" in done.stderr and "--overwrite" in done.stderr
    done = workshop.run(*FLAGS, "--resume")
    assert done.returncode == 2 and "in.jsonl" in done.stderr and "--overwrite" in done.stderr, "it is another file now"
    assert workshop.run(*FLAGS, "--overwrite").returncode == 0
    assert len(workshop.leftovers("out_")) == 3 and not (workshop.folder / "out.preprocessing").exists()


def test_two_runs_do_not_write_one_output(workshop: Workshop) -> None:
    process, workers = start_long_run(workshop)
    try:
        done = workshop.run(*FLAGS)
        assert done.returncode == 2 and "another process is writing it" in done.stderr
    finally:
        process.terminate()
        assert_ended(process, workers, 128 + signal.SIGTERM)


# ---------------------------------------------------------------- disks


def limited_to(size: int) -> Callable[[], None]:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write then fails with an error, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return limit


@pytest.mark.parametrize("size", [1 << 10, 1 << 17])
def test_a_disk_that_fills_up_leaves_nothing(workshop: Workshop, size: int) -> None:
    workshop.corpus("in.jsonl", sample_documents(4000))
    done = subprocess.run(
        workshop.command(*FLAGS, "--workers", "2"), cwd=workshop.folder, preexec_fn=limited_to(size),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 13, done.stderr
    assert "out.preprocessing" in done.stderr and "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr and workshop.leftovers("out_") == []


def test_a_failure_of_the_second_key_takes_the_first_back(workshop: Workshop) -> None:
    small, large = "a", "b " * 3000
    workshop.corpus("in.jsonl", [{"small": small, "large": large}] * 60)
    done = subprocess.run(
        workshop.command(*FLAGS, "--json-keys", "small", "large"), cwd=workshop.folder,
        preexec_fn=limited_to(1 << 16), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 13, done.stderr
    assert workshop.leftovers("out_") == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(workshop: Workshop) -> None:
    workshop.corpus("in.jsonl", sample_documents(3))
    locked = workshop.folder / "locked"
    locked.mkdir(mode=0o500)
    done = workshop.run("--input", "in.jsonl", "--output-prefix", "locked/out")
    assert_refused(workshop, done, 13, "locked/out", "cannot be written")
