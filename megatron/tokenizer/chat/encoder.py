"""Encodes conversations to ids with a Hugging Face tokenizer and the chat template beside it.

The ids and the mask of answers equal those of `apply_chat_template(messages, return_assistant_tokens_mask=True)` of
`transformers`, which is not used. Two differences are intended. Text of a message or tool that spells a special token
is rejected, because it could forge the end of a turn or a turn of another role. If the last character of an answer
takes several tokens, all of them count.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from megatron.errors import ConfigError
from megatron.tokenizer.base import Ids, library_errors
from megatron.tokenizer.bpe_files import read_text
from megatron.tokenizer.chat.formats import FORMATS
from megatron.tokenizer.chat.template import ChatError, ChatTemplate, Message, Rendered, request
from megatron.tokenizer.huggingface import SETTING, find_json, load_spelling, named_tokens, read_json, refuse_outside

_FLAG = "--sft-tokenizer-prompt-format"
_BATCH = 64  # conversations per message to the rendering process
_VERSION = 1  # of the rule that marks answers; a new version makes all conversations be encoded again


class ChatEncoder:
    def __init__(self, tokenizer_model: str | Path, prompt_format: str, eod_id: int | None) -> None:
        self._json_file = find_json(Path(tokenizer_model))
        self._description = read_json(self._json_file)
        self._eod_id = eod_id
        self.format, self._form = prompt_format, FORMATS[prompt_format]
        self._names = named_tokens(self._json_file)
        listed = {token["content"] for token in self._added()}
        self._unlisted = [
            name for name in dict.fromkeys(self._names.values()) if name not in listed and self._has(name)
        ]
        named = {*self._names.values()}  # some files list their eos as an ordinary added token
        listed_special = [token for token in self._added() if token.get("special") or token["content"] in named]
        self._special = [*(token["content"] for token in listed_special), *self._unlisted]
        self._normalized = [token["content"] for token in listed_special if token.get("normalized")]
        self.template = self._template()

    def check(self) -> None:
        """Rejects a template that does not compile."""
        self.template.check()
        self.template.close()

    def _added(self) -> list[dict[str, Any]]:
        return self._description.get("added_tokens") or []

    def _template(self) -> ChatTemplate:
        folder, names = self._json_file.parent, self._names
        source, named = self._form.template, f"{_FLAG} {self.format}"
        if source is None:
            source, path = _own_template(folder)
            named = f"the chat template in {path}"
        missing = [token for token in self._form.tokens if not self._has(token)]
        if missing:
            raise ConfigError(
                f"{_FLAG} {self.format}: {SETTING} {folder} has no token {missing[0]}; use {_FLAG} default, the "
                "tokenizer's own chat template"
            )
        if self._form.ends_with_eod and self._eod_id is None:
            raise ConfigError(
                f"{_FLAG} {self.format}: ends a conversation with the end-of-document token, but {SETTING} {folder} "
                f"names none; add eos_token to its tokenizer_config.json, or use {_FLAG} default"
            )
        return ChatTemplate(
            source, named=named, special_tokens=names, ends=[*filter(None, [*self._special, *names.values()])]
        )

    def _has(self, token: str) -> bool:
        vocabulary = (self._description.get("model") or {}).get("vocab") or ()
        entries = [entry[0] for entry in vocabulary] if isinstance(vocabulary, list) else vocabulary
        return any(each["content"] == token for each in self._added()) or token in entries

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that determines the ids and which of them count in the loss."""
        identity = {
            "version": _VERSION,
            "tokenizer": {name: value for name, value in self._description.items() if name != "version"},
            "template": self.template.source,
            "names": self._names,
            "eod": self._eod_id if self._form.ends_with_eod else None,
        }
        if self._unlisted:
            identity["unlisted"] = self._unlisted
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    @cached_property
    def _rust(self) -> Any:
        """Separate tokenizer that converts text that spells a special token to that token, because templates write
        special tokens as text. Its offsets include white space, even if the file trims it."""
        from tokenizers.processors import ByteLevel

        rust = load_spelling(self._json_file)
        rust.post_processor = ByteLevel(trim_offsets=False)  # sufficient, because no tokens are added
        return rust

    @cached_property
    def _searches(self) -> list[tuple[str, Callable[[str], str], re.Pattern[str]]]:
        """Searches for special tokens: in the text, and for `normalized` ones also in the normalized text."""
        searches: list[tuple[str, Callable[[str], str], list[str]]] = [("", str, self._special)]
        if normalizer := self._rust.normalizer:
            made = list(filter(None, map(normalizer.normalize_str, self._normalized)))
            searches.append((" (as the tokenizer normalizes it)", normalizer.normalize_str, made))
        return [(how, read, re.compile("|".join(map(re.escape, made)))) for how, read, made in searches if made]

    def encode_all(
        self, conversations: Iterable[tuple[Sequence[Message], Sequence[Any] | None]]
    ) -> Iterator[list[tuple[Ids, np.ndarray]] | ChatError]:
        """Yields a list of pairs for each conversation (messages, tools): ids, int32 [n], and a bool [n] that is True
        if the prediction from an id belongs to an answer. There are several pairs if the template renders an answer
        differently when later messages follow. Each pair then has the text that the model sees at that answer. A
        ChatError replaces a conversation that cannot be encoded. A LimitError ends the iteration."""
        left = iter(conversations)
        try:
            while batch := list(islice(left, _BATCH)):
                for rendered in self._rendered(batch):
                    yield self._encoded_or_why(rendered)
                    if isinstance(rendered, ChatError) and rendered.ends:
                        return
        finally:
            self.template.close()

    def _rendered(
        self, batch: Sequence[tuple[Sequence[Message], Sequence[Any] | None]]
    ) -> Iterator[tuple[Rendered, ...] | ChatError]:
        requests = [self._request_or_why(messages, tools) for messages, tools in batch]
        found = self.template.render([each for each in requests if isinstance(each, bytes)])
        for each in requests:
            yield next(found) if isinstance(each, bytes) else each

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> tuple[str, list[int]]:
        """Returns the text and ids of a conversation, followed by the prompt to answer it."""
        (found,) = self.template.render([self._request(messages, tools, prompt=True)])
        if isinstance(found, ChatError):
            raise found
        text = found[0].text + self._form.before_answer
        with library_errors(lambda reason: ChatError(f"the tokenizer fails on the conversation ({reason})")):
            return text, list(self._rust.encode(text, add_special_tokens=False).ids)

    def _request_or_why(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> bytes | ChatError:
        try:
            return self._request(messages, tools)
        except ChatError as error:
            return error

    def _request(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, prompt: bool = False) -> bytes:
        plain = [{name: value for name, value in message.items() if value is not None} for message in messages]
        if not self._form.spells_tokens:
            for kind, values in (("message", plain), ("tool", tools or ())):
                for number, value in enumerate(values, start=1):
                    self._refuse_special_text(f"{kind} {number}", value)
        return request(plain, tools, prompt=prompt)

    def _encoded_or_why(self, rendered: tuple[Rendered, ...] | ChatError) -> list[tuple[Ids, np.ndarray]] | ChatError:
        try:
            return rendered if isinstance(rendered, ChatError) else [self._encoded(each) for each in rendered]
        except ChatError as error:
            return error

    def _encoded(self, rendered: Rendered) -> tuple[Ids, np.ndarray]:
        with library_errors(lambda reason: ChatError(f"the tokenizer fails on the conversation ({reason})")):
            encoding = self._rust.encode(rendered.text, add_special_tokens=False)
        ids, answers = np.array(encoding.ids, dtype=np.int32), np.zeros(len(encoding.ids), dtype=bool)
        starts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        # Binary search, because a template may mark a million answers and this process has no limits.
        starts, ends = np.minimum.accumulate(starts[::-1])[::-1], np.maximum.accumulate(ends)
        for start, end in rendered.answers:
            answers[ends.searchsorted(start, "right") : starts.searchsorted(end)] = True  # tokens on the edges too
        if self._form.ends_with_eod and len(ids) and ids[-1] != self._eod_id:
            ids, answers = np.append(ids, np.int32(self._eod_id or 0)), np.append(answers, True)
        return ids, np.append(answers[1:], False)

    def _refuse_special_text(self, named: str, value: Any) -> None:
        for text in _texts(value):
            for how, read, tokens in self._searches:
                with library_errors(lambda reason: ChatError(f"the tokenizer fails on {named} ({reason})")):
                    found = tokens.search(read(text))
                if found:
                    raise ChatError(
                        f"{named} holds the text {found.group()!r}{how}, which is a special token that could end or "
                        "begin a turn; remove it from the text"
                    )


def _texts(value: Any) -> Iterator[str]:
    """Yields all texts in a JSON value and the names of fields, because templates also write names of tool calls."""
    left = [value]  # no recursion, because a value may be nested as deeply as the JSON reader allows
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            left += [part for item in each.items() for part in item]
        elif isinstance(each, Sequence):
            left += each


def _own_template(folder: Path) -> tuple[str, Path]:
    path, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if path.is_file():
        refuse_outside(folder, path)
        return read_text(path, SETTING), path
    given = read_json(settings).get("chat_template") if settings.is_file() else None
    if isinstance(given, list):  # several by name
        found = [each.get("template") for each in given if isinstance(each, dict) and each.get("name") == "default"]
        given = found[-1] if found else None
    if not isinstance(given, str):
        raise ConfigError(
            f"{SETTING} {folder}: has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json); add the template with which the model will be used"
        )
    return given, settings
