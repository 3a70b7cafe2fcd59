"""The fast encoder for a tokenizer, if there is one that is exact; otherwise the reason, said once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

from megatron.errors import ConfigError
from megatron.tokenizer.base import Ids
from megatron.tokenizer.battery import battery, first_difference
from megatron.tokenizer.doubtful import DoubtfulTexts
from megatron.tokenizer.fast_engine import EnginePanicError, FastEngine
from megatron.tokenizer.fast_kinds import NotFastError, fast_kind
from megatron.tokenizer.guard import GuardedEncoder

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
    """None: encode with the exact one. `description` is the tokenizer.json."""
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
    doubtful = DoubtfulTexts(composes=kind.composes, cased=kind.cased, plain_tokens=kind.plain_tokens)
    doubtful.prepare()
    vocab = kind.description["model"]["vocab"]
    try:
        text = first_difference(
            battery(vocab),
            lambda text: engine.encode(text.encode("utf-8")),
            exact,
            lambda text: bool(doubtful.find([text], [text.encode("utf-8")])),
        )
    except EnginePanicError:
        raise NotFastError("gigatoken gave up on one of the test texts") from None
    if text is not None:
        raise NotFastError(f"it differs on this vocabulary, as at {text[:60]!r}")
    return GuardedEncoder(engine, exact, doubtful)
