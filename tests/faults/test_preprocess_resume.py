"""Resuming after any kind of interruption at any operation gives the same files, bit for bit."""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.data.indexed.dataset import IndexedDataset
from megatron.errors import ConfigError, DataError, StorageError
from megatron.preprocess import outputs
from megatron.preprocess.input.files import expand_inputs
from megatron.preprocess.journal import WorkFolder
from megatron.preprocess.merge import Merger
from megatron.preprocess.options import PreprocessSettings
from megatron.preprocess.run import Terminated, preprocess
from megatron.preprocess.worker_output import SegmentResult
from megatron.tokenizer import TokenizerSettings, build_tokenizer
from tests.helpers.mutations import mutated, only_our_errors, texts
from tests.unit.preprocess.support import Workshop, make_workshop

NULL = TokenizerSettings(tokenizer_type="NullTokenizer", vocab_size=1000)
KEYS = ("a", "b")


def quiet(line: str) -> None:
    pass


def corpus(folder: Path, documents: int = 200) -> Path:
    lines = [b'{"a": "%d %d", "b": ["%d", "7 8"]}' % (i, i + 1, i) for i in range(documents)]
    path = folder / "in.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def settings(folder: Path, prefix: str = "out", **changes: Any) -> PreprocessSettings:
    """Settings with segments of a few lines, so that a small input has many."""
    given: dict[str, Any] = {
        "inputs": (str(folder / "in.jsonl"),),
        "output_prefix": str(folder / prefix),
        "tokenizer": NULL,
        "json_keys": KEYS,
        "append_eod": True,
        "workers": 2,
        "segment_bytes": 500,
    }
    return PreprocessSettings(**{**given, **changes})


def files_of(folder: Path, prefix: str = "out") -> dict[str, bytes]:
    return {
        f"{key}{suffix}": (folder / f"{prefix}_{key}_document{suffix}").read_bytes()
        for key in KEYS
        for suffix in (".bin", ".idx")
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("out"))


def in_a_child(job: Callable[[], object]) -> int:
    """Exit code of a forked process that runs it; negative: the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            job()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# ---------------------------------------------------------------- killed at every operation

OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree")


def killed_at(operation: int, given: PreprocessSettings) -> int:
    """Runs it in a process that kills itself before its n-th file operation; a write is torn in half."""

    def job() -> None:
        mine, left = os.getpid(), operation

        def step() -> bool:
            nonlocal left
            left -= os.getpid() == mine
            return left == 0 and os.getpid() == mine

        def die() -> None:
            os.kill(mine, signal.SIGKILL)

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event not in OPERATIONS or "/out" not in str(arguments[0]):
                return
            if event == "open" and arguments[1] is not None and not set("wax+") & set(arguments[1]):
                return
            if step():
                die()

        def torn(stream: Any, block: bytes) -> None:
            if step():
                os.write(stream.fileno(), bytes(block)[: len(block) // 2])
                die()
            stream.write(block)

        def torn_journal(folder: WorkFolder, entry: dict[str, Any]) -> None:
            if step():
                assert folder._journal is not None
                folder._journal.write(b'{"done": {"number"')
                die()
            write(folder, entry)

        write = WorkFolder._write
        sys.addaudithook(hook)
        outputs._write_all = torn
        WorkFolder._write = torn_journal  # type: ignore[assignment, method-assign]
        preprocess(given, quiet)

    return in_a_child(job)


def test_killed_at_every_operation_then_resumed(tmp_path: Path) -> None:
    corpus(tmp_path, 30)
    preprocess(settings(tmp_path, "whole"), quiet)
    whole = files_of(tmp_path, "whole")
    operation = 0
    while True:
        operation += 1
        code = killed_at(operation, settings(tmp_path, workers=1))
        if code == 0:
            break
        assert code == -signal.SIGKILL, operation
        for key in KEYS:  # only complete datasets have their final names
            prefix = tmp_path / f"out_{key}_document"
            if prefix.with_name(prefix.name + ".idx").exists():
                IndexedDataset(prefix)
                assert files_of_key(tmp_path, key) == files_of_key(tmp_path, key, "whole")
        preprocess(settings(tmp_path, resume=True, workers=1), quiet)
        assert files_of(tmp_path) == whole, operation
        assert len(names(tmp_path)) == 3 * len(KEYS), (operation, names(tmp_path))
        for path in tmp_path.glob("out*"):
            path.unlink()
    assert operation > 40, "the run was killed at many operations"


def files_of_key(folder: Path, key: str, prefix: str = "out") -> list[bytes]:
    return [(folder / f"{prefix}_{key}_document{suffix}").read_bytes() for suffix in (".bin", ".idx")]


# ---------------------------------------------------------------- every way to end


def interrupted(folder: Path, after: int = 3, **changes: Any) -> None:
    """Runs until it fails after so many merged segments, as on a full disk."""
    merged = 0
    take = outputs.GrowingOutput.append

    def append(self: outputs.GrowingOutput, result: Any) -> bool:
        nonlocal merged
        merged += self.key == 0
        if merged > after:
            raise OSError(28, "No space left on device")
        return take(self, result)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(StorageError) as refusal:
        patched.setattr(outputs.GrowingOutput, "append", append)
        preprocess(settings(folder, **changes), quiet)
    assert "No space left on device" in str(refusal.value) and "--resume" in str(refusal.value)


def segments_encoded(folder: Path, **changes: Any) -> tuple[int, list[str]]:
    """Segments that a resumed run encodes, and its messages."""
    said: list[str] = []
    done: list[int] = []
    journal = WorkFolder.done

    def note(folder: WorkFolder, result: SegmentResult) -> None:
        done.append(result.number)
        journal(folder, result)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(WorkFolder, "done", note)
        preprocess(settings(folder, resume=True, **changes), said.append)
    return len(done), said


@pytest.fixture
def whole(tmp_path: Path) -> dict[str, bytes]:
    corpus(tmp_path)
    preprocess(settings(tmp_path, "whole"), quiet)
    return files_of(tmp_path, "whole")


def test_a_signal_while_the_work_folder_is_removed_is_told_that_the_output_is_complete(tmp_path: Path) -> None:
    def end(*where: Any, **options: Any) -> None:
        raise Terminated(signal.SIGTERM)

    corpus(tmp_path)
    with pytest.MonkeyPatch.context() as patched, pytest.raises(Terminated) as ended:
        patched.setattr(shutil, "rmtree", end)
        preprocess(settings(tmp_path), quiet)
    assert ended.value.kept == f"{settings(tmp_path).prefix} is complete"


def test_only_what_is_missing_is_done_again(tmp_path: Path, whole: dict[str, bytes]) -> None:
    interrupted(tmp_path, after=2)
    assert names(tmp_path) == ["out.preprocessing"]
    with pytest.raises(ConfigError, match=r"--resume to continue it.*--overwrite to start afresh"):
        preprocess(settings(tmp_path), quiet)
    done, said = segments_encoded(tmp_path, workers=4)
    total = -(-(tmp_path / "in.jsonl").stat().st_size // 500)
    assert 0 < done <= total - 2 and any("segments are already done" in line for line in said)
    assert files_of(tmp_path) == whole and len(names(tmp_path)) == 6
    said = segments_encoded(tmp_path)[1]
    assert len(said) == 1 and "is complete" in said[0]
    with pytest.raises(ConfigError, match="--overwrite"):
        preprocess(settings(tmp_path, resume=True, append_eod=False), quiet)


def test_overwrite_starts_afresh(tmp_path: Path, whole: dict[str, bytes]) -> None:
    interrupted(tmp_path)
    preprocess(settings(tmp_path, overwrite=True, append_eod=False), quiet)
    plain = files_of(tmp_path)
    assert plain != whole and len(names(tmp_path)) == 6
    interrupted(tmp_path, overwrite=True)
    assert files_of(tmp_path) == plain, "the old output stands until the new one is whole"
    preprocess(settings(tmp_path, resume=True), quiet)  # the interrupted run had --overwrite
    assert files_of(tmp_path) == whole


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"append_eod": False}, "--append-eod was on"),
        ({"json_keys": ("a",)}, "--json-keys was a b"),
        ({"tokenizer": TokenizerSettings(tokenizer_type="NullTokenizer", vocab_size=2000)}, "the tokenizer was"),
        ({"segment_bytes": 400}, "the size of a segment was 500"),
    ],
)
def test_settings_that_decide_the_tokens_may_not_change(
    tmp_path: Path, whole: dict[str, bytes], change: dict[str, Any], named: str
) -> None:
    interrupted(tmp_path)
    with pytest.raises(ConfigError, match=named) as refusal:
        preprocess(settings(tmp_path, resume=True, **change), quiet)
    assert "--overwrite" in str(refusal.value)
    preprocess(settings(tmp_path, resume=True), quiet)
    assert files_of(tmp_path) == whole, "a refusal spoils nothing"


def test_another_input_is_refused(tmp_path: Path, whole: dict[str, bytes]) -> None:
    interrupted(tmp_path)
    os.utime(tmp_path / "in.jsonl", ns=(1, 1))
    with pytest.raises(ConfigError, match=r"--resume: the input files .*in\.jsonl.*--overwrite"):
        preprocess(settings(tmp_path, resume=True), quiet)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("part", ["0.tokens", "0.lengths", "1.counts"])
def test_a_kept_part_that_was_damaged_is_done_again(tmp_path: Path, whole: dict[str, bytes], part: str) -> None:
    interrupted(tmp_path, after=3)
    path = tmp_path / "out.preprocessing" / part
    flip(path, path.stat().st_size // 2)
    _, said = segments_encoded(tmp_path)
    assert any("differs from what was written" in line for line in said)
    assert files_of(tmp_path) == whole


def test_a_shard_that_was_damaged_is_done_again(tmp_path: Path, whole: dict[str, bytes]) -> None:
    interrupted(tmp_path, after=3)
    shards = [path for path in (tmp_path / "out.preprocessing").glob("*-*.tokens") if path.stat().st_size]
    assert shards, "the segment that could not be merged is kept"
    for shard in shards:
        flip(shard, 0)
    preprocess(settings(tmp_path, resume=True), quiet)
    assert files_of(tmp_path) == whole


def test_damage_would_show_if_nothing_were_verified(
    tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without verification the two tests above would fail."""
    interrupted(tmp_path, after=3)
    flip(tmp_path / "out.preprocessing" / "0.tokens", 5)
    monkeypatch.setattr(outputs.GrowingOutput, "holds", lambda self, result: True)
    preprocess(settings(tmp_path, resume=True), quiet)
    assert files_of(tmp_path) != whole


def test_a_bad_line_may_be_skipped_when_the_run_goes_on(tmp_path: Path) -> None:
    path = corpus(tmp_path)
    lines = path.read_bytes().splitlines()
    lines.insert(45, b"{")
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(DataError, match=r"in\.jsonl:46: not JSON.*--on-error skip.*--resume") as refusal:
        preprocess(settings(tmp_path), quiet)
    assert "\n" not in str(refusal.value)
    said: list[str] = []
    report = preprocess(settings(tmp_path, resume=True, on_error="skip"), said.append)
    assert (report.documents, dict(report.bad_lines)) == (200, {"not JSON": 1})
    assert any("in.jsonl:46: not JSON" in line for line in said)
    corpus(tmp_path)
    preprocess(settings(tmp_path, "whole"), quiet)
    assert files_of(tmp_path) == files_of(tmp_path, "whole")


def test_a_kept_part_with_skipped_lines_stops_a_run_that_stops_at_them(tmp_path: Path) -> None:
    path = corpus(tmp_path)
    lines = path.read_bytes().splitlines()
    lines.insert(5, b"{")
    path.write_bytes(b"\n".join(lines))
    interrupted(tmp_path, on_error="skip")
    with pytest.raises(DataError, match=r"in\.jsonl:6: not JSON"):
        preprocess(settings(tmp_path, resume=True), quiet)


def test_a_journal_of_nonsense_is_no_journal(tmp_path: Path, whole: dict[str, bytes]) -> None:
    interrupted(tmp_path)
    (tmp_path / "out.preprocessing" / "journal").write_bytes(b'{"done": 3}\n\x00\xff\n')
    preprocess(settings(tmp_path, resume=True), quiet)
    assert files_of(tmp_path) == whole


def test_journals_and_settings_of_a_stranger(tmp_path: Path, whole: dict[str, bytes]) -> None:
    """Whatever the work folder contains, a resumed run ends with the right files or with one line, and touches nothing
    outside its folder."""
    interrupted(tmp_path)
    work, kept = tmp_path / "out.preprocessing", tmp_path / "kept"
    shutil.copytree(work, kept)
    lines = [json.loads(line) for line in (kept / "journal").read_text().splitlines()]
    precious = tmp_path / "precious.0.tokens"
    precious.write_text("not ours")
    wanted = {**files_of_folder(tmp_path), precious.name: b"not ours"}

    def resumed(journal: list[Any], settings_text: str) -> None:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(kept, work)
        (work / "journal").write_text("".join(f"{json.dumps(line)}\n" for line in journal))
        (work / "settings").write_text(settings_text)
        try:
            with WorkFolder(str(tmp_path / "out"), resume=True, overwrite=False) as folder:
                folder.begin(begun["deciding"], resumable=True, overwrite=False)
                merger = merger_of(tmp_path, folder)
                merger.restore(folder.kept)
        finally:
            assert files_of_folder(tmp_path) == wanted, "files outside of the work folder changed"

    begun = json.loads((kept / "settings").read_text())
    text = json.dumps(begun)
    only_our_errors(lambda journal: resumed(journal, text), mutated(lines, 150, 18))
    only_our_errors(lambda settings_text: resumed(lines, settings_text), texts(begun, 60, 19))
    for stem in ("../precious", "/precious", "a/b", "", "0-\x00", "00000000-../../precious"):
        changed = copy.deepcopy(lines)
        for line in changed:
            if "done" in line:
                line["done"]["stem"] = stem
        only_our_errors(lambda journal: resumed(journal, text), iter([changed]))


def files_of_folder(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def merger_of(folder: Path, work: WorkFolder) -> Merger:
    given = settings(folder, resume=True)
    sources = expand_inputs(given.inputs)
    return Merger(given, work, sources, build_tokenizer(given.tokenizer), quiet)


# ---------------------------------------------------------------- the tool itself


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    made = make_workshop(tmp_path)
    text = " ".join(f"word{i % 997} 中文{i % 89}" for i in range(700))
    made.corpus("in.jsonl", [{"text": f"{i} {text}"} for i in range(300)])
    return made


FLAGS = ("--input", "in.jsonl", "--append-eod", "--encoder", "exact", "--workers", "2")


def start(workshop: Workshop, *flags: str, stdin: Any = None) -> subprocess.Popen[str]:
    command = workshop.command("--output-prefix", "out", *flags)
    return subprocess.Popen(command, cwd=workshop.folder, stdin=stdin, stderr=subprocess.PIPE, text=True)


def children_of(process: subprocess.Popen[str]) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def workers_of(process: subprocess.Popen[str], count: int) -> list[int]:
    deadline = time.monotonic() + 20
    while len(children := children_of(process)) < count:
        assert time.monotonic() < deadline and process.poll() is None, "the workers have started"
        time.sleep(0.01)
    return children


def killed_after(process: subprocess.Popen[str], seconds: float) -> bool:
    """Kills a run that long after its workers started; False if it had already succeeded, as on a fast machine."""
    while process.poll() is None and len(children_of(process)) < 2:
        time.sleep(0.01)
    time.sleep(seconds)
    process.kill()
    _, errors = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), errors
    return process.returncode != 0


def test_the_parent_killed_at_random_moments(workshop: Workshop) -> None:
    assert workshop.run(*FLAGS, "--output-prefix", "whole").returncode == 0
    moments = random.Random(7)
    again = "--overwrite"
    kills = 0
    while kills < 4:
        killed = killed_after(start(workshop, *FLAGS, again), moments.uniform(0.0, 0.3))
        kills += killed
        # A run that had ended is repeated, since it was not killed.
        again = "--resume" if killed else "--overwrite"
    done = workshop.run(*FLAGS, "--output-prefix", "out", "--resume")
    assert done.returncode == 0, done.stderr
    assert workshop.output("out") == workshop.output("whole")
    assert len(workshop.leftovers("out")) == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_ended_by_a_signal_and_resumed(workshop: Workshop, number: signal.Signals) -> None:
    process = start(workshop, *FLAGS)
    journal = workshop.folder / "out.preprocessing" / "journal"
    deadline = time.monotonic() + 30
    while not (journal.exists() and b"merged" in journal.read_bytes()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    victim = process.pid if number != signal.SIGKILL else workers_of(process, 2)[1]
    os.kill(victim, number)
    _, errors = process.communicate(timeout=10)
    assert "--resume" in errors and "out.preprocessing" in errors, errors
    assert process.returncode == (17 if number == signal.SIGKILL else 128 + number)
    assert workshop.run(*FLAGS, "--output-prefix", "out", "--resume").returncode == 0
    assert workshop.run(*FLAGS, "--output-prefix", "whole").returncode == 0
    assert workshop.output("out") == workshop.output("whole")


def test_a_disk_that_fills_up_in_the_middle_and_is_cleared(workshop: Workshop) -> None:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))

    done = subprocess.run(
        workshop.command(*FLAGS, "--output-prefix", "out"), cwd=workshop.folder, preexec_fn=limit,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 13 and done.stderr.count("\n") <= 3, done.stderr
    assert "cannot be written" in done.stderr and "--resume" in done.stderr
    assert not workshop.leftovers("out_")
    assert workshop.run(*FLAGS, "--output-prefix", "out", "--resume").returncode == 0
    assert workshop.run(*FLAGS, "--output-prefix", "whole").returncode == 0
    assert workshop.output("out") == workshop.output("whole")


@pytest.mark.parametrize("sent", [0, 4])
def test_a_worker_killed_while_a_pipe_is_silent(workshop: Workshop, sent: int) -> None:
    """The pipe stays silent after `sent` MB of lines."""
    process = start(workshop, "--input", "-", "--workers", "2", stdin=subprocess.PIPE)
    workers = workers_of(process, 2)
    assert process.stdin is not None
    process.stdin.write(f'{{"text": "{"some text " * 100}"}}\n' * (1000 * sent))
    process.stdin.flush()
    time.sleep(0.5)
    os.kill(workers[0], signal.SIGKILL)
    started = time.monotonic()
    assert process.wait(timeout=10) == 17
    assert time.monotonic() - started < 10
    assert process.stderr is not None
    last = process.stderr.read().strip().rpartition("\n")[2]
    assert "standard input" in last and "was killed by signal 9" in last and "--resume" not in last
    assert workshop.leftovers("out") == [], "nobody can read the pipe again"
    process.stdin.close()


def test_a_pipe_cannot_be_resumed(workshop: Workshop) -> None:
    done = subprocess.run(
        workshop.command("--input", "-", "--output-prefix", "out", "--resume"), cwd=workshop.folder, text=True,
        input='{"text": "a"}\n', capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "--resume: standard input cannot be read a second time" in done.stderr
