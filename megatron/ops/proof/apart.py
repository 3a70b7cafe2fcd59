"""Judges each folder of csrc/ in a separate process. After an illegal access a process can no longer use its GPU, but
the other processes continue."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from megatron.ops.proof.judge import OperationReport

PACKAGE = Path(__file__).resolve().parents[3]  # where `megatron` is imported from
JUDGE = (sys.executable, "-m", "megatron.ops.proof")


def judge_apart(
    folders: Sequence[str],
    device: str,
    *,
    seed: int,
    seconds: float,
    largest: int | None = None,
    judge: Sequence[str] = JUDGE,
) -> Iterator[OperationReport]:
    """Judges all folders at once. The folder of a process that crashes or times out gets a verdict with that reason."""
    command = [*judge, "--device", device, "--seed", str(seed)]
    command += [] if largest is None else ["--largest", str(largest)]
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as outputs:
        started = {folder: _started([*command, "--folder", folder], Path(outputs) / folder) for folder in folders}
        try:
            for folder, process in started.items():
                ended = _ended(process, until, seconds)
                yield from _verdicts(_results(Path(outputs) / folder))
                if ended:
                    yield OperationReport(
                        folder, folder, "", 0, 0.0, 0.0, (f"{ended}{_last_words(Path(outputs) / folder)}",)
                    )
        finally:
            for process in started.values():
                process.kill()
                process.wait()


def _started(command: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
    with output.open("wb") as said:
        return subprocess.Popen(
            [*command, "--out", str(_results(output))], cwd=PACKAGE, stdout=said, stderr=subprocess.STDOUT
        )


def _results(output: Path) -> Path:
    return output.with_suffix(".json")


def _last_words(output: Path) -> str:
    lines = output.read_text(errors="replace").split("\n")
    return next((f": {line.strip()[:200]}" for line in reversed(lines) if line.strip()), "")


def _ended(process: subprocess.Popen[bytes], until: float, seconds: float) -> str | None:
    """Returns the reason why the process did not judge everything, or None."""
    try:
        code = process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return f"not judged within {seconds:.0f} s"
    return f"its process ended with exit code {code}" if code else None


def _verdicts(file: Path) -> list[OperationReport]:
    found = json.loads(file.read_text()) if file.is_file() else []
    return [replace(verdict, wrong=tuple(verdict.wrong)) for verdict in (OperationReport(**item) for item in found)]
