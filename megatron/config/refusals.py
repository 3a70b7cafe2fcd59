"""Collects the errors of one command line, so that all of them are printed together."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron.errors import ConfigError, ConfigErrors
from megatron.layout import SizesError

_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")


class UnknownSettingError(ConfigError):
    """A flag or key that does not exist, or a settings file without its flag. The rest of the command is unknown."""


class Refusals:
    """The errors found while settings are read and checked. `end` raises them."""

    def __init__(self) -> None:
        self._errors: dict[str, ConfigError] = {}
        self._in_doubt: set[str] = set()

    def refuse(self, error: ConfigError, *doubted: str) -> None:
        """Records an error in reading a value.

        The flags that the error names before the first ";", and those in `doubted`, keep their defaults. Later errors
        that name these flags are only consequences, so they are dropped.
        """
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
        """Records the ConfigError of a check across settings. After an earlier error, drops any other exception."""
        try:
            yield
        except ConfigError as error:
            if not self.doubts(*_FLAG.findall(str(error))):
                self._errors.setdefault(str(error), error)
        except Exception:
            if not self._errors:
                raise

    @contextmanager
    def with_sizes_that(self, passes: Callable[[str, int], bool]) -> Iterator[None]:
        """Removes suggested sizes that `passes(flag, size)` rejects from the errors recorded within the context."""
        before = set(self._errors)
        yield
        judged = {}
        for line, error in self._errors.items():
            if isinstance(error, SizesError) and line not in before:
                error = ConfigError(error.text(passes))
            judged[str(error)] = error
        self._errors = judged

    def end_if_unknown(self) -> None:
        """Raises the errors about unknown names, if any, without their consequences, such as missing flags."""
        self._raise(tuple(error for error in self._errors.values() if isinstance(error, UnknownSettingError)))

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(self._errors)

    def end(self) -> None:
        self._raise(tuple(self._errors.values()))

    def _raise(self, errors: tuple[ConfigError, ...]) -> None:
        if errors:
            raise errors[0] if len(errors) == 1 else ConfigErrors(errors)
