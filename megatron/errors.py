"""All errors meant for users. Each message is one line with the setting, its value and the way out.

The exit codes are a contract with launch scripts and restart policies (docs/getting_started.md).
"""


class MegatronError(Exception):
    """Base of all errors whose cause is outside of the program. (Bugs are assertions.)"""

    exit_code: int = 1


class ConfigError(MegatronError, ValueError):
    """A setting that cannot be used as given, or a path in the settings that does not exist."""

    exit_code = 2


class DataError(MegatronError):
    """A dataset file that is damaged, or does not fit the model or the tokenizer."""

    exit_code = 11


class CheckpointError(MegatronError):
    """No valid checkpoint in a directory that exists, or one that cannot be read."""

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


class InterruptError(MegatronError):
    """The user pressed Ctrl-C (SIGINT)."""

    exit_code = 130
