"""Finds the fastest number of workers on this machine by short runs over the first documents of the input."""

import json
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron.errors import ConfigError
from megatron.preprocess.input.files import InputFile, expand_inputs
from megatron.preprocess.input.segments import plan_segments, read_batches
from megatron.preprocess.options import PreprocessSettings
from megatron.preprocess.run import preprocess


@dataclass(frozen=True)
class Trial:
    workers: int
    documents: int
    documents_per_second: float
    megabytes_per_second: float


def try_workers(
    settings: PreprocessSettings, counts: Sequence[int], *, max_documents: int, folder: Path
) -> list[Trial]:
    """Preprocesses the first documents once per number of workers in `counts`. Returns the trials, fastest first.
    Removes all files that it writes in `folder`."""
    sources = expand_inputs(settings.inputs)
    if any(source.kind == "stdin" for source in sources):
        raise ConfigError(f"--find-optimal-num-workers: {sources[0].path} can be read only once; give a file")
    with TemporaryDirectory(prefix=".trial-", dir=folder) as place:
        sample, keys = Path(place) / "sample.jsonl", tuple(f"key{n}" for n in range(len(settings.json_keys)))
        count = _write_sample(sample, sources, settings, keys, max_documents)
        if not count:
            raise ConfigError(
                f"--find-optimal-num-workers: {sources[0].path} has no document to measure with; give an input with "
                "documents"
            )
        trials = []
        for workers in counts:
            each = replace(
                settings,
                inputs=(str(sample),),
                json_keys=keys,
                output_prefix=str(Path(place) / "trial"),
                workers=workers,
                rank=0,
                world=1,
                overwrite=True,
                resume=False,
                log_interval=count + 1,  # no progress lines
            )
            report = preprocess(each, lambda line: None)
            trials.append(
                Trial(workers, report.documents, report.documents / report.seconds, report.megabytes_per_second)
            )
    return sorted(trials, key=lambda trial: -trial.documents_per_second)


def _write_sample(
    path: Path, sources: Sequence[InputFile], settings: PreprocessSettings, keys: Sequence[str], most: int
) -> int:
    """Writes the first documents of the input as JSON lines of their texts, without bad lines; returns their number."""
    count = 0
    with path.open("w", encoding="utf-8") as file, closing(_documents(sources, settings)) as documents:
        for texts_of_keys in islice(documents, most):
            file.write(json.dumps(dict(zip(keys, texts_of_keys, strict=True))) + "\n")
            count += 1
    return count


def _documents(sources: Sequence[InputFile], settings: PreprocessSettings) -> Generator[list[list[str]]]:
    for segment in plan_segments(sources, segment_bytes=settings.segment_size(sources)):
        for batch in read_batches(segment, settings.json_keys):
            yield from (texts for _, texts in batch.documents)
