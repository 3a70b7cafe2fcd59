"""What the functions that read several keys together see of a configuration while it is read (read.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class KeyContext(Protocol):
    given: dict[str, Any]
    """The value of each key, by its path."""
    stronger: Mapping[str, Any]
    """What flags and other files say, by field."""
    left: set[str]
    """The keys that are there and leave their value to the flags: "auto" and null."""

    def set(self, field: str, value: Any, spelled: str) -> None:
        """Sets a field. `spelled`: the key and its value."""

    def say(self, text: str) -> None:
        """A line for the user, about a key."""

    def spelled(self, path: str) -> str:
        """A key with its value."""
