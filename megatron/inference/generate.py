"""Continues prompts one token at a time, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.errors import ConfigError
from megatron.inference.sampling import Sampling
from megatron.model import GPT

DEFAULT_NEW_TOKENS = 64


@dataclass(frozen=True)
class Continuation:
    """The continuation of one prompt. `ended`: by the end-of-document token, which is not part of it."""

    tokens: tuple[int, ...]
    ended: bool


@torch.inference_mode()
def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | None = None,
    sampling: Sampling | None = None,
    eod_id: int | None = None,
) -> list[Continuation]:
    """One continuation per prompt.

    Prompts of different lengths are processed together without padding: a row is fed its prompt's tokens until they
    end, and rows do not affect each other.
    """
    sampling = sampling or Sampling(greedy=True)
    count = new_token_count(model, prompts, max_new_tokens)
    rows = _Rows(prompts, count, eod_id, next(model.parameters()).device)
    cache = model.make_cache(len(prompts), rows.longest)
    generators = sampling.generators(len(prompts))
    training = model.training
    model.eval()
    try:
        new = rows.tokens[:, : rows.shortest]  # [batch, first tokens of every prompt]
        for position in range(rows.shortest, rows.longest):
            logits = model(new, cache=cache)[:, -1]  # [batch, vocabulary]
            open_rows = rows.open_at(position)
            if open_rows:
                chosen = sampling.choose(logits[open_rows], [generators[row] for row in open_rows])
                rows.place(position, open_rows, chosen)
            new = rows.tokens[:, position].unsqueeze(1)  # [batch, 1]
            if rows.finished:
                break
    finally:
        model.train(training)
    return rows.continuations()


def new_token_count(model: GPT, prompts: Sequence[Sequence[int]], asked: int | None) -> int:
    """The number of tokens to add; a number that the model has no room for is refused."""
    if not prompts or any(not prompt for prompt in prompts):
        raise ConfigError("--prompt: an empty prompt has nothing to continue; give at least one token of text")
    if asked is not None and asked < 1:
        raise ConfigError(f"--max-new-tokens {asked}: must be at least 1")
    longest = max(len(prompt) for prompt in prompts)
    wanted = DEFAULT_NEW_TOKENS if asked is None else asked
    if model.config.positions != "learned":
        return wanted
    limit = model.config.max_position_embeddings
    if longest >= limit:
        raise ConfigError(
            f"--prompt: {longest} tokens, and the model has {limit} positions for prompt and continuation; shorten it"
        )
    if asked is not None and longest + asked > limit:
        raise ConfigError(
            f"--max-new-tokens {asked}: with a prompt of {longest} tokens the model's {limit} positions leave room "
            f"for {limit - longest}"
        )
    return min(wanted, limit - longest)


class _Rows:
    """The tokens of all prompts and of their continuations."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        eod_id: int | None,
        device: torch.device,
    ) -> None:
        self.lengths = [len(prompt) for prompt in prompts]
        self.shortest, self.longest = min(self.lengths), max(self.lengths) + new_tokens
        self.tokens = torch.zeros(len(prompts), self.longest, dtype=torch.int64, device=device)
        for row, prompt in enumerate(prompts):
            self.tokens[row, : len(prompt)] = torch.tensor(list(prompt), dtype=torch.int64)
        self._new_tokens = new_tokens
        self._eod_id = eod_id
        self._added: list[list[int]] = [[] for _ in prompts]
        self._ended = [False] * len(prompts)

    @property
    def finished(self) -> bool:
        return all(done or len(added) == self._new_tokens for done, added in zip(self._ended, self._added))

    def open_at(self, position: int) -> list[int]:
        """The rows that need a new token at this position."""
        return [
            row
            for row, length in enumerate(self.lengths)
            if position >= length and not self._ended[row] and len(self._added[row]) < self._new_tokens
        ]

    def place(self, position: int, rows: list[int], chosen: Tensor) -> None:
        for row, token in zip(rows, chosen.tolist(), strict=True):
            self.tokens[row, position] = token
            if token == self._eod_id:
                self._ended[row] = True
            else:
                self._added[row].append(token)

    def continuations(self) -> list[Continuation]:
        return [Continuation(tuple(added), ended) for added, ended in zip(self._added, self._ended)]
