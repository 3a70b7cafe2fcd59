"""Renders a conversation with a chat template, and finds the assistant's answers in the text.

A template comes with a model that somebody else made, so it is rendered in jinja2's sandbox, and sees plain JSON only.
It is told no date: the ids of a conversation must not depend on the day.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron.errors import ConfigError

# Around the text of {% generation %} blocks. Unicode promises that these are never characters.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"[{_BEGIN}{_END}]")
_MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_SAFE_JINJA = (3, 1, 6)  # older sandboxes have known holes

Message = Mapping[str, Any]


class ChatError(Exception):
    """Why this conversation cannot be encoded. Whoever knows its place makes a DataError of it."""


@dataclass(frozen=True)
class Rendered:
    text: str
    answers: tuple[tuple[int, int], ...]
    """Of the assistant: characters start <= i < end of the text."""


class ChatTemplate:
    def __init__(self, source: str, *, named: str, special_tokens: Mapping[str, str], ends: Sequence[str]) -> None:
        """`named`: the template's place, for messages. `special_tokens`: by the names that templates use (bos_token).
        `ends`: the texts of all special tokens; one of them ends a turn."""
        self.source, self.named, self._ends = source, named, tuple(ends)
        self._names = dict(special_tokens)
        self.marked = _MARKED.search(source) is not None
        """Whether the template itself says what the assistant's answers are."""

    @cached_property
    def _compiled(self) -> jinja2.Template:
        _check_version()
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Answers, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        try:
            return environment.from_string(self.source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ConfigError(
                f"{self.named}: not a chat template ({error}); correct it, or give another --tokenizer-model"
            ) from None

    def check(self) -> None:
        """Refuses a template that cannot be compiled."""
        assert self._compiled is not None

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> tuple[Rendered, ...]:
        """One text, or several if the template shows an answer in another way once more is said."""
        if _MARKS.search(json.dumps([list(messages), tools], ensure_ascii=False)):
            raise ChatError("its text holds U+FDD0 or U+FDD1, which Unicode keeps free of meaning; remove it")
        whole = self._render(messages, tools)
        if self.marked:
            return (_without_marks(whole),)
        return self._answers_by_prefix(whole, messages, tools)

    def _answers_by_prefix(
        self, whole: str, messages: Sequence[Message], tools: Sequence[Any] | None
    ) -> tuple[Rendered, ...]:
        """An answer begins where the conversation before it, with the prompt to answer, ends; and it ends where the
        conversation with it ends. That is a text of its own unless the conversation goes on from it."""
        texts: list[tuple[str, list[tuple[int, int]]]] = [(whole, [])]
        for place in reversed([i for i, message in enumerate(messages) if message["role"] == "assistant"]):
            before = self._render(messages[:place], tools, prompt=True)
            until = self._render(messages[: place + 1], tools) if place + 1 < len(messages) else whole
            if not until.startswith(before):
                raise ChatError(
                    f"{self.named} does not begin message {place + 1} with its own prompt to answer "
                    "(add_generation_prompt), so where the answer begins is not known; put {% generation %} and "
                    "{% endgeneration %} around the assistant's text in the template"
                )
            if not texts[-1][0].startswith(until):
                texts.append((until, []))
            texts[-1][1].append((len(before), self._end_of_turn(until, len(before), len(until))))
        answered = [Rendered(text, tuple(reversed(answers))) for text, answers in reversed(texts) if answers]
        return tuple(answered) or (Rendered(whole, ()),)

    def _end_of_turn(self, text: str, start: int, end: int) -> int:
        """The end of an answer, without the white space that a template puts after the end-of-turn token: the model
        does not generate that."""
        stripped = start + len(text[start:end].rstrip())
        return stripped if text[start:stripped].endswith(self._ends) else end

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, prompt: bool = False) -> str:
        try:
            return self._compiled.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **self._names
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise ChatError(f"{self.named} refuses it ({' '.join(str(error).split())[:200]})") from None
        except (RecursionError, MemoryError) as error:
            raise ChatError(f"{self.named} does not end ({type(error).__name__})") from None


class _Answers(Extension):
    """{% generation %} ... {% endgeneration %}, around what the assistant has generated."""

    tags = {"generation"}  # noqa: RUF012  (of jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [_text(_BEGIN, line), nodes.Scope(body).set_lineno(line), _text(_END, line)]


def _text(text: str, line: int) -> nodes.Node:
    return nodes.Output([nodes.TemplateData(text)]).set_lineno(line)


def _without_marks(marked: str) -> Rendered:
    text, answers, start = [], [], 0
    length = done = 0
    for found in _MARKS.finditer(marked):
        text.append(marked[done : found.start()])
        length, done = length + found.start() - done, found.end()
        if found.group() == _BEGIN:
            start = length
        elif length > start:
            answers.append((start, length))
    return Rendered("".join([*text, marked[done:]]), tuple(answers))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As `transformers` has it: jinja2's own escapes what HTML would read."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: object) -> str:
    raise jinja2.TemplateError(str(message))


def _check_version() -> None:
    numbers = re.findall(r"\d+", jinja2.__version__)[:3]
    if tuple(map(int, numbers)) < _SAFE_JINJA:
        raise ConfigError(
            f"--sft: jinja2 {jinja2.__version__} has holes through which a chat template could run code; "
            "pip install -U jinja2"
        )
