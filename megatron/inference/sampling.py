"""Chooses the next token from logits: greedily, or sampled after temperature, top-k and top-p, in that order."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.errors import ConfigError

_COLDEST = 0.0001
"""Smallest temperature. Division by a smaller one may make logits infinite."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings for choosing tokens. `top_k` 0 and `top_p` 0 or 1 keep the whole distribution."""

    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    seed: int = 1234

    def __post_init__(self) -> None:
        if not _COLDEST <= self.temperature < float("inf"):
            raise ConfigError(
                f"--temperature {self.temperature}: must be at least {_COLDEST}; for the likeliest token use --greedy"
            )
        if self.top_k < 0:
            raise ConfigError(f"--top-k {self.top_k}: must not be negative; 0 keeps all tokens")
        if not 0 <= self.top_p <= 1:
            raise ConfigError(f"--top-p {self.top_p}: must be between 0 and 1; 0 and 1 keep all tokens")

    def seeds(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Returns the seed of each prompt's random numbers. It depends on the prompt and on the number of its earlier
        occurrences, so a continuation does not depend on other prompts."""
        seen: Counter[tuple[int, ...]] = Counter()
        found = []
        for prompt in map(tuple, prompts):
            named = f"{self.seed} {seen[prompt]} {prompt}".encode()
            found.append(int.from_bytes(hashlib.sha256(named).digest()[:8], "big") >> 1)
            seen[prompt] += 1
        return found

    def choose(self, logits: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """Chooses a token per row: [batch, vocabulary] -> [batch]. Sampling runs on the CPU, so all devices agree."""
        if self.greedy:
            return logits.argmax(-1)
        chances = self.filtered(logits.float()).softmax(-1).cpu()
        drawn = [torch.multinomial(row, 1, generator=g) for row, g in zip(chances, generators, strict=True)]
        return torch.cat(drawn).to(logits.device)

    def filtered(self, logits: Tensor) -> Tensor:
        """Returns the logits with -inf for the tokens that must not be sampled."""
        logits = logits / self.temperature
        if self.top_k:
            logits = keep_top_k(logits, self.top_k)
        if 0 < self.top_p < 1:
            logits = keep_top_p(logits, self.top_p)
        return logits


def keep_top_k(logits: Tensor, count: int) -> Tensor:
    """Keeps the `count` likeliest tokens, and ties with the last of them; other logits become -inf."""
    threshold = logits.topk(min(count, logits.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < threshold, float("-inf"))


def keep_top_p(logits: Tensor, share: float) -> Tensor:
    """Keeps the smallest set of likeliest tokens whose probabilities add up to at least `share`."""
    ordered, order = logits.sort(dim=-1, descending=False)
    below = ordered.softmax(-1).cumsum(-1) <= 1 - share  # from the least likely upwards
    below[..., -1] = False
    return logits.masked_fill(below.scatter(-1, order, below), float("-inf"))
