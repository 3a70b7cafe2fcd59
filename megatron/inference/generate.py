"""Continues prompts one token at a time, with a KV cache."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.errors import ConfigError
from megatron.inference.decoder import Decoder
from megatron.inference.sampling import Sampling
from megatron.model import GPT

DEFAULT_NEW_TOKENS = 64

OnToken = Callable[[int, int], bool | None]
"""Callback (row, token) for each new token of a continuation; returning True ends the row with that token."""


@dataclass(frozen=True)
class Continuation:
    """Continuation of one prompt, without the token that ends the document."""

    tokens: tuple[int, ...]
    finish: str
    """"eos", "stop" (`on_token` returned True) or "length"."""
    logprobs: tuple[float, ...] | None = field(default=None, compare=False)
    """Log-probability of each token before temperature, top-k and top-p. Its rounding may depend on the batch."""
    score: float | None = field(default=None, compare=False)
    """Beam search only: sum of log-probabilities over length ** length_penalty."""


@torch.inference_mode()
def generate(
    model: GPT | Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | None = None,
    sampling: Sampling | None = None,
    seeds: Sequence[int] | None = None,
    eod_id: int | Collection[int] | None = None,
    logprobs: bool = False,
    on_token: OnToken | None = None,
) -> list[Continuation]:
    """Returns one continuation per prompt. All prompts are one batch, without padding, and do not affect each other.

    `seeds`: one per prompt, for its random numbers. Default: `sampling.seeds(prompts)`.
    """
    decoder = model if isinstance(model, Decoder) else Decoder(model)
    sampling = sampling or Sampling(greedy=True)
    counts = new_token_counts(decoder.model, prompts, max_new_tokens)
    if sampling.greedy:
        seeds = ()
    elif seeds is None:
        seeds = sampling.seeds(prompts)
    batch = _Batch(prompts, counts, seeds, ids_of(eod_id), on_token)
    training = decoder.model.training
    decoder.model.eval()
    try:
        logits = decoder.read([prompts[row] for row in batch.rows], max(counts))
        while True:
            found = decoder.decided(logits, batch.choice(sampling, logprobs), (len(batch.rows), 1 + logprobs))
            tokens = found[:, 0].long()
            batch.take_in(tokens.tolist(), found[:, 1].tolist() if logprobs else None)
            kept = batch.worth_keeping()
            if not kept:
                return batch.continuations(logprobs)
            if len(kept) < len(batch.rows):
                batch.keep(kept)
                decoder.take(kept)
                tokens = tokens[kept]
            logits = decoder.step(tokens.to(decoder.device))
    finally:
        decoder.model.train(training)


class _Batch:
    """State of each prompt. `rows`: indices of the prompts that are still computed, longest first."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        counts: Sequence[int],
        seeds: Sequence[int],
        ends: Collection[int],
        on_token: OnToken | None,
    ) -> None:
        """Starts with no tokens. `seeds` is empty for greedy decoding."""
        self.rows = sorted(range(len(prompts)), key=lambda row: -len(prompts[row]))
        self.counts, self.ends, self.on_token = counts, ends, on_token
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.logprobs: list[list[float]] = [[] for _ in prompts]
        self.finish: list[str | None] = [None] * len(prompts)

    def choice(self, sampling: Sampling, logprobs: bool) -> Callable[[Tensor], Tensor]:
        """Makes the function logits [rows, vocabulary] -> [rows, 1 or 2]: next tokens and, with `logprobs`, their
        log-probabilities."""
        generators = [self.generators[row] for row in self.rows] if self.generators else ()

        def choose(logits: Tensor) -> Tensor:
            chosen = sampling.choose(logits, generators).unsqueeze(1)
            if not logprobs:
                return chosen
            return torch.cat([chosen.double(), token_logprobs(logits, chosen).double()], 1)

        return choose

    def take_in(self, tokens: Sequence[int], logprobs: Sequence[float] | None) -> None:
        for place, (row, token) in enumerate(zip(self.rows, tokens, strict=True)):
            if self.finish[row] is not None:
                continue
            if token in self.ends:
                self.finish[row] = "eos"
                continue
            self.tokens[row].append(token)
            if logprobs is not None:
                self.logprobs[row].append(logprobs[place])
            if self.on_token is not None and self.on_token(row, token):
                self.finish[row] = "stop"
            elif len(self.tokens[row]) == self.counts[row]:
                self.finish[row] = "length"

    def worth_keeping(self) -> list[int]:
        """Returns the places of the rows to keep; none if all have ended. Removing rows copies the keys and values
        of the others, so ended rows are kept until half have ended, or one has reached its number of tokens."""
        going_on = [place for place, row in enumerate(self.rows) if self.finish[row] is None]
        if any(self.finish[row] == "length" for row in self.rows):  # the model may have no position left for ended rows
            return going_on
        return going_on if 2 * len(going_on) <= len(self.rows) else list(range(len(self.rows)))

    def keep(self, places: Sequence[int]) -> None:
        self.rows = [self.rows[place] for place in places]

    def continuations(self, logprobs: bool) -> list[Continuation]:
        return [
            Continuation(tuple(tokens), finish or "length", tuple(found) if logprobs else None)
            for tokens, finish, found in zip(self.tokens, self.finish, self.logprobs, strict=True)
        ]


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Returns log-probabilities: logits [rows, vocabulary], tokens [rows, n] -> [rows, n]."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide.gather(1, tokens) - wide.logsumexp(1, keepdim=True)


def ids_of(given: int | Collection[int] | None) -> Collection[int]:
    if given is None:
        return frozenset()
    return frozenset([given] if isinstance(given, int) else given)


def new_token_counts(model: GPT, prompts: Sequence[Sequence[int]], asked: int | None) -> list[int]:
    """Returns the number of tokens to add to each prompt. Raises if prompt and continuation exceed the positions."""
    if not prompts or any(not prompt for prompt in prompts):
        raise ConfigError("--prompt: an empty prompt cannot be continued; give at least one token of text")
    return [room(model.config.max_position_embeddings, len(prompt), asked) for prompt in prompts]


def room(
    positions: int | None,
    length: int,
    asked: int | None,
    *,
    place: str = "--prompt",
    shorter: str = "shorten it, or give --truncate-prompts to drop its beginning",
) -> int:
    """Returns the number of tokens to add to a prompt of `length` tokens. `positions`: of the model; None: no limit."""
    if asked is not None and asked < 1:
        raise ConfigError(f"--max-new-tokens {asked}: must be at least 1")
    wanted = DEFAULT_NEW_TOKENS if asked is None else asked
    if positions is None:
        return wanted
    if length >= positions:
        raise ConfigError(
            f"{place}: {length} tokens, but the model has {positions} positions for prompt and continuation; {shorter}"
        )
    if asked is not None and length + asked > positions:
        beside = "with a prompt" if place == "--prompt" else f"with {place}"
        raise ConfigError(
            f"--max-new-tokens {asked}: {beside} of {length} tokens the model's {positions} positions leave room "
            f"for {positions - length}; lower --max-new-tokens"
        )
    return min(wanted, positions - length)
