"""Reads prompts from arguments, a file of lines or JSON lines, or standard input."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.data.sft.messages import read_conversations
from megatron.errors import ConfigError, DataError, MegatronError
from megatron.inference.answers import Prompt
from megatron.inference.generate import DEFAULT_NEW_TOKENS, room
from megatron.inference.texts import decode_text, read_json_lines, read_nonempty_text, text_under
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.base import refuse_surrogates
from megatron.tokenizer.chat.encoder import ChatEncoder
from megatron.tokenizer.chat.template import ChatError

STDIN = "-"


FLAG = "--prompt"


@dataclass(frozen=True)
class Text:
    """Prompt text, and its place for messages."""

    place: str
    text: str


@dataclass(frozen=True)
class Chat:
    """Conversation to answer, and its place for messages."""

    place: str
    messages: tuple[Mapping[str, Any], ...]
    tools: Sequence[Any] | None


def read_prompts(given: Sequence[str], file: str | None, json_key: str) -> list[Text]:
    """Reads texts of arguments, lines or JSON lines."""
    if given:
        return [_checked(Text(FLAG, text)) for text in given]
    if file is None and sys.stdin.isatty():
        raise ConfigError(
            "--prompt: nothing to continue; give --prompt TEXT, --prompts FILE, or texts on standard input"
        )
    if file in (None, STDIN):
        return _lines(decode_text(sys.stdin.buffer.read(), "standard input"), "standard input")
    path = Path(str(file))
    if path.suffix in (".jsonl", ".json"):
        entries = read_json_lines(path, flag="--prompts")
        return [Text(place, text_under(entry, json_key, place)) for place, entry in entries]
    return _lines(read_nonempty_text(path, flag="--prompts"), str(path))


def read_chats(given: Sequence[str], file: str | None) -> list[Chat]:
    """Reads conversations of JSON lines. The text of an argument or a plain line becomes a user message."""
    if given or file is None or not file.endswith((".jsonl", ".json")):
        texts = read_prompts(given, file, "")
        return [Chat(one.place, ({"role": "user", "content": one.text},), None) for one in texts]
    read_nonempty_text(Path(file), flag="--prompts")  # for its errors
    chats = []
    for conversation in read_conversations(Path(file)):
        if isinstance(conversation, DataError):
            raise conversation
        place = f"{file} line {conversation.line}"
        if conversation.messages[-1]["role"] == "assistant":
            raise DataError(f"{place}: ends with an answer of the assistant; remove its last message")
        chats.append(Chat(place, tuple(conversation.messages), conversation.tools))
    return chats


def _lines(text: str, name: str) -> list[Text]:
    lines = enumerate(text.removesuffix("\n").split("\n"), start=1)
    return [Text(f"{name} line {number}", line.removesuffix("\r")) for number, line in lines if line.strip()]


def _wrong(place: str, why: object) -> MegatronError:
    """Returns a ConfigError for an argument, a DataError for a line of a file."""
    return (ConfigError if place == FLAG else DataError)(f"{place}: {why}")


def _checked(prompt: Text) -> Text:
    try:
        refuse_surrogates(prompt.text)
    except DataError as error:
        raise _wrong(prompt.place, error) from None
    return prompt


def encode_prompts(
    texts: Sequence[Text],
    tokenizer: Tokenizer,
    *,
    beginning: Sequence[int] = (),
    positions: int | None,
    new_tokens: int | None,
    truncate: bool,
    special: bool = False,
) -> list[Prompt]:
    """Encodes prompts after the tokens of `beginning`. Checks that prompt and continuation fit the model's positions.
    With `special`, text that spells a special token becomes that token."""
    found = []
    left = None
    if truncate and positions is not None:
        left = max(1, positions - len(beginning) - (new_tokens or min(DEFAULT_NEW_TOKENS, positions // 2)))
    for one in texts:
        tokens = tokenizer.tokenize_special(one.text) if special else tokenizer.tokenize(one.text)
        if not tokens and not beginning:
            raise _wrong(one.place, "an empty prompt cannot be continued; give at least one token of text")
        tokens = [*beginning, *(tokens if left is None else tokens[-left:])]
        room(positions, len(tokens), new_tokens, place=one.place)
        found.append(Prompt(one.text, tuple(tokens)))
    return found


def encoded_chats(
    chats: Sequence[Chat], encoder: ChatEncoder, *, positions: int | None, new_tokens: int | None
) -> list[Prompt]:
    """Encodes conversations, each with the prompt to answer it. The template writes any beginning-of-text token."""
    found = []
    for one in chats:
        try:
            text, tokens = encoder.prompt(one.messages, one.tools)
        except ChatError as error:
            raise _wrong(one.place, error) from None
        if not tokens:
            raise _wrong(one.place, "the chat template gives an empty text; use another template")
        room(positions, len(tokens), new_tokens, place=one.place, shorter="shorten the conversation")
        found.append(Prompt(text, tuple(tokens)))
    encoder.template.close()
    return found
