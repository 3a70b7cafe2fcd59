"""Model for EleutherAI's harness: `tools/harness.py --model megatron --model_args load=DIR,... --tasks ...`.

The harness is an optional package. Its requests are texts. As in the harness's own `hf` model, a context that is too
long loses its beginning, and a long text is cut into windows.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from megatron.checkpoint.step_source import OWN_STEPS, StepSource
from megatron.errors import ConfigError
from megatron.evaluation.scorer import Scorer, scorer_of
from megatron.evaluation.sequences import Scored, continuation
from megatron.inference.answers import Answers, Prompt, Wanted
from megatron.inference.model import ModelOptions, Subject, open_subject
from megatron.inference.sampling import Sampling
from megatron.utils.command_line import dtype_name

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as missing:
    if (missing.name or "").partition(".")[0] != "lm_eval":
        raise
    raise ConfigError("lm_eval: the package is not installed; run `pip install lm_eval`") from None

__all__ = ["MegatronLM", "cli_evaluate", "offer_model"]

NAME = "megatron"
NEW_TOKENS = 256
"""Most tokens to generate if a task sets no limit."""
_OF_THE_HARNESS = ("max_batch_size",)
"""Arguments that the harness adds to the user's."""


class MegatronLM(TemplateLM):
    """The harness's model. `model_args` are the fields of ModelOptions, except that `max_length` is `seq_length`."""

    source: ClassVar[StepSource] = OWN_STEPS
    """Reader of checkpoints, by default only of native ones."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.subject = open_subject(model_options(arguments), self.source)

    @classmethod
    def of(cls, subject: Subject) -> "MegatronLM":
        model = cls.__new__(cls)
        TemplateLM.__init__(model)
        model.subject = subject
        return model

    @cached_property
    def _scorer(self) -> Scorer:
        return scorer_of(self.subject)

    @cached_property
    def _answers(self) -> Answers:
        return Answers(self.subject)

    @property
    def eot_token_id(self) -> int:
        return self.subject.tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        """Token that precedes a text with no context: bos_token, or the end-of-document token without one."""
        return self.subject.bos_id if self.subject.bos_id is not None else self.eot_token_id

    @property
    def max_length(self) -> int:
        return self.subject.window

    @property
    def tokenizer_name(self) -> str:
        return self.subject.tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        return self.subject.tokenizer.tokenize(string)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Raises, because special tokens in the rendered text would be read as plain text."""
        raise ConfigError(
            "--apply_chat_template: special tokens in the harness's text would be read as plain text; export the "
            "model (tools/convert_checkpoint.py --to hf) and evaluate it with --model hf"
        )

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **unused: Any,
    ) -> list[tuple[float, bool]]:
        rows = [_row(context, target, self.max_length) for _, context, target in requests]
        scores = self._scorer.score(rows, greedy=True)
        found = [(float(sum_), bool(greedy)) for sum_, greedy in zip(scores.logprobs, scores.greedy, strict=True)]
        for (texts, _, _), answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return found

    def loglikelihood_rolling(self, requests: "Sequence[Instance]", disable_tqdm: bool = False) -> list[float]:
        rows, owners = [], []
        for number, request in enumerate(requests):
            (text,) = request.args
            for pair in get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1):
                rows.append(continuation(*make_disjoint_window(pair)))
                owners.append(number)
        sums = np.zeros(len(requests))
        if rows:
            np.add.at(sums, owners, self._scorer.score(rows).logprobs)
        for request, total in zip(requests, sums.tolist(), strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums.tolist()

    def generate_until(self, requests: "Sequence[Instance]", disable_tqdm: bool = False) -> list[str]:
        """Generates a text for each request, in batches of equal settings. A text ends before its first stop text."""
        texts = [""] * len(requests)
        for same in _by_settings(requests):
            contexts, settings = [requests[number].args[0] for number in same], requests[same[0]].args[1]
            for number, text in zip(same, self._generated(contexts, settings), strict=True):
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
                texts[number] = text
        return texts

    def _generated(self, contexts: Sequence[str], settings: dict[str, Any]) -> list[str]:
        wanted = normalize_gen_kwargs(settings, NEW_TOKENS)
        count = int(wanted["max_gen_toks"])
        if count >= self.max_length:
            raise ConfigError(
                f"max_gen_toks {count}: must be less than {self.max_length}, the tokens that the model reads, prompt "
                "included; lower it"
            )
        stops = handle_stop_sequences(wanted.get("until"), eos=None)
        room = self.max_length - count
        prompts = [Prompt(text, tuple(self.tok_encode(text)[-room:]) or (self.prefix_token_id,)) for text in contexts]
        answers = self._answers.to(
            prompts,
            Wanted(
                sampling=_sampling(wanted), max_new_tokens=count, stop=tuple(stops), ends=frozenset([self.eot_token_id])
            ),
        )
        return [postprocess_generated_text(answer.text, stops, None) for answer in answers]


def _by_settings(requests: "Sequence[Instance]") -> list[list[int]]:
    """Groups the numbers of the requests by equal generation settings."""
    found: dict[str, list[int]] = {}
    for number, request in enumerate(requests):
        found.setdefault(json.dumps(request.args[1], sort_keys=True, default=repr), []).append(number)
    return list(found.values())


def offer_model(source: StepSource) -> None:
    """Registers the model with the harness. `source` reads the model's checkpoints."""
    register_model(NAME)(type(MegatronLM.__name__, (MegatronLM,), {"source": source}))


def model_options(arguments: dict[str, Any]) -> ModelOptions:
    """Parses the harness's `--model_args`."""
    names = {field.name for field in dataclasses.fields(ModelOptions)}
    given = {"seq_length" if name == "max_length" else name: value for name, value in arguments.items()}
    given = {name: value for name, value in given.items() if name not in _OF_THE_HARNESS}
    unknown = sorted(given.keys() - names)
    if unknown:
        raise ConfigError(f"--model_args {unknown[0]}: no such argument; use {', '.join(sorted(names))}")
    if "load" not in given:
        raise ConfigError("--model_args: has no load=DIR; add it to name the checkpoint")
    size = str(given.pop("batch_size", "auto"))
    if not size.startswith("auto"):
        if re.fullmatch("[1-9][0-9]{0,8}", size) is None:
            raise ConfigError(f"--batch_size {size}: must be a number of sequences from 1 to 999999999, or auto")
        given["batch_size"] = int(size)
    given = {name: value for name, value in given.items() if value is not None}
    if "dtype" in given:
        given["dtype"] = dtype_name(str(given["dtype"]))
    return ModelOptions(**{**given, "load": str(given["load"])})


def _row(context: Sequence[int], target: Sequence[int], window: int) -> Scored:
    """Makes a row to score, cut from the left to the window."""
    tokens = [*context, *target][-(window + 1) :]
    count = min(len(target), len(tokens) - 1)
    return continuation(tokens[:-count], tokens[-count:])


def _sampling(wanted: dict[str, Any]) -> Sampling:
    if not wanted.get("do_sample"):
        return Sampling(greedy=True)
    return Sampling(
        temperature=float(wanted.get("temperature", 1.0)),
        top_k=int(wanted.get("top_k", 0)),
        top_p=float(wanted.get("top_p", 0.0)),
    )
