"""Beam search: finds the continuations with the highest total probability, as in `transformers`.

Every prompt has num_beams open beams. Each step extends them by all tokens and keeps the best. A beam that ends becomes
a result if it is among the best; its score is the sum of log-probabilities over length ** length_penalty. A prompt is
done if its best open beam, at its present length, would not beat the worst of its results.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megatron.errors import ConfigError
from megatron.inference.decoder import Decoder
from megatron.inference.generate import Continuation, ids_of, new_token_counts
from megatron.model import GPT


@dataclass(frozen=True)
class Beam:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    sum: float

    def with_token(self, token: int, total: float) -> "Beam":
        return Beam((*self.tokens, token), (*self.logprobs, total - self.sum), total)


@dataclass(frozen=True)
class Result:
    score: float
    beam: Beam
    finish: str


@dataclass
class _Search:
    """Beam search of one prompt."""

    count: int
    width: int
    penalty: float
    ends: Collection[int]
    open: list[Beam] = field(default_factory=lambda: [Beam((), (), 0.0)])
    results: list[Result] = field(default_factory=list)
    done: bool = False

    def take_in(self, candidates: Sequence[tuple[int, int, float]]) -> list[int]:
        """Takes the candidates (index of beam, token, sum of log-probabilities), best first. Returns, for each new open
        beam, the index of the beam that it extends. Returns [] if the search is done, so that the prompt needs no
        further position of the model."""
        parents: list[int] = []
        opened: list[Beam] = []
        for rank, (parent, token, total) in enumerate(candidates):
            longer = self.open[parent].with_token(token, total)
            if token in self.ends or len(longer.tokens) == self.count:
                if rank < self.width:
                    self._keep(longer, "eos" if token in self.ends else "length")
            elif len(opened) < self.width:
                parents.append(parent)
                opened.append(longer)
        self.open = opened
        self.done = not opened or not self._can_improve()
        return [] if self.done else parents

    def _keep(self, beam: Beam, finish: str) -> None:
        score = beam.sum / len(beam.tokens) ** self.penalty
        self.results = sorted([*self.results, Result(score, beam, finish)], key=lambda one: -one.score)[: self.width]

    def _can_improve(self) -> bool:
        if len(self.results) < self.width:
            return True
        best = self.open[0]
        return best.sum / len(best.tokens) ** self.penalty > self.results[-1].score

    def continuation(self) -> Continuation:
        best = self.results[0]
        end = len(best.beam.tokens) - (best.finish == "eos")
        return Continuation(best.beam.tokens[:end], best.finish, best.beam.logprobs[:end], best.score)


@torch.inference_mode()
def beam_search(
    model: GPT | Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    num_beams: int,
    length_penalty: float = 1.0,
    max_new_tokens: int | None = None,
    eod_id: int | Collection[int] | None = None,
) -> list[Continuation]:
    """Returns the best continuation of each prompt."""
    decoder = model if isinstance(model, Decoder) else Decoder(model)
    counts, ends = new_token_counts(decoder.model, prompts, max_new_tokens), ids_of(eod_id)
    vocabulary, several = decoder.model.vocab_size, max(2, 1 + len(ends))
    if not 1 <= num_beams <= vocabulary // several:
        raise ConfigError(
            f"--num-beams {num_beams}: must be from 1 to {vocabulary // several} (limited by the vocabulary size)"
        )
    order = sorted(range(len(prompts)), key=lambda row: -len(prompts[row]))
    searches = [_Search(counts[row], num_beams, length_penalty, ends) for row in order]
    training = decoder.model.training
    decoder.model.eval()
    try:
        logits, rows = decoder.read([prompts[row] for row in order], max(counts)), 1
        going_on = searches
        while True:
            sums = torch.tensor([[beam.sum for beam in one.open] for one in going_on], dtype=torch.float64)
            shape = (len(going_on), several * num_beams, 2)
            found = decoder.decided(logits, partial(_best, sums=sums, count=shape[1]), shape).tolist()
            kept = []  # rows
            for number, (one, best) in enumerate(zip(going_on, found, strict=True)):
                parents = one.take_in([(int(at) // vocabulary, int(at) % vocabulary, total) for at, total in best])
                kept += [number * rows + place for place in parents]
            going_on = [one for one in going_on if not one.done]
            if not going_on:
                break
            decoder.take(kept)
            rows = num_beams
            tokens = [beam.tokens[-1] for one in going_on for beam in one.open]
            logits = decoder.step(torch.tensor(tokens, device=decoder.device))
    finally:
        decoder.model.train(training)
    answers = dict(zip(order, (one.continuation() for one in searches), strict=True))
    return [answers[row] for row in range(len(prompts))]


def _best(logits: Tensor, sums: Tensor, count: int) -> Tensor:
    """Returns the largest sums with one more token, as pairs (place among beams * vocabulary, sum).
    logits [prompts * beams, vocabulary], sums [prompts, beams] -> [prompts, count, 2]"""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    totals = wide.log_softmax(-1).view(*sums.shape, -1) + sums.to(logits.device, wide.dtype).unsqueeze(-1)
    best = totals.flatten(1).topk(count, dim=1)
    return torch.stack([best.indices.double(), best.values.double()], 2)
