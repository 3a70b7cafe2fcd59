"""Reads the text of a settings file, which may be untrusted. Errors are ConfigErrors with the flag and the file."""

from pathlib import Path

from megatron.errors import ConfigError
from megatron.utils.regular_file import regular

_LARGEST_FILE = 1 << 20  # bytes


def text_of(flag: str, path: str, kind: str) -> str:
    """Returns the file's text. `flag`: the flag that named it. `kind`: YAML or JSON."""
    file = Path(path)
    try:
        if not regular(file).is_file():
            raise ConfigError(f"{flag} {path}: no such file; give the path of a {kind} file")
        if file.stat().st_size > _LARGEST_FILE:
            raise ConfigError(
                f"{flag} {path}: larger than {_LARGEST_FILE} bytes; give the {kind} file of a run's settings"
            )
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {path}: not valid {kind} ({error}); correct the file") from None
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be read ({error.strerror}); check the file") from None
