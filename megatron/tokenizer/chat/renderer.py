"""Renders chat templates in a separate program, which `template.py` starts without any resources of the run.

A template comes with a model of another author, so it is untrusted. It is rendered in jinja2's sandbox and sees plain
JSON only. Its process has no files, sockets or environment. Its memory, CPU time and output are limited. It gets no
date, because the ids of a conversation must not depend on the day.

Standard input carries a frame with the setup, then frames with conversations. A frame is a length followed by JSON.
Standard output carries one frame per input frame.
"""

import json
import math
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import jinja2

# Mark the text of {% generation %} blocks. Unicode guarantees that these are never characters.
BEGIN, END = "\ufdd0", "\ufdd1"
MARKS = re.compile(f"[{BEGIN}{END}]")
ADDRESS = re.compile(r" at 0x[0-9a-f]+>")
MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

LENGTH_BYTES = 8
Texts = list[tuple[str, list[tuple[int, int]]]]
"""Texts, each with the character ranges [start, end) of the assistant's answers."""


class OutputLimitError(Exception):
    """Raised for output above its limit."""


class UnknownAnswerError(Exception):
    """Raised with the number (from 1) of an answer whose start in the text is unknown."""


class _Renderer:
    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._source = setup["source"]
        self._template = compiled(self._source)
        self._marked = MARKED.search(self._source) is not None
        self._names, self._ends, self._most = setup["names"], tuple(setup["ends"]), setup["output_bytes"]

    def answer(self, request: Mapping[str, Any]) -> Texts:
        """Returns the text of a prompt, or of a whole conversation with the ranges of its answers. There are several
        texts if the template renders an answer differently when later messages follow."""
        messages, tools = request["messages"], request["tools"]
        if request["prompt"]:
            return [self._without_marks(self._render(messages, tools, prompt=True))]
        whole = self._render(messages, tools)
        return [self._without_marks(whole)] if self._marked else self._answers_by_prefix(whole, messages, tools)

    def _render(self, messages: Sequence[Any], tools: Any, *, prompt: bool = False) -> str:
        values = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
        text = bounded(self._template.generate(**values, **self._names), self._most)
        if printed := set(ADDRESS.findall(text)):  # legitimate if it comes from a message
            given = f"{self._source}{json.dumps([messages, tools], ensure_ascii=False)}"
            if not printed.issubset(ADDRESS.findall(given)):
                raise ValueError("the template prints an object's address, which differs each time; add | list or ()")
        return text

    def _answers_by_prefix(self, whole: str, messages: Sequence[Any], tools: Any) -> Texts:
        """Finds each answer by rendering the conversation twice: before the answer, with the generation prompt, and up
        to the end of the answer. The answer is the difference. If later messages change the text up to an answer, it
        becomes a separate text."""
        texts: Texts = [(whole, [])]
        for place in reversed([i for i, message in enumerate(messages) if message["role"] == "assistant"]):
            before = self._render(messages[:place], tools, prompt=True)
            until = self._render(messages[: place + 1], tools) if place + 1 < len(messages) else whole
            if not until.startswith(before):
                raise UnknownAnswerError(place + 1)
            if not texts[-1][0].startswith(until):
                texts.append((until, []))
            texts[-1][1].append((len(before), self._end_of_turn(until, len(before), len(until))))
        return [(text, answers[::-1]) for text, answers in reversed(texts) if answers] or [(whole, [])]

    def _end_of_turn(self, text: str, start: int, end: int) -> int:
        """Returns the end of an answer, without white space that the template adds after the end-of-turn token. The
        model does not generate that white space."""
        stripped = start + len(text[start:end].rstrip())
        return stripped if text[start:stripped].endswith(self._ends) else end

    @staticmethod
    def _without_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
        text, answers, start = [], [], 0
        length = done = 0
        for found in MARKS.finditer(marked):
            text.append(marked[done : found.start()])
            length, done = length + found.start() - done, found.end()
            if found.group() == BEGIN:
                start = length
            elif length > start:
                answers.append((start, length))
        return "".join([*text, marked[done:]]), answers


def compiled(source: str) -> "jinja2.Template":
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def text(content: str, line: int) -> nodes.Node:
        return nodes.Output([nodes.TemplateData(content)]).set_lineno(line)

    class Answers(Extension):
        """Tags {% generation %} ... {% endgeneration %}, which enclose the assistant's text."""

        tags = {"generation"}  # noqa: RUF012  (of jinja2)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return [text(BEGIN, line), nodes.Scope(body).set_lineno(line), text(END, line)]

    def refuse(message: object) -> str:
        raise TemplateError(str(message))

    def refuse_random(*_: object, **__: object) -> str:
        raise TemplateError("random and lipsum give a different text each time; remove them")

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Answers, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.filters["random"] = environment.globals["lipsum"] = refuse_random
    return environment.from_string(source)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Writes JSON as in `transformers`; jinja2's own tojson escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def bounded(pieces: Iterable[str], most: int) -> str:
    """Joins the pieces; raises if the text exceeds `most` characters."""
    kept, length = [], 0
    for piece in pieces:
        length += len(piece)
        if length > most:
            raise OutputLimitError
        kept.append(piece)
    return "".join(kept)


def limited(kind: int, value: int, *, for_good: bool = True) -> bool:
    """Sets a limit of this process, permanently if `for_good`. Returns False if the system does not support such a
    limit."""
    _, most = resource.getrlimit(kind)
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    try:
        resource.setrlimit(kind, (value, value if for_good else most))
    except (ValueError, OSError):
        return False
    return True


def more_time(seconds: int) -> None:
    """Allows this much more CPU time. The system counts whole seconds since the process started."""
    limited(resource.RLIMIT_CPU, math.ceil(time.process_time()) + seconds, for_good=False)


def json_bytes(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def frame(content: bytes) -> bytes:
    return len(content).to_bytes(LENGTH_BYTES, "big") + content


def _whole_frame(stream: BinaryIO) -> bytes | None:
    return stream.read(int.from_bytes(length, "big")) if (length := stream.read(LENGTH_BYTES)) else None


def _parts(content: bytes) -> Iterable[bytes]:
    start = 0
    while start < len(content):
        end = start + LENGTH_BYTES + int.from_bytes(content[start : start + LENGTH_BYTES], "big")
        yield content[start + LENGTH_BYTES : end]
        start = end


def attempt(seconds: int, most: int, work: Callable[[], Any]) -> bytes:
    """Returns the result of `work` as JSON, or the reason why there is none."""
    more_time(seconds)
    try:
        answer = json_bytes(work())
        if len(answer) > most:
            raise OutputLimitError
        return answer
    except MemoryError:
        return _failure("memory")
    except RecursionError as error:
        return _failure("endless", type(error).__name__)
    except OutputLimitError:
        return _failure("output")
    except UnknownAnswerError as error:
        return _failure("unknown", str(error))
    except Exception as error:  # a template can raise any Python exception
        return _failure("refused", str(error)[:1000] or type(error).__name__)


def _failure(kind: str, why: str = "") -> bytes:
    return json_bytes({"error": kind, "why": why})


def _write(answer: bytes) -> None:
    sys.stdout.buffer.write(frame(answer))
    sys.stdout.buffer.flush()


def main() -> None:
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGXCPU])
    limited(resource.RLIMIT_CORE, 0)
    content = _whole_frame(sys.stdin.buffer)
    if content is None:
        return
    setup = json.loads(content.decode("utf-8", "surrogatepass"))
    attempted = partial(attempt, setup["cpu_seconds"], setup["output_bytes"])
    sys.path += setup["paths"]
    limits_memory = limited(resource.RLIMIT_AS, setup["memory_bytes"])
    renderer: _Renderer | None = None

    def start() -> dict[str, Any]:
        nonlocal renderer
        import jinja2

        renderer = _Renderer(setup)
        return {"jinja2": jinja2.__version__, "limits_memory": limits_memory}

    _write(attempted(start))
    while renderer is not None and (content := _whole_frame(sys.stdin.buffer)) is not None:
        for part in _parts(content):
            _write(attempted(partial(_answer, renderer, part)))


def _answer(renderer: _Renderer, request: bytes) -> Texts:
    return renderer.answer(json.loads(request.decode("utf-8", "surrogatepass")))


if __name__ == "__main__":
    try:
        main()
    except MemoryError:  # outside of an attempt: the request itself does not fit
        _write(_failure("memory"))
