"""Continues prompts: makes batches of similar length, shares them among data-parallel ranks, and decodes the tokens."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.distributed.messages import all_gather_json
from megatron.inference.beams import beam_search
from megatron.inference.decoder import Decoder
from megatron.inference.generate import Continuation, OnToken, generate
from megatron.inference.model import Subject
from megatron.inference.packed import packed_weights
from megatron.inference.sampling import Sampling
from megatron.inference.text_stream import TextStream


@dataclass(frozen=True)
class Prompt:
    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Settings of a generation."""

    sampling: Sampling
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    """Stop texts: an answer ends before the first one. They may span tokens."""
    ends: Collection[int] = ()
    """Tokens that end a text."""
    logprobs: bool = False
    num_beams: int = 1
    length_penalty: float = 1.0


@dataclass(frozen=True)
class Answer:
    """Continuation of a prompt. `text` ends before a stop text, `tokens` with the token that completed it."""

    prompt: str
    text: str
    tokens: tuple[int, ...]
    finish: str
    logprobs: tuple[float, ...] | None = None
    score: float | None = None


class Answers:
    """Generates answers. All ranks of a model make the same calls."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.parallel = subject, subject.run.parallel
        self.decoder = Decoder(subject.model, subject.passes, self.parallel)

    def to(
        self,
        prompts: Sequence[Prompt],
        wanted: Wanted,
        *,
        on_text: Callable[[str], object] | None = None,
        on_answers: Callable[[Mapping[int, Answer]], object] = lambda found: None,
    ) -> list[Answer]:
        """Returns answers in the order of the prompts. `on_text` receives the streamed text of a single prompt.
        `on_answers` receives all answers so far, by index of their prompts."""
        assert on_text is None or len(prompts) == 1
        seeds = wanted.sampling.seeds([prompt.tokens for prompt in prompts])
        found: dict[int, Answer] = {}
        with packed_weights(self.subject.model, self.subject.run.log.info):
            for turn in self._turns(prompts):
                place = self.parallel.dp.rank if len(turn) > 1 else 0
                mine = [(prompts[number], seeds[number]) for number in turn[place]]
                answers = self._answers(mine, wanted, on_text)
                several = all_gather_json(answers, self.parallel.dp, list[Answer]) if len(turn) > 1 else [answers]
                for batch, of_batch in zip(turn, several, strict=True):
                    found |= dict(zip(batch, of_batch, strict=True))
                on_answers(found)
        return [found[number] for number in range(len(prompts))]

    def _turns(self, prompts: Sequence[Prompt]) -> Iterator[list[list[int]]]:
        """Yields groups of batches of prompt numbers, one batch for each data-parallel rank. The prompts of a batch
        have similar lengths. Ranks that share experts must compute together, so they get the same batch."""
        order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number].tokens))
        size, ranks = self.subject.options.batch_size, self.parallel.dp.size if self.parallel.ep.size == 1 else 1
        batches = [order[first : first + size] for first in range(0, len(order), size)]
        for first in range(0, len(batches), ranks):
            turn = batches[first : first + ranks]
            yield turn if ranks == 1 else [*turn, *([] for _ in range(ranks - len(turn)))]

    def _answers(
        self, mine: Sequence[tuple[Prompt, int]], wanted: Wanted, on_text: Callable[[str], object] | None
    ) -> list[Answer]:
        if not mine:
            return []
        prompts = [prompt for prompt, _ in mine]
        texts = [TextStream(self.subject.tokenizer, prompt.tokens, wanted.stop) for prompt in prompts]
        tokens = [prompt.tokens for prompt in prompts]
        if wanted.num_beams > 1:
            found = beam_search(
                self.decoder,
                tokens,
                num_beams=wanted.num_beams,
                length_penalty=wanted.length_penalty,
                max_new_tokens=wanted.max_new_tokens,
                eod_id=wanted.ends,
            )
            for text, one in zip(texts, found, strict=True):
                text.extend(one.tokens)
        else:
            found = generate(
                self.decoder,
                tokens,
                max_new_tokens=wanted.max_new_tokens,
                sampling=wanted.sampling,
                seeds=[seed for _, seed in mine],
                eod_id=wanted.ends,
                logprobs=wanted.logprobs,
                on_token=_listener(texts, on_text),
            )
        answers = [_answer(*each, wanted.logprobs) for each in zip(prompts, texts, found, strict=True)]
        if on_text is not None:
            on_text(texts[0].new_text())  # the text that was held back until the end
        return answers


def _listener(texts: Sequence[TextStream], on_text: Callable[[str], object] | None) -> OnToken:
    def listen(row: int, token: int) -> bool:
        stopped = texts[row].add(token)
        if on_text is not None and (new := texts[row].new_text()):
            on_text(new)
        return stopped

    return listen


def _answer(prompt: Prompt, text: TextStream, found: Continuation, logprobs: bool) -> Answer:
    text.finish()
    shown = found.logprobs if logprobs else None
    return Answer(prompt.text, text.text, found.tokens, found.finish, shown, found.score)
