"""All errors meant for users. Each message is one line with the setting, its value, the reason and the fix.

The exit codes are a contract with launch scripts and restart policies (docs/getting_started.md).
"""

import re
from collections.abc import Sequence

from megatron.commands import as_typed_here

# Also matches one slash, because pathlib.Path turns :// into :/.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30}:/{1,2})([^\s'\"<>]*[^\s'\"<>:;,.)])")


def without_secrets(text: str) -> str:
    """Replaces the user, password and query of every URL in a text by dots. (Signed links have their key in the query.)
    Two parts that only look like these stay: `?` in s3://bucket/a?.json is a file pattern, and container@account in
    abfs://container@account is an address."""
    return _URL.sub(lambda found: found[1] + _public(found[1], found[2]), text)


def _public(scheme: str, rest: str) -> str:
    web = scheme.lower().startswith("http")
    host, slash, path = rest.partition("/")
    user, at, place = host.rpartition("@")
    if not web and ":" not in user:
        place, at = host, ""
    place = f"...@{place}{slash}{path}" if at else f"{place}{slash}{path}"
    before, _, query = place.partition("?")
    return f"{before}?..." if query and (web or "=" in query) else place


_LONGEST_WORD, _LONGEST_LINE = 200, 2000
_WORD = re.compile(rf"\S{{{_LONGEST_WORD + len('...') + 1},}}")
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters (escapes, line ends, changes of the writing direction), and lone surrogates. Python represents a
byte of a file name that is not UTF-8 by a lone surrogate, which cannot be encoded."""


def printable(text: str, longest: int = _LONGEST_LINE) -> str:
    """Returns the text as one line of limited length, without secrets. Control characters become escapes such as
    \\x1b. A long word is cut at its end. A long line is cut in the middle, because the end of an error has the reason
    and the fix."""
    text = _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), without_secrets(text))
    text = _WORD.sub(lambda found: _beginning(found[0]), text)
    if len(text) <= longest:
        return text
    half = longest // 2 - 20  # leaves room for the note, so that a line that was cut is not cut again
    return f"{text[:half]} ... ({len(text)} characters) ... {text[-half:]}"


def _beginning(word: str) -> str:
    value = word.rstrip(":;,.)'\"")
    return f"{value[:_LONGEST_WORD]}... ({len(value)} characters){word[len(value) :][:3]}"


class MegatronError(Exception):
    """Base of all errors whose cause is outside the program, such as a wrong setting. Bugs raise other exceptions."""

    exit_code: int = 1

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(as_typed_here(str(message))))

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines to print, one for each mistake that was found."""
        return (str(self),)


class ConfigError(MegatronError, ValueError):
    """A setting that cannot be used as given, or a path in the settings that does not exist."""

    exit_code = 2


class ConfigErrors(ConfigError):
    """Several errors of one command line."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        self._lines = tuple(map(str, errors))
        Exception.__init__(self, "; ".join(self._lines))

    @property
    def lines(self) -> tuple[str, ...]:
        return self._lines


class DataError(MegatronError):
    """A dataset file that is damaged, or does not fit the model or the tokenizer."""

    exit_code = 11


class CheckpointError(MegatronError):
    """A checkpoint directory has no valid checkpoint, or a checkpoint cannot be read."""

    exit_code = 12


class StorageError(MegatronError):
    """Writing failed: the disk is full, read-only or gone."""

    exit_code = 13


class NonFiniteError(MegatronError):
    """A loss, gradient or parameter became NaN or infinite."""

    exit_code = 14


class ReplicaError(MegatronError):
    """Copies of one parameter differ between ranks."""

    exit_code = 15


class HangError(MegatronError):
    """A rank made no progress within the timeout."""

    exit_code = 16


class PeerLostError(MegatronError):
    """Another rank died or could not be reached."""

    exit_code = 17


class MemoryShortError(MegatronError):
    """An allocation failed, on the CPU or on the accelerator."""

    exit_code = 18


class NoProgressError(MegatronError):
    """The launcher has restarted the run too often without a new checkpoint."""

    exit_code = 19


class InterruptError(MegatronError):
    """The user pressed Ctrl-C (SIGINT)."""

    exit_code = 130


class TerminatedError(MegatronError):
    """SIGTERM ended a run without --exit-signal-handler."""

    exit_code = 143
