"""Builds the fast encoder of a tokenizer where it is exact; otherwise logs the reason once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

from megatron.errors import ConfigError
from megatron.tokenizer.base import Ids
from megatron.tokenizer.fast.engine import EnginePanicError, FastEngine
from megatron.tokenizer.fast.fallback_texts import FallbackTexts
from megatron.tokenizer.fast.guard import GuardedEncoder
from megatron.tokenizer.fast.kinds import NotFastError, fast_kind
from megatron.tokenizer.fast.probe_texts import first_difference, probe_texts

Encoder = Literal["auto", "fast", "exact"]


def build_guarded(
    name: str,
    description: Callable[[], dict[str, Any]],
    exact: Callable[[str], Ids],
    *,
    encoder: Encoder,
    eod_token: str | None,
    announce: bool = True,
) -> GuardedEncoder | None:
    """The guarded fast encoder, or None to use the exact one. `description` is the tokenizer.json."""
    if encoder == "exact":
        return None
    try:
        return _build(description(), exact, eod_token)
    except NotFastError as reason:
        if encoder == "fast":
            raise ConfigError(f"--encoder fast: {name}: {reason}; give --encoder auto or exact") from None
        if announce:
            logging.getLogger(__name__).warning("%s: encoded by tokenizers, not by the fast encoder: %s", name, reason)
        return None


def _build(description: dict[str, Any], exact: Callable[[str], Ids], eod_token: str | None) -> GuardedEncoder:
    kind = fast_kind(description, eod_token)
    engine = FastEngine(kind)
    fallback = FallbackTexts(composes=kind.composes, cased=kind.cased, plain_tokens=kind.plain_tokens)
    fallback.prepare()
    vocab = kind.description["model"]["vocab"]
    try:
        text = first_difference(
            probe_texts(vocab),
            lambda text: engine.encode(text.encode("utf-8")),
            exact,
            lambda text: bool(fallback.find([text], [text.encode("utf-8")])),
        )
    except EnginePanicError:
        raise NotFastError("gigatoken gave up on one of the test texts") from None
    if text is not None:
        raise NotFastError(f"it differs on this vocabulary, as at {text[:60]!r}")
    return GuardedEncoder(engine, exact, fallback)
