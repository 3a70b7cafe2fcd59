"""Parses the lines of a JSONL file of conversations: `{"messages": [{"role": "user", "content": "..."}, ...]}`.

A line may hold several conversations: each system message begins another one, as in Megatron-LM.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.errors import DataError

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MAY_BE_EMPTY = ("system", "developer", "tool")
_FORM = 'a line must be {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


@dataclass(frozen=True)
class Conversation:
    line: int
    """Line number, counted from 1."""
    messages: Sequence[dict[str, Any]]
    tools: Sequence[Any] | None

    @property
    def answered(self) -> bool:
        return any(message["role"] == "assistant" for message in self.messages)


def wrong_line(path: Path, line: int, why: str) -> DataError:
    return DataError(f"{path}, line {line}: {why}")


def read_conversations(path: Path) -> Iterator[Conversation | DataError]:
    """Yields the conversations of the file, and an error for each invalid line."""
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                yield from list(_conversations(path, number, text))
            except DataError as error:
                yield error


def _conversations(path: Path, number: int, text: bytes) -> Iterator[Conversation]:
    try:
        line = json.loads(text.decode("utf-8-sig" if number == 1 else "utf-8"))
    except (ValueError, RecursionError) as error:
        raise wrong_line(path, number, f"not JSON ({str(error)[:100]}); {_FORM}") from None
    messages = line.get("messages") if isinstance(line, dict) else None
    if not isinstance(messages, list) or not messages:
        raise wrong_line(path, number, f"no messages; {_FORM}")
    tools = line.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise wrong_line(path, number, "tools is not a list; give a list of descriptions, or remove tools")
    for place, message in enumerate(messages, start=1):
        _check(path, number, place, message)
    starts = [i for i, message in enumerate(messages) if i == 0 or message["role"] == "system"]
    for start, stop in zip(starts, [*starts[1:], len(messages)]):
        yield Conversation(number, messages[start:stop], tools)


def _check(path: Path, line: int, place: int, message: Any) -> None:
    if not isinstance(message, dict) or "role" not in message:
        raise wrong_line(path, line, f"message {place} has no role; {_FORM}")
    role, content = message["role"], message.get("content")
    if role not in _ROLES:
        raise wrong_line(path, line, f"message {place} has the role {role!r:.60}; use one of {', '.join(_ROLES)}")
    if not isinstance(content, str | None):
        raise wrong_line(path, line, f"message {place}: content is a {type(content).__name__}; give text")
    if not content and role not in _MAY_BE_EMPTY and not message.get("tool_calls"):
        raise wrong_line(path, line, f"message {place} of the {role} is empty; give it content, or remove the line")
