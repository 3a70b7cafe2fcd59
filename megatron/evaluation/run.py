"""Runs one evaluation, from its settings to its report."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron.checkpoint.all_ranks import run_on_all
from megatron.checkpoint.step_source import OWN_STEPS, StepSource
from megatron.distributed.messages import all_gather_json
from megatron.errors import DataError
from megatron.evaluation import choices, lambada, perplexity
from megatron.evaluation.choices import Fit
from megatron.evaluation.progress import TokenProgress
from megatron.evaluation.scorer import Scores, scorer_of
from megatron.evaluation.sequences import Scored
from megatron.evaluation.texts import read_documents, refuse_tokens
from megatron.inference.model import ModelOptions, Subject, open_subject
from megatron.utils.outputs import check_output, write_output


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Task and data of an evaluation. Fields are flags."""

    task: str
    data: str
    json_key: str = "text"
    detokenize: str | None = None
    overlapping_eval: int | None = None
    score_first_token: bool = False
    strict_lambada: bool = False
    truncate_prompts: bool = False
    output: str | None = None


class ScoringTask(Protocol):
    """Rows to score, and the metrics of their scores."""

    @property
    def rows(self) -> Sequence[Scored]: ...

    def result(self, scores: Scores) -> dict[str, Any]: ...


def evaluate(options: ModelOptions, task_options: TaskOptions, source: StepSource = OWN_STEPS) -> dict[str, Any]:
    """Evaluates, prints the result, and writes it. Files are read before any weight. `source` reads the checkpoint, by
    default only a native one."""
    if task_options.output is not None:
        check_output(Path(task_options.output))
    subject = open_subject(options, source)
    found = measure(subject, task_options)
    if subject.run.log.main:
        print(_table(found), flush=True)
        if task_options.output is not None:
            write_output(Path(task_options.output), [json.dumps(found, indent=2, allow_nan=False)])
    return found


def measure(subject: Subject, task_options: TaskOptions) -> dict[str, Any]:
    """Returns the results, on every rank."""
    run = subject.run
    task, notes = run_on_all(lambda: _task(subject, task_options), run.parallel.world)
    _check_same(task, subject)
    for note in notes:
        run.log.warn(note)
    scorer = scorer_of(subject)
    with TokenProgress(sum(row.length for row in task.rows), main=run.log.main) as progress:
        scores = scorer.score(task.rows, greedy=isinstance(task, lambada.Lambada), on_batch=progress.add)
    return _report(subject, task_options, task.result(scores), progress)


def _task(subject: Subject, options: TaskOptions) -> tuple[ScoringTask, Sequence[str]]:
    data, tokenizer, window = Path(options.data), subject.tokenizer, subject.window
    if options.task != "perplexity":
        refuse_tokens(data, options.task)
    if options.task == "lambada":
        fit = fit_to(window, truncate=options.truncate_prompts)
        return lambada.plan_passages(data, tokenizer, fit, strict=options.strict_lambada, json_key=options.json_key), ()
    if options.task == "choices":
        chosen = choices.plan_choices(data, tokenizer, fit_to(window, truncate=options.truncate_prompts))
        return chosen, chosen.notes
    documents = read_documents(data, tokenizer, json_key=options.json_key, wikitext=options.detokenize == "wikitext")
    prefix = tokenizer.eod if options.score_first_token else None
    found = perplexity.plan_windows(
        documents, window=window, stride=options.overlapping_eval, prefix=prefix, data=options.data
    )
    return found, perplexity.notes(found, window, options.data)


def fit_to(window: int, *, truncate: bool) -> Fit:
    """Makes the function that fits a context and its target to the window. It never cuts a target. With `truncate` it
    cuts the beginning of the context, else it raises."""

    def fit(context: list[int], target: list[int], place: str) -> tuple[list[int], list[int]]:
        over = len(context) + len(target) - 1 - window
        if over <= 0:
            return context, target
        if truncate and over < len(context):
            return context[over:], target
        way_out = f"shorten the target to {window}" if truncate else "give --truncate-prompts to cut the context"
        raise DataError(
            f"{place}: {len(context) + len(target) - 1} tokens, but the model reads {window} at once; {way_out}"
        )

    return fit


def _check_same(task: ScoringTask, subject: Subject) -> None:
    """Raises if ranks read different tokens. Each rank reads the files itself, and differences would be meaningless."""
    digest = hashlib.sha256()
    for row in task.rows:
        digest.update(f"{row.first} {row.length} ".encode() + row.tokens.tobytes())
    digests = all_gather_json(digest.hexdigest(), subject.run.parallel.world, str)
    for rank, other in enumerate(digests):
        if other != digests[0]:
            raise DataError(f"rank {rank} reads other tokens than rank 0; give all machines the same files")


def _report(subject: Subject, options: TaskOptions, result: dict[str, Any], progress: TokenProgress) -> dict[str, Any]:
    about = {
        "task": options.task,
        "data": options.data,
        "model": subject.described.place,
        "dtype": subject.described.dtype,
        "tokenizer": subject.tokenizer.fingerprint[:12],
        "window": subject.window,
    }
    if options.task == "perplexity":
        about |= {"stride": options.overlapping_eval or subject.window, "detokenize": options.detokenize}
    if options.task == "lambada":
        about |= {"strict": options.strict_lambada}
    speed = {"seconds": round(progress.seconds, 3), "tokens_per_second": round(progress.tokens_per_second, 1)}
    return about | result | speed


def _table(report: Mapping[str, Any]) -> str:
    """Formats two columns, without values that do not apply."""
    rows = [(name.replace("_", " "), _shown(value)) for name, value in report.items() if value is not None]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
