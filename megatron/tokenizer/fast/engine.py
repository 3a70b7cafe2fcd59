"""Wraps gigatoken: one document at a time, without special tokens."""

import json
import logging
from typing import Any

import numpy as np

from megatron.tokenizer.base import Ids
from megatron.tokenizer.fast.kinds import FastKind, NotFastError
from megatron.utils.process import resident_bytes

INSTALL = "pip install gigatoken"
# The library caches every word without limit. It is loaded again when the process has grown by this much.
CACHE_BYTES = 16 << 20
CHECK_BYTES = 1 << 20
# The same limit in bytes of text, for systems where the size of the process cannot be read.
REBUILD_BYTES = 1 << 28


class EnginePanicError(Exception):
    """Raised after the library panicked on a text and was rebuilt."""


class FastEngine:
    def __init__(self, kind: FastKind) -> None:
        try:
            from gigatoken import Tokenizer as GigaTokenizer
        except ImportError:
            raise NotFastError(f"the package gigatoken is not installed ({INSTALL}, about 40 times faster)") from None
        self._load = GigaTokenizer.from_json
        self._description = json.dumps(kind.description, ensure_ascii=False)
        self._growth = CACHE_BYTES
        self._build()

    def _build(self) -> None:
        try:
            self._library: Any = self._load(self._description)
        except Exception as error:  # the library raises plain Exception
            raise NotFastError(f"gigatoken cannot open this tokenizer ({str(error).splitlines()[0]})") from None
        self._encode = self._library.encode
        self._size = resident_bytes()
        self._since_check = self._since_build = 0

    def encode(self, data: bytes) -> Ids:
        """Returns the ids of one text in UTF-8. The library's working memory grows with the text."""
        self._since_check += len(data)
        if self._since_check > CHECK_BYTES:
            self._bound_memory()
        try:
            return self._encode(data).astype(np.int32)  # the library's arrays use four times the memory, or 4 KB more
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # the library's, which cannot be imported
                raise
            logging.getLogger(__name__).warning(
                "gigatoken failed on a text (%s); the tokenizers package encodes this text", error
            )
            self._build()
            raise EnginePanicError from None

    def _bound_memory(self) -> None:
        self._since_build += self._since_check
        self._since_check = 0
        size = resident_bytes()
        if size - self._size > self._growth or (not size and self._since_build > REBUILD_BYTES):
            del self._library, self._encode  # freed before the next one is built
            self._build()
            # If that freed little, other memory of the process has grown, so the next rebuild is delayed.
            freed = size - self._size
            self._growth = CACHE_BYTES if freed > CACHE_BYTES // 2 else 2 * self._growth
