"""Opens the conversation files of a run. Each is encoded once for all splits and blends."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.data.cache import CachePlace, IndexCache, remove_leftovers
from megatron.data.remote import is_url
from megatron.data.sft.conversations import ConversationEncoder, Conversations, Say
from megatron.data.sources import Source, Sources
from megatron.errors import ConfigError, DataError, without_secrets

if TYPE_CHECKING:
    from megatron.config.sections.data import DataConfig


class ConversationSources(Sources):
    def __init__(self, config: "DataConfig", chat: ConversationEncoder, say: Say | None) -> None:
        super().__init__(config, vocab_size=None, eod_id=None, tokenizer_fingerprint=None)
        self._chat, self._say = chat, say
        self._notes: list[str] = []

    def prepare(self, prefixes: Sequence[str]) -> None:
        for prefix in filter(is_url, prefixes):
            raise ConfigError(
                f"--sft: {without_secrets(prefix)}: training reads local files; download the file to each node"
            )

    def _open(self, prefix: str) -> Source:
        if not Path(prefix).is_file():
            raise DataError(f"--sft: {prefix}: no such file; give a JSONL file of conversations")
        cache = IndexCache(CachePlace.of(self.config.data_cache_path, prefix, files=(prefix,)), self._say)
        remove_leftovers(cache.directory)
        data = Conversations(prefix, self._chat, cache, self._say)
        self._notes += [*cache.notes, *data.notes()]
        return Source(data, data.fingerprint, "")

    def notes(self) -> list[str]:
        return self._notes
