"""Settings of a run, and the part of them that determines the tokens."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron.preprocess.input.files import InputFile, input_bytes
from megatron.preprocess.punkt import SentenceSplitter
from megatron.tokenizer import Tokenizer, TokenizerSettings

_SMALLEST, _LARGEST, _PARTS = 256 << 10, 8 << 20, 64


@dataclass(frozen=True, kw_only=True)
class PreprocessSettings:
    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer: TokenizerSettings
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    split_sentences: bool = False
    keep_newlines: bool = False
    language: str = "english"
    rank: int = 0
    world: int = 1
    dataset_impl: Literal["mmap", "lazy", "cached"] = "mmap"
    workers: int = 1
    chunk_size: int | None = None  # documents encoded at once; None: a batch
    log_interval: int | None = None  # documents between progress lines; None: 1000, and at most a line a second
    overwrite: bool = False
    resume: bool = False
    on_error: Literal["stop", "skip"] = "stop"
    max_skip_fraction: float = 1.0
    segment_bytes: int | None = None  # None: by the size of the input

    @property
    def prefix(self) -> str:
        """Output prefix of this partition."""
        if self.world == 1:
            return self.output_prefix
        width = max(3, len(str(self.world)))
        return f"{self.output_prefix}_part{self.rank:0{width}d}_of_{self.world:0{width}d}"

    @property
    def share(self) -> tuple[int, int]:
        return self.rank, self.world

    @property
    def outputs(self) -> list[str]:
        """Prefix of each key's dataset, in Megatron's scheme."""
        level = "sentence" if self.split_sentences else "document"
        return [f"{self.prefix}_{key}_{level}" for key in self.json_keys]

    @property
    def parameters_file(self) -> Path:
        """Parameters file of the sentence splitter, shared by all partitions."""
        return Path(f"{self.output_prefix}.sentences.json")

    def segment_size(self, sources: Sequence[InputFile]) -> int:
        """Bytes per segment: small enough for many workers and for a worker's memory."""
        return self.segment_bytes or min(max(input_bytes(sources) // _PARTS, _SMALLEST), _LARGEST)

    def deciding(
        self, sources: Sequence[InputFile], tokenizer: Tokenizer, splitter: SentenceSplitter | None
    ) -> dict[str, Any]:
        """Returns everything that determines the tokens and the segments, by the names that messages use."""
        return {
            "inputs": [source.identity for source in sources],
            "--json-keys": list(self.json_keys),
            "--append-eod": self.append_eod,
            "the tokenizer": f"{tokenizer.name} {tokenizer.fingerprint}",
            "--split-sentences": self.split_sentences,
            "--keep-newlines": self.keep_newlines,
            "--lang": self.language if self.split_sentences else None,
            "the sentence splitter": splitter.fingerprint if splitter else None,
            "--rank": self.rank,
            "--world": self.world,
            "the size of a segment": self.segment_size(sources),
            "the version of the work folder": 1,
        }

    def partition(self, deciding: dict[str, Any], sources: Sequence[InputFile]) -> dict[str, Any]:
        """Returns the record of a partition, by which a merge checks that all partitions belong to one run."""
        own = ("--rank", "--world", "inputs")
        files = [[Path(source.path).name, source.size] for source in sources]
        return {
            "rank": self.rank,
            "world": self.world,
            "inputs": digest_of({"files": files}),  # paths may differ between machines
            "settings": digest_of({name: value for name, value in deciding.items() if name not in own}),
            "whole": digest_of({**deciding, "--rank": 0, "--world": 1}),  # "settings" of the unpartitioned run
        }


def digest_of(deciding: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()
