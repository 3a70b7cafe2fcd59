"""Conversations of one file as token ids. One process encodes them at the first start; then all processes map them."""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron.data.cache import Arrays, IndexCache
from megatron.data.indexed.files import array_bytes
from megatron.data.sft.messages import Conversation, read_conversations, wrong_line
from megatron.errors import DataError

_SAID_EVERY = 10.0  # seconds
Say = Callable[[str], None]


class ConversationEncoder(Protocol):
    """Encoder of conversations by a chat template, such as `megatron.tokenizer.chat`."""

    @property
    def fingerprint(self) -> str:
        """Hash of everything that decides the ids and which of them count in the loss."""

    def encode_all(
        self, conversations: Iterable[tuple[Sequence[Mapping[str, Any]], Sequence[Any] | None]]
    ) -> Iterator[Sequence[tuple[np.ndarray, np.ndarray]] | Exception]:
        """Yields a list of pairs for each conversation (messages, tools): ids, int32 [n], and a bool [n] that is True
        if the prediction from an id belongs to an answer. There are several pairs if the template renders an answer
        differently when later messages follow. An exception replaces a conversation that cannot be encoded. The others
        follow, unless they would fail too."""


class Conversations:
    """Conversations of a file: number i is tokens[starts[i]:starts[i + 1]]. Those without an answer are left out."""

    def __init__(self, path: str, chat: ConversationEncoder, cache: IndexCache, say: Say | None = None) -> None:
        self.prefix = path
        self.fingerprint = _digest(Path(path), chat)
        description = {"kind": "Conversations", "of": self.fingerprint}
        arrays = cache.load_or_build(description, lambda: _encoded(Path(path), chat, say))
        self.tokens, self.counted, self.starts = arrays["tokens"], arrays["counted"], arrays["starts"]
        self.lines, self.silent = arrays["lines"], arrays["silent"].tolist()
        self._apart = int(arrays["apart"][0]) if "apart" in arrays else 0
        self.sequence_lengths = np.diff(self.starts)
        if not len(self):
            raise DataError(f"{path}: no conversation has an answer of the assistant; give a file with answers")

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    @property
    def num_documents(self) -> int:
        return len(self)

    def sampled(self, blocks: int) -> str:
        """Digest that ranks compare. The file was read whole, so it needs no samples."""
        return self.fingerprint

    def notes(self) -> list[str]:
        notes = []
        if self._apart:
            added = "sample was added, which ends" if self._apart == 1 else "samples were added, which end"
            notes.append(
                f"{self.prefix}: {self._apart:,} {added} at an earlier answer, because the chat "
                "template renders that answer differently when later messages follow (such as without its reasoning)"
            )
        if self.silent:
            many = "conversation has" if len(self.silent) == 1 else "conversations have"
            notes.append(
                f"{self.prefix}: left out: {len(self.silent)} {many} no answer of the assistant to learn from "
                f"(line {self.silent[0]}{' and others' if len(self.silent) > 1 else ''})"
            )
        return notes


def _digest(path: Path, chat: ConversationEncoder) -> str:
    with path.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(f"{content} {chat.fingerprint}".encode()).hexdigest()


def _encoded(path: Path, chat: ConversationEncoder, say: Say | None) -> Arrays:
    began = said = time.monotonic()
    tokens, counted = bytearray(), bytearray()  # a list of millions of small arrays takes several times the memory
    lengths, lines, silent = [], [], []
    apart = 0
    wrong: list[tuple[int, DataError]] = []  # by place among the conversations
    given: deque[tuple[int, Conversation]] = deque()  # conversations that the encoder has read ahead

    def readable() -> Iterator[tuple[Sequence[Mapping[str, Any]], Sequence[Any] | None]]:
        for place, conversation in enumerate(read_conversations(path)):
            if isinstance(conversation, DataError):
                wrong.append((place, conversation))
            else:
                given.append((place, conversation))
                yield conversation.messages, conversation.tools

    for encoded in chat.encode_all(readable()):
        place, conversation = given.popleft()
        if isinstance(encoded, Exception):
            wrong.append((place, wrong_line(path, conversation.line, str(encoded))))
            continue
        taught = [(ids, counts) for ids, counts in encoded if conversation.answered and counts.any()]
        if not taught:
            silent.append(conversation.line)
            continue
        apart += len(taught) - 1
        for ids, counts in taught:
            tokens += array_bytes(ids.astype(np.int32, copy=False))
            counted += array_bytes(counts.astype(np.bool_, copy=False))
            lengths.append(len(ids))
            lines.append(conversation.line)
        if say is not None and time.monotonic() - said > _SAID_EVERY:
            said = time.monotonic()
            say(f"data: {path}: {len(lengths):,} conversations encoded in {said - began:.0f} s ...")
    if wrong:
        others = f" ({len(wrong) - 1:,} others have errors too)" if len(wrong) > 1 else ""
        raise DataError(f"{min(wrong, key=lambda found: found[0])[1]}{others}")
    return {
        "tokens": np.frombuffer(tokens, dtype=np.int32),
        "counted": np.frombuffer(counted, dtype=np.bool_),
        "starts": np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
        "lines": np.array(lines, dtype=np.int64),
        "silent": np.array(silent, dtype=np.int64),
        "apart": np.array([apart], dtype=np.int64),
    }
