"""Reads DeepSpeed's JSON file strictly: anything but JSON, and a key that is set twice, is a one-line error."""

import json
import math
import re
from types import MappingProxyType
from typing import Any

from megatron.config.text_file import text_of
from megatron.errors import ConfigError

FLAG = "--deepspeed_config"
_COMMENT = re.compile(r"//|/\*|#")
_JSON = MappingProxyType({"True": "true", "False": "false", "None": "null", "'": '"'})
_PYTHON = re.compile("|".join(_JSON))


def read_json_without_duplicates(path: str) -> dict[str, Any]:
    text = text_of(FLAG, path, "JSON")
    try:
        content = json.loads(text, object_pairs_hook=_without_duplicates, parse_int=_whole)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{FLAG} {path}: not valid JSON ({_reason(text, error)}); correct the file") from None
    except RecursionError:
        raise ConfigError(f"{FLAG} {path}: nested too deeply; DeepSpeed's keys are at most a few blocks deep") from None
    except _SetTwiceError as error:
        raise ConfigError(f"{FLAG} {path}: {error} is set twice; keep one") from None
    if not isinstance(content, dict):
        raise ConfigError(f'{FLAG} {path}: not an object of keys; write {{"train_batch_size": 16, ...}}')
    return content


class _SetTwiceError(Exception):
    pass


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise _SetTwiceError(name if name.isprintable() else ascii(name))
        content[name] = value
    return content


def _whole(digits: str) -> int | float:
    """Parses an integer. From 300 digits on it becomes infinity, because Python rejects thousands of digits."""
    return int(digits) if len(digits) < 300 else math.copysign(math.inf, -1 if digits[0] == "-" else 1)


def _reason(text: str, error: json.JSONDecodeError) -> str:
    place = f"line {error.lineno}, column {error.colno}"
    if _COMMENT.match(text, error.pos):
        return f"{place}: JSON has no comments, remove it"
    python = _PYTHON.match(text, error.pos)
    if python:
        return f"{place}: JSON has no {python[0]}, write {_JSON[python[0]]}"
    return f"{place}: {error.msg}"
