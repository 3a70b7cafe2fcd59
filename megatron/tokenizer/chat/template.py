"""A chat template, rendered by a process of its own (`renderer.py`), and what its limits are.

The template comes with a model that somebody else made: it may loop, or fill the memory.
"""

import importlib.util
import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megatron.errors import ConfigError, MegatronError
from megatron.tokenizer.chat import renderer
from megatron.tokenizer.chat.renderer import LENGTH_BYTES, MARKED, MARKS, frame, json_bytes
from megatron.utils.process import how_to_continue

_SAFE_JINJA = (3, 1, 6)  # older sandboxes have known holes
_MESSAGE_BYTES = 1 << 20  # of requests that are sent together
_STOPPED_AFTER, _STOPPED_EVERY = 5.0, 30.0  # seconds without an answer, after which a stopped process is reported

Message = Mapping[str, Any]


class ChatError(Exception):
    """Why this conversation cannot be encoded. Whoever knows its place makes a DataError of it."""

    ends = False
    """True if the template is to blame, so that no other conversation need be tried."""


class LimitError(ChatError):
    """The template reached a limit, or its process ended."""

    ends = True


@dataclass(frozen=True)
class Rendered:
    text: str
    answers: tuple[tuple[int, int], ...]
    """Of the assistant: characters start <= i < end of the text."""


@dataclass(frozen=True)
class Limits:
    """Of the process that renders. `output_bytes` and `cpu_seconds` are of one conversation."""

    memory_bytes: int = 1 << 30
    cpu_seconds: int = 5
    output_bytes: int = 64 << 20


class ChatTemplate:
    def __init__(
        self,
        source: str,
        *,
        named: str,
        special_tokens: Mapping[str, str],
        ends: Sequence[str],
        limits: Limits | None = None,
    ) -> None:
        """`named`: the template's place, for messages. `special_tokens`: by the names that templates use (bos_token).
        `ends`: the texts of all special tokens; one of them ends a turn."""
        self.source, self.named, self.limits = source, named, limits or Limits()
        self.marked = MARKED.search(source) is not None
        """Whether the template itself says what the assistant's answers are."""
        self._setup = {
            "source": source,
            "names": dict(special_tokens),
            "ends": list(ends),
            "memory_bytes": self.limits.memory_bytes,
            "cpu_seconds": self.limits.cpu_seconds,
            "output_bytes": self.limits.output_bytes,
        }
        self._process: _Process | None = None

    def check(self) -> None:
        """Rejects a template that cannot be compiled."""
        self._started()

    def close(self) -> None:
        """Ends the process that renders; a later call starts another one."""
        if self._process is not None:
            self._process.end()
        self._process = None

    def render(self, requests: Iterable[bytes]) -> Iterator[tuple[Rendered, ...] | ChatError]:
        """The texts of each request, or why there are none. The next one is rendered while the caller uses one. Ends
        after a `LimitError`."""
        group: list[bytes] = []
        for each in requests:
            if group and sum(map(len, group)) + len(each) > _MESSAGE_BYTES:
                yield from self._render(group)
                group = []
            group.append(each)
        if group:
            yield from self._render(group)

    def _render(self, requests: Sequence[bytes]) -> Iterator[tuple[Rendered, ...] | ChatError]:
        process = self._started()
        self._process = None  # another rendering that begins meanwhile has a process of its own
        left = len(requests)
        try:
            process.send(b"".join(map(frame, requests)))
            for _ in requests:
                found = self._read(process)
                if isinstance(found, LimitError):
                    yield found
                    return
                left -= 1
                yield found
        finally:
            if left:  # no answer to one request may be taken for that to another
                process.end()
            else:
                self._process = process

    def _read(self, process: "_Process") -> tuple[Rendered, ...] | ChatError:
        try:
            content = process.receive(self.limits.output_bytes)
            return _texts(content) if isinstance(content, list) else self._error(content["error"], str(content["why"]))
        except _EndedError as ended:
            return LimitError(self._end(ended.code))
        except (ValueError, TypeError, LookupError, RecursionError):
            return LimitError(self._no_text())

    def _error(self, kind: str, why: str) -> ChatError:
        if kind == "memory":
            return LimitError(self._limit(f"takes more memory than {_size(self.limits.memory_bytes)}"))
        if kind == "output":
            return LimitError(self._limit(f"writes more than {_size(self.limits.output_bytes)} for one conversation"))
        if kind == "endless":
            return LimitError(f"{self.named} does not end ({_shown(why)})")
        if kind == "unknown":
            return ChatError(
                f"{self.named} does not begin message {int(why)} with its own prompt to answer "
                "(add_generation_prompt), so where the answer begins is not known; put {% generation %} and "
                "{% endgeneration %} around the assistant's text in the template"
            )
        return ChatError(f"{self.named} refuses it ({_shown(why)})")

    def _no_text(self) -> str:
        return f"{self.named} makes its process answer what is no text; use another template"

    def _limit(self, what: str) -> str:
        return f"{self.named} {what}, the limit of templates; correct it, or use another one"

    def _end(self, code: int) -> str:
        if code == -signal.SIGXCPU:
            return self._limit(f"takes more than {self.limits.cpu_seconds} s of CPU time for one conversation")
        if code == -signal.SIGKILL:
            return f"{self.named}: the process that renders it was killed (out of memory?); make room, or correct it"
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"{self.named}: the process that renders it ended ({how}); correct the template, or use another one"

    def _started(self) -> "_Process":
        if self._process is not None and self._process.usable:
            return self._process
        self.close()
        process = _Process({**self._setup, "paths": _packages(self.named)}, self.named)
        try:
            hello = process.receive(self.limits.output_bytes)
            if "error" in hello:
                raise ConfigError(self._not_a_template(hello["error"], str(hello["why"])))
            _check_version(self.named, str(hello["jinja2"]))
            limits_memory = hello["limits_memory"]
        except _EndedError as ended:
            raise ConfigError(self._end(ended.code)) from None
        except MegatronError:
            process.end()
            raise
        except (ValueError, TypeError, LookupError, RecursionError):
            process.end()
            raise ConfigError(self._no_text()) from None
        if not limits_memory:
            logging.getLogger(__name__).warning(
                "%s: this system sets no limit of memory (RLIMIT_AS) for the process that renders it; CPU time and "
                "output are limited",
                self.named,
            )
        self._process = process
        return process

    def _not_a_template(self, kind: str, why: str) -> str:
        if kind == "refused":
            return f"{self.named}: not a chat template ({_shown(why)}); correct it, or give another --tokenizer-model"
        return str(self._error(kind, why))


def request(messages: Sequence[Message], tools: Sequence[Any] | None = None, *, prompt: bool = False) -> bytes:
    """A conversation as it is rendered; with `prompt`, followed by the prompt to answer it."""
    try:
        content = json_bytes({"messages": list(messages), "tools": tools, "prompt": prompt})
    except RecursionError:
        raise ChatError("its values are nested too deeply; make it flatter") from None
    if MARKS.search(content.decode("utf-8", "surrogatepass")):
        raise ChatError("its text holds U+FDD0 or U+FDD1, which Unicode keeps free of meaning; remove it")
    return content


class _EndedError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class _Process:
    """One that renders: without files, sockets, environment, terminal and working directory of ours."""

    def __init__(self, setup: Mapping[str, Any], named: str) -> None:
        command = [sys.executable, "-I", "-S", "-B", str(renderer.__file__)]
        try:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                close_fds=True,
                cwd="/",
                env={},
                start_new_session=True,  # the terminal's signals are meant for us, and its end follows ours
            )
        except OSError as error:
            raise ConfigError(f"{named}: the process that renders it could not be started ({error})") from None
        self._named, self._owner = named, os.getpid()
        os.set_blocking(_open(self._popen.stdin).fileno(), False)  # what fits is written, and the rest waits
        self.end = weakref.finalize(self, _end, self._popen, self._owner)
        self.send(json_bytes(setup))

    @property
    def usable(self) -> bool:
        """A fork of this process has the pipes, too, and must not use them."""
        return self._owner == os.getpid() and self._popen.poll() is None

    def send(self, content: bytes) -> None:
        stream, left = _open(self._popen.stdin), memoryview(frame(content))
        with suppress(BrokenPipeError):  # its end is seen where its answer is read
            while left:
                self._wait(stream, select.POLLOUT)
                left = left[os.write(stream.fileno(), left) :]

    def receive(self, most: int) -> Any:
        """A JSON value of at most so many bytes."""
        length = int.from_bytes(self._read(LENGTH_BYTES), "big")
        if length > most:
            raise ValueError(length)
        return json.loads(self._read(length).decode("utf-8", "surrogatepass"))

    def _read(self, count: int) -> bytes:
        stream, content = _open(self._popen.stdout), bytearray()
        while len(content) < count:
            self._wait(stream, select.POLLIN)
            if not (more := os.read(stream.fileno(), min(count - len(content), _MESSAGE_BYTES))):
                raise _EndedError(self._popen.wait())
            content += more
        return bytes(content)

    def _wait(self, stream: IO[bytes], event: int) -> None:
        """Waits for the process, and says so if it is stopped: nothing else would end the wait."""
        poll, seconds = select.poll(), _STOPPED_AFTER
        poll.register(stream, event)
        while not poll.poll(seconds * 1000):
            seconds = _STOPPED_EVERY
            if line := how_to_continue(self._popen.pid):
                logging.getLogger(__name__).warning("%s: its %s", self._named, line)


def _open(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if owner != os.getpid():
        return
    process.kill()
    for stream in (process.stdin, process.stdout):
        _open(stream).close()
    process.wait()


def _texts(content: Iterable[Any]) -> tuple[Rendered, ...]:
    """Checks that they are what they should be: what comes from the process is a stranger's."""
    texts = []
    for text, answers in content:
        within = tuple((start, end) for start, end in answers)
        if not isinstance(text, str) or not all(0 <= start <= end <= len(text) for start, end in within):
            raise ValueError(text)
        texts.append(Rendered(text, within))
    return tuple(texts)


def _packages(named: str) -> list[str]:
    """The folders of the packages that render, which the process finds by no other way."""
    specs = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
    places = [Path(spec.origin).parent.parent for spec in specs if spec is not None and spec.origin is not None]
    if len(places) < len(specs):  # torch brings them along, but some builds of torch leave them out
        raise ConfigError(f"{named}: needs the package jinja2: pip install jinja2")
    return [str(place.resolve()) for place in dict.fromkeys(places)]


def _check_version(named: str, version: str) -> None:
    numbers = re.findall(r"\d+", version)[:3]
    if tuple(map(int, numbers)) < _SAFE_JINJA:
        raise ConfigError(
            f"{named}: jinja2 {version} has holes through which a template could run code; pip install -U jinja2"
        )


def _size(count: int) -> str:
    return f"{count >> 30} GiB" if count >= 1 << 30 else f"{count >> 20} MiB"


def _shown(text: str) -> str:
    """A stranger's text in one line without control characters."""
    return "".join(each if each.isprintable() else "?" for each in " ".join(text.split())[:200])
