"""Runs tools/generate.py, from its settings to the texts."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from megatron.checkpoint.all_ranks import run_on_all, run_on_first
from megatron.checkpoint.step_source import OWN_STEPS, StepSource
from megatron.inference.answers import Answer, Answers, Prompt, Wanted
from megatron.inference.model import ModelOptions, Subject, open_subject
from megatron.inference.prompts import Text, encode_prompts, encoded_chats, read_chats, read_prompts
from megatron.inference.sampling import Sampling
from megatron.tokenizer.chat import build_chat_encoder
from megatron.utils.outputs import check_output, write_output


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Prompts, and settings of their continuation. Fields are flags."""

    prompt: tuple[str, ...] = ()
    prompts: str | None = None
    json_key: str = "prompt"
    truncate_prompts: bool = False
    chat: bool = False
    prompt_with_special_tokens: bool = False
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eod: bool = False
    logprobs: bool = False
    num_beams: int = 1
    length_penalty: float = 1.0
    output: str | None = None


def answer_prompts(
    options: GenerateOptions, model: ModelOptions, sampling: Sampling, source: StepSource = OWN_STEPS
) -> list[Answer]:
    """Answers the prompts, which are read and checked before any weight. `source` reads the checkpoint."""
    if options.output is not None:
        check_output(Path(options.output))
    subject = open_subject(model, source)
    answers = continued(subject, options, sampling)
    if options.output is not None and subject.run.log.main:
        write_output(Path(options.output), map(_line, answers))
    return answers


def continued(subject: Subject, options: GenerateOptions, sampling: Sampling) -> list[Answer]:
    """Returns the answers on every rank. Without --output rank 0 prints them."""
    prompts = _prompts(subject, options)
    wanted = Wanted(
        sampling=sampling,
        max_new_tokens=options.max_new_tokens,
        stop=options.stop,
        ends=() if options.ignore_eod else subject.end_ids,
        logprobs=options.logprobs,
        num_beams=options.num_beams,
        length_penalty=options.length_penalty,
    )
    answers = Answers(subject)
    if options.output is not None or not subject.run.log.main:
        return answers.to(prompts, wanted)
    if len(prompts) > 1:
        return answers.to(prompts, wanted, on_answers=_InOrder().show)
    show = partial(print, end="", flush=True)
    show(prompts[0].text)
    found = answers.to(prompts, wanted, on_text=show)
    print(flush=True)
    return found


def _prompts(subject: Subject, options: GenerateOptions) -> list[Prompt]:
    """Reads the prompts on rank 0, which has the standard input."""
    world = subject.run.parallel.world
    if options.chat:
        return run_on_first(lambda: _chats(subject, options), world, list[Prompt])
    texts = run_on_first(lambda: read_prompts(options.prompt, options.prompts, options.json_key), world, list[Text])
    return run_on_all(
        lambda: encode_prompts(
            texts,
            subject.tokenizer,
            beginning=subject.beginning,
            positions=subject.positions,
            new_tokens=options.max_new_tokens,
            truncate=options.truncate_prompts,
            special=options.prompt_with_special_tokens,
        ),
        world,
    )


def _chats(subject: Subject, options: GenerateOptions) -> list[Prompt]:
    return encoded_chats(
        read_chats(options.prompt, options.prompts),
        build_chat_encoder(subject.chat_settings, subject.tokenizer.eod_id, flag="--chat"),
        positions=subject.positions,
        new_tokens=options.max_new_tokens,
    )


class _InOrder:
    """Prints answers in order, each as soon as all earlier ones are printed."""

    def __init__(self) -> None:
        self.next = 0

    def show(self, found: Mapping[int, Answer]) -> None:
        while self.next in found:
            print(f"{found[self.next].prompt}{found[self.next].text}", flush=True)
            self.next += 1


def _line(answer: Answer) -> str:
    values = {name: value for name, value in asdict(answer).items() if value is not None}
    return json.dumps(values, ensure_ascii=False, allow_nan=False)
