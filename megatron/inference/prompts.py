"""Where prompts come from: arguments, a file of lines or JSON lines, or standard input."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.errors import ConfigError, DataError
from megatron.inference.answers import Prompt
from megatron.inference.generate import DEFAULT_NEW_TOKENS, room
from megatron.inference.texts import decoded, read_json_lines, read_text, text_of
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.base import refuse_surrogates

STDIN = "-"


@dataclass(frozen=True)
class Text:
    """A prompt as it was given, and its place for messages."""

    place: str
    text: str


def read_prompts(given: Sequence[str], file: str | None, json_key: str) -> list[Text]:
    if given:
        return [_checked(Text("--prompt", text)) for text in given]
    if file is None and sys.stdin.isatty():
        raise ConfigError(
            "--prompt: nothing to continue; give --prompt TEXT, --prompts FILE, or texts on standard input"
        )
    if file in (None, STDIN):
        return _lines(decoded(sys.stdin.buffer.read(), "standard input"), "standard input")
    path = Path(str(file))
    if path.suffix in (".jsonl", ".json"):
        entries = read_json_lines(path, flag="--prompts")
        return [Text(place, text_of(entry, json_key, place)) for place, entry in entries]
    return _lines(read_text(path, flag="--prompts"), str(path))


def _lines(text: str, name: str) -> list[Text]:
    lines = enumerate(text.removesuffix("\n").split("\n"), start=1)
    return [Text(f"{name} line {number}", line.removesuffix("\r")) for number, line in lines if line.strip()]


def _checked(prompt: Text) -> Text:
    try:
        refuse_surrogates(prompt.text)
    except DataError as error:
        raise DataError(f"{prompt.place}: {error}") from None
    return prompt


def encoded(
    texts: Sequence[Text],
    tokenizer: Tokenizer,
    *,
    beginning: Sequence[int] = (),
    positions: int | None,
    new_tokens: int | None,
    truncate: bool,
) -> list[Prompt]:
    """The prompts as tokens, after those of `beginning`, within the model's positions for prompt and continuation."""
    found = []
    left = None
    if truncate and positions is not None:
        left = max(1, positions - len(beginning) - (new_tokens or min(DEFAULT_NEW_TOKENS, positions // 2)))
    for one in texts:
        tokens = tokenizer.tokenize(one.text)
        if not tokens:
            raise DataError(f"{one.place}: an empty prompt has nothing to continue; give at least one token of text")
        tokens = [*beginning, *(tokens if left is None else tokens[-left:])]
        room(positions, len(tokens), new_tokens, place=one.place)
        found.append(Prompt(one.text, tuple(tokens)))
    return found
