"""The work folder of a run, with the journal of finished work, from which --resume continues.

A line of the journal is one JSON object with one field. Field `done` holds a segment's result. Field `merged` counts
the leading segments that are merged. Field `naming` marks that the outputs are being renamed. A resumed run verifies
every entry by checksums of the bytes that it describes, so the journal needs no fsync.
"""

import errno
import json
import os
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from megatron.data.indexed.files import open_alone
from megatron.errors import ConfigError, DataError
from megatron.preprocess.worker_output import SegmentResult
from megatron.utils.durable import storage_error, write_atomically, writing
from megatron.utils.typed import typed

_LOCK_SECONDS = 2.0  # a worker that a killed run just forked holds the lock until it closes the inherited file


@dataclass(frozen=True)
class _Begun:
    """Settings of the run that created the work folder."""

    deciding: dict[str, Any]
    resumable: bool = True
    overwrite: bool = False


@dataclass(frozen=True)
class _Entry:
    """A line of the journal."""

    done: dict[str, Any] | None = None
    merged: int | None = None
    naming: bool | None = None


@dataclass
class Kept:
    """State in the journal of an earlier run."""

    results: dict[int, SegmentResult] = field(default_factory=dict)
    merged: int = 0
    naming: bool = False


def work_folder(prefix: str) -> Path:
    """Returns the work folder of a prefix. None of its files has an ending that --input reads as text."""
    return Path(f"{prefix}.preprocessing")


def is_begun(prefix: str) -> bool:
    """True if a run with this prefix, live or killed, has a work folder."""
    try:
        work_folder(prefix).stat()
    except FileNotFoundError:
        return False
    except OSError as error:  # such as a name too long
        raise ConfigError(f"--output-prefix {prefix}: {error.strerror}; choose another prefix") from None
    return True


class WorkFolder:
    """Work folder, locked while it is open. On exit it is kept if --resume can use its content."""

    def __init__(self, prefix: str, *, resume: bool, overwrite: bool) -> None:
        self.prefix, self.path = prefix, work_folder(prefix)
        self.complete = False  # True: nothing is worth keeping
        self.resumable = True
        self._journal: BinaryIO | None = None
        self._done = 0
        self._lock = self._open_locked()
        try:
            self.kept = self._read() if (self.path / "settings").exists() else None
            if self.kept is not None and self.kept.results and not resume and not overwrite:
                if self._saved_settings().resumable:
                    raise ConfigError(
                        f"--output-prefix {prefix}: {self.path} holds part of an earlier run; give --resume to "
                        "continue it, or --overwrite to start afresh"
                    )
                overwrite = True  # the earlier run read a pipe, which cannot be read again
            if not resume or self.kept is None:
                self._clear()
        except BaseException:
            self._lock.close()
            raise

    def _open_locked(self) -> BinaryIO:
        if not self.path.parent.is_dir():
            raise ConfigError(
                f"--output-prefix {self.prefix}: {self.path.parent}: no such directory; create it or choose another "
                "prefix"
            )
        patience = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                self.path.mkdir(exist_ok=True)
                return open_alone(self.path / "lock")
            except FileNotFoundError as error:  # another run has just ended and removed it
                if time.monotonic() > patience:
                    raise storage_error(self.path, error) from error
            except ConfigError:
                if time.monotonic() > patience:
                    raise ConfigError(
                        f"--output-prefix {self.prefix}: another process is writing it ({self.path}); wait until it "
                        "ends, or choose another prefix"
                    ) from None
                time.sleep(0.02)
            except OSError as error:
                raise storage_error(self.path, error) from error

    def _saved_settings(self) -> _Begun:
        try:
            return typed(_Begun, json.loads((self.path / "settings").read_bytes()))
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(
                f"{self.path / 'settings'}: cannot be read ({error}); give --overwrite to start afresh"
            ) from None

    def begin(self, deciding: dict[str, Any], *, resumable: bool, overwrite: bool) -> bool:
        """Starts the journal, or continues it if the settings that decide its content are equal. Returns True if
        outputs are to be overwritten; --overwrite of the interrupted run also applies to the resumed one."""
        self.resumable = resumable
        if self.kept is not None:
            saved = self._saved_settings()
            _refuse_changes(saved.deciding, deciding, self.path)
            overwrite = overwrite or saved.overwrite
        else:
            settings = {"deciding": deciding, "resumable": resumable, "overwrite": overwrite}
            with writing(self.path / "settings"):
                write_atomically(self.path / "settings", [json.dumps(settings, indent=1).encode()])
        with writing(self.path / "journal"):
            self._journal = open(self.path / "journal", "ab", buffering=0)  # noqa: SIM115
            self._journal.truncate(self._whole_bytes)
        return overwrite

    def done(self, result: SegmentResult) -> None:
        self._write({"done": asdict(result)})
        self._done += 1

    def merged(self, segments: int) -> None:
        self._write({"merged": segments})

    def naming(self) -> None:
        self._write({"naming": True})

    def _write(self, entry: dict[str, Any]) -> None:
        assert self._journal is not None
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        with writing(self.path / "journal"):
            if self._journal.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _read(self) -> Kept:
        """Reads the journal up to the first incomplete or damaged line."""
        kept, self._whole_bytes = Kept(), 0
        with suppress(FileNotFoundError, ValueError, RecursionError), open(self.path / "journal", "rb") as stream:
            for line in stream:
                if not line.endswith(b"\n"):
                    break
                entry = typed(_Entry, json.loads(line))
                if entry.done is not None:
                    result = SegmentResult.from_json(entry.done)
                    kept.results[result.number] = result
                kept.merged = kept.merged if entry.merged is None else entry.merged
                kept.naming = kept.naming or entry.naming is not None
                self._whole_bytes += len(line)
        return kept

    def _clear(self) -> None:
        """Removes everything but the lock."""
        self.kept, self._whole_bytes = None, 0
        with writing(self.path):
            (self.path / "settings").unlink(missing_ok=True)  # first, because it makes the rest valid
            for path in self.path.iterdir():
                if path.name != "lock":
                    path.unlink()

    def __enter__(self) -> "WorkFolder":
        return self

    def __exit__(self, *raised: object) -> None:
        if self._journal is not None:
            self._journal.close()
        if self.complete or not self.keeps_something:
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    @property
    def open_files(self) -> list[BinaryIO]:
        return [self._lock] if self._journal is None else [self._lock, self._journal]

    @property
    def keeps_something(self) -> bool:
        """True if --resume could use the content."""
        return self.resumable and bool(self._done or (self.kept is not None and self.kept.results))


def _refuse_changes(before: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if name == "inputs":
            what = "the input files are not those of the interrupted run, or have changed since"
            changed = _first_difference(_words(old), _words(new))
            raise ConfigError(f"--resume: {what}: {changed}; give --overwrite to start afresh")
        raise ConfigError(
            f"--resume: {name} was {_shown(old)} in the interrupted run ({path}) and is {_shown(new)} now; give the "
            "earlier value, or --overwrite to start afresh"
        )


def _first_difference(old: list[str], new: list[str]) -> str:
    for before, after in zip(old, new, strict=False):
        if before != after:
            return after.rpartition(" ")[0].rpartition(" ")[0] or after
    return f"{len(old)} before, {len(new)} now"


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "on" if value else "off"
    return " ".join(_words(value))[:200] if isinstance(value, list) else repr(value)[:200].strip("'")


def _words(value: Any) -> list[str]:
    return [str(word) for word in value] if isinstance(value, list) else []
