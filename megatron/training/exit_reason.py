"""Why a run ended, for people and for restart policies."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from megatron.errors import MegatronError, PeerLostError, StorageError

FILE = "exit_reason.json"


@dataclass(frozen=True)
class StopReason:
    kind: str  # "done", "dry_run", "exit_interval", "exit_duration", "signal", or an error's class
    text: str
    exit_code: int = 0


@dataclass(frozen=True)
class ExitRecord:
    """`exit_reason.json` beside the checkpoints, because torchrun's own exit code says little.

    Only for a run that holds the directory: another run's record is not ours to touch.
    """

    directory: Path | None
    rank: int

    def clear(self) -> None:
        """At the start: a run that is killed must not leave the reason of the run before."""
        if self.directory is not None and self.rank == 0:
            try:
                (self.directory / FILE).unlink(missing_ok=True)
            except OSError as error:
                raise _unwritable(self.directory, error) from error

    def ended(self, reason: StopReason, iteration: int) -> None:
        """A planned end: every rank has it, one writes it."""
        if self.rank == 0:
            self._write(reason, iteration=iteration)

    def failed(self, error: BaseException) -> None:
        """Any rank may be the one that failed; a rank that only lost its peers leaves the cause as it is."""
        if self.directory is None or (isinstance(error, PeerLostError) and (self.directory / FILE).exists()):
            return
        code = error.exit_code if isinstance(error, MegatronError) else 1
        try:
            self._write(StopReason(type(error).__name__, str(error), code), rank=self.rank)
        except StorageError:
            return  # the error itself is about to be said, and matters more

    def _write(self, reason: StopReason, **details: int) -> None:
        if self.directory is None:
            return
        record = {"reason": reason.kind, "text": reason.text, "exit_code": reason.exit_code, **details}
        temporary = self.directory / f".tmp-{FILE}.{self.rank}"
        try:
            temporary.write_text(json.dumps(record) + "\n", encoding="utf-8")
            temporary.replace(self.directory / FILE)
        except OSError as error:
            raise _unwritable(self.directory, error) from error


def _unwritable(directory: Path, error: OSError) -> StorageError:
    return StorageError(f"--save {directory}: {FILE} cannot be written ({error.strerror}); make room or change --save")
