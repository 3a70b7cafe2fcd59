"""The refusals of one command line, collected so that all of them are told at once."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.errors import ConfigError, ConfigErrors

_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")


class UnknownSettingError(ConfigError):
    """A flag or key that does not exist."""


class Refusals:
    """Filled while the settings are read and checked; `end` raises what there is."""

    def __init__(self) -> None:
        self._errors: dict[str, ConfigError] = {}
        self._in_doubt: set[str] = set()

    def refuse(self, error: ConfigError, *doubted: str) -> None:
        """A value that cannot be read. The flags that the line names, before its way out, and those in `doubted` are
        in doubt from then on: they stand at their defaults, and what a check says of them would only follow from this
        refusal."""
        self._errors.setdefault(str(error), error)
        self._in_doubt.update(_FLAG.findall(str(error).partition(";")[0]), doubted)

    def doubts(self, *flags: str) -> bool:
        return not self._in_doubt.isdisjoint(flags)

    @contextmanager
    def of_reading(self) -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            self.refuse(error)

    @contextmanager
    def of_checking(self) -> Iterator[None]:
        """A check across settings. After a refusal it may also fail in other ways, which says nothing new."""
        try:
            yield
        except ConfigError as error:
            if not self.doubts(*_FLAG.findall(str(error))):
                self._errors.setdefault(str(error), error)
        except Exception:
            if not self._errors:
                raise

    def end_if_unknown(self) -> None:
        """Raises unknown names alone: a misspelt flag is also a missing one, and what follows from that is noise."""
        self._raise(tuple(error for error in self._errors.values() if isinstance(error, UnknownSettingError)))

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(self._errors)

    def end(self) -> None:
        self._raise(tuple(self._errors.values()))

    def _raise(self, errors: tuple[ConfigError, ...]) -> None:
        if errors:
            raise errors[0] if len(errors) == 1 else ConfigErrors(errors)
