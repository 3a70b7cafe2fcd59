"""A chat template, rendered by a separate process (`renderer.py`) with limits.

The template comes with a model of another author, so it may loop or exhaust the memory.
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

_SAFE_JINJA = (3, 1, 6)  # older versions have known security holes
_MESSAGE_BYTES = 1 << 20  # requests that are sent together
_STOPPED_AFTER, _STOPPED_EVERY = 5.0, 30.0  # seconds without an answer, after which a stopped process is reported

Message = Mapping[str, Any]


class ChatError(Exception):
    """Raised for a conversation that cannot be encoded. Callers that know its line convert it to a DataError."""

    ends = False
    """True if the template causes the error, so that other conversations would fail too."""


class LimitError(ChatError):
    """Raised if the template reaches a limit, or its process ends."""

    ends = True


@dataclass(frozen=True)
class Rendered:
    text: str
    answers: tuple[tuple[int, int], ...]
    """Character ranges [start, end) of the assistant's answers."""


@dataclass(frozen=True)
class Limits:
    """Limits of the rendering process. `output_bytes` and `cpu_seconds` apply per conversation."""

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
        """Stores the template. `named`: its name in messages. `special_tokens`: name that templates use (bos_token) ->
        text. `ends`: texts of all special tokens, each of which may end a turn."""
        self.source, self.named, self.limits = source, named, limits or Limits()
        self.marked = MARKED.search(source) is not None
        """True if the template marks the assistant's answers itself."""
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
        """Rejects a template that does not compile."""
        self._started()

    def close(self) -> None:
        """Ends the rendering process; a later call starts another one."""
        if self._process is not None:
            self._process.end()
        self._process = None

    def render(self, requests: Iterable[bytes]) -> Iterator[tuple[Rendered, ...] | ChatError]:
        """Yields the texts of each request, or an error. The next request is rendered while the caller uses a result.
        A `LimitError` ends the iteration."""
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
        self._process = None  # a concurrent rendering starts a separate process
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
            if left:  # otherwise a later request could receive the answer of an earlier one
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
            return LimitError(self._limit(f"takes more than {_size(self.limits.memory_bytes)} of memory"))
        if kind == "output":
            return LimitError(self._limit(f"writes more than {_size(self.limits.output_bytes)} for one conversation"))
        if kind == "endless":
            return LimitError(f"{self.named} recurses or nests too deeply ({_shown(why)}); correct the template")
        if kind == "unknown":
            return ChatError(
                f"{self.named} does not begin message {int(why)} with its own add_generation_prompt text, so the "
                "answer's start is unknown; put {% generation %} and {% endgeneration %} around the assistant's text"
            )
        return ChatError(f"{self.named} rejects the conversation ({_shown(why)})")

    def _no_text(self) -> str:
        return f"{self.named} makes its process return something other than text; use another template"

    def _limit(self, what: str) -> str:
        return f"{self.named} {what}, the limit for templates; correct the template, or use another one"

    def _end(self, code: int) -> str:
        if code == -signal.SIGXCPU:
            return self._limit(f"takes more than {self.limits.cpu_seconds} s of CPU time for one conversation")
        if code == -signal.SIGKILL:
            return (
                f"{self.named}: its rendering process was killed (out of memory?); free some "
                "memory, or correct the template"
            )
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"{self.named}: its rendering process ended ({how}); correct the template, or use another one"

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
                "%s: this system cannot limit the memory of the rendering process (RLIMIT_AS); CPU time and output "
                "are limited",
                self.named,
            )
        self._process = process
        return process

    def _not_a_template(self, kind: str, why: str) -> str:
        if kind == "refused":
            return (
                f"{self.named}: not a chat template ({_shown(why)}); correct the file, or give "
                "another --tokenizer-model"
            )
        return str(self._error(kind, why))


def request(messages: Sequence[Message], tools: Sequence[Any] | None = None, *, prompt: bool = False) -> bytes:
    """Encodes a request to render a conversation; with `prompt`, followed by the prompt to answer it."""
    try:
        content = json_bytes({"messages": list(messages), "tools": tools, "prompt": prompt})
    except RecursionError:
        raise ChatError("the conversation is nested too deeply; flatten it") from None
    if MARKS.search(content.decode("utf-8", "surrogatepass")):
        raise ChatError("the conversation contains U+FDD0 or U+FDD1, which are noncharacters of Unicode; remove them")
    return content


class _EndedError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class _Process:
    """Rendering process. It inherits no files, sockets, environment, terminal or working directory."""

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
                start_new_session=True,  # the terminal's signals are for this process, which ends the other one
            )
        except OSError as error:
            raise ConfigError(
                f"{named}: its rendering process could not be started ({error}); free memory, or allow more processes"
            ) from None
        self._named, self._owner = named, os.getpid()
        os.set_blocking(_open(self._popen.stdin).fileno(), False)  # partial writes; `send` waits for the rest
        self.end = weakref.finalize(self, _end, self._popen, self._owner)
        self.send(json_bytes(setup))

    @property
    def usable(self) -> bool:
        """True if the rendering process runs and this process started it. A fork of this process inherits the pipes,
        but must not use them."""
        return self._owner == os.getpid() and self._popen.poll() is None

    def send(self, content: bytes) -> None:
        stream, left = _open(self._popen.stdin), memoryview(frame(content))
        with suppress(BrokenPipeError):  # reading the answer detects that the process has ended
            while left:
                self._wait(stream, select.POLLOUT)
                left = left[os.write(stream.fileno(), left) :]

    def receive(self, most: int) -> Any:
        """Receives a JSON value of at most `most` bytes."""
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
        """Waits for the process, and warns if it is stopped, because the wait has no timeout."""
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
    """Checks the texts that the template's process sent, because a template is untrusted code. Raises ValueError on an
    invalid one."""
    texts = []
    for text, answers in content:
        within = tuple((start, end) for start, end in answers)
        if not isinstance(text, str) or not all(0 <= start <= end <= len(text) for start, end in within):
            raise ValueError(text)
        texts.append(Rendered(text, within))
    return tuple(texts)


def _packages(named: str) -> list[str]:
    """Returns the folders of jinja2 and its dependency, which the isolated process cannot find otherwise."""
    specs = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
    places = [Path(spec.origin).parent.parent for spec in specs if spec is not None and spec.origin is not None]
    if len(places) < len(specs):  # torch depends on them, but some builds of torch leave them out
        raise ConfigError(f"{named}: needs the package jinja2: pip install jinja2")
    return [str(place.resolve()) for place in dict.fromkeys(places)]


def _check_version(named: str, version: str) -> None:
    numbers = re.findall(r"\d+", version)[:3]
    if tuple(map(int, numbers)) < _SAFE_JINJA:
        raise ConfigError(
            f"{named}: the sandbox of jinja2 {version} has holes that let a template run code; pip install -U jinja2"
        )


def _size(count: int) -> str:
    return f"{count >> 30} GiB" if count >= 1 << 30 else f"{count >> 20} MiB"


def _shown(text: str) -> str:
    """Returns untrusted text as one line without control characters."""
    return "".join(each if each.isprintable() else "?" for each in " ".join(text.split())[:200])
