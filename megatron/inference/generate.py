"""Continues prompts one token at a time, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

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
    on_token: Callable[[int, int], object] | None = None,
) -> list[Continuation]:
    """One continuation per prompt. `on_token(row, token)` is called as soon as a token of a continuation is known.

    Prompts of different lengths are processed together without padding: a row is fed its prompt's tokens until they
    end, and rows do not affect each other.
    """
    sampling = sampling or Sampling(greedy=True)
    count = new_token_count(model, prompts, max_new_tokens)
    lengths = [len(prompt) for prompt in prompts]
    ends = [length + count for length in lengths]  # of the rows; an end-of-document token puts one forward
    tokens = torch.zeros(len(prompts), max(ends), dtype=torch.int64, device=next(model.parameters()).device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(list(prompt), dtype=torch.int64)
    cache = model.make_cache(len(prompts), max(ends))
    generators = sampling.generators(len(prompts))
    training = model.training
    model.eval()
    try:
        new = tokens[:, : min(lengths)]  # [batch, first tokens of every prompt]
        for position in range(min(lengths), max(ends)):
            logits = model(new, cache=cache)[:, -1]  # [batch, vocabulary]
            rows = [row for row, length in enumerate(lengths) if length <= position < ends[row]]
            if rows:
                chosen = sampling.choose(logits[rows], [generators[row] for row in rows])
                for row, token in zip(rows, chosen.tolist(), strict=True):
                    tokens[row, position] = token
                    if token == eod_id:
                        ends[row] = position
                    elif on_token is not None:
                        on_token(row, token)
            new = tokens[:, position].unsqueeze(1)  # [batch, 1]
            if max(ends) <= position + 1:
                break
    finally:
        model.train(training)
    return [
        Continuation(tuple(row[length:end].tolist()), ended=end < length + count)
        for row, length, end in zip(tokens, lengths, ends, strict=True)
    ]


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
