"""Splits sentences (`--split-sentences`) with NLTK's Punkt data if installed, else with parameters from the input.

The parameters are first written beside the output. Every partition, worker and resumed run reads that file. Nothing is
downloaded or unpickled.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar
from zipfile import BadZipFile

from megatron.errors import ConfigError, DataError
from megatron.preprocess.input.files import InputFile
from megatron.preprocess.input.segments import Segment, plan_segments, read_batches
from megatron.preprocess.punkt import ALPHA, ELLIPSIS, INITIAL, PunktParameters, SentenceSplitter, tokens, word_type
from megatron.utils.durable import write_atomically, write_once, writing

T = TypeVar("T")

FORMAT = "megatron sentence parameters"
VERSION = 1
LEARN_FROM = 10_000_000  # characters; they take about ten seconds, and hold a language's common abbreviations
_LEARN_AT_ONCE = 2_000_000  # characters; NLTK holds an object per word
_SAMPLED_FILES, _SAMPLED_SEGMENTS, _SAMPLED_BYTES = 16, 16, 1 << 19


def prepare_splitter(
    *,
    language: str,
    keep_newlines: bool,
    parameters_file: Path,
    sample: Callable[[], Iterator[str]],
    say: Callable[[str], None],
    anew: bool = False,
) -> SentenceSplitter:
    """Loads or makes the parameters file. `sample` yields texts of the input, the same on every partition.
    `anew` replaces the file of an earlier run."""
    if not re.fullmatch(r"[\w-]+", language):
        raise ConfigError(f"--lang {language}: not the name of a language; give a name such as english")
    if parameters_file.exists() and not anew:
        parameters, source, checksum = _load(parameters_file, language)
        say(f"sentences: parameters from {parameters_file} ({source}); to make new ones, give --overwrite or delete it")
    else:
        parameters, source, note = _find_or_learn(language, sample, say)
        with writing(parameters_file):
            parameters_file.parent.mkdir(parents=True, exist_ok=True)
            (write_atomically if anew else write_once)(parameters_file, [_encode(parameters, language, source)])
        # If another partition was faster, its file is used.
        parameters, source, checksum = _load(parameters_file, language)
        say(f"sentences: {note}; kept in {parameters_file}")
    fingerprint = hashlib.sha256(f"{checksum} {keep_newlines}".encode()).hexdigest()
    return SentenceSplitter(parameters, keep_newlines=keep_newlines, fingerprint=fingerprint)


# ---------------------------------------------------------------- from NLTK


def _find_or_learn(
    language: str, sample: Callable[[], Iterator[str]], say: Callable[[str], None]
) -> tuple[PunktParameters, str, str]:
    """Returns parameters, source ("trained" or "learned") and a note for the user."""
    try:
        import nltk.data
        from nltk.tokenize.punkt import load_punkt_params
    except ImportError as error:
        raise ConfigError(
            f"--split-sentences: needs NLTK 3.9.1 or newer ({error}); pip install -U 'nltk>=3.9.1' "
            "(or install the extra `data` of this package)"
        ) from error
    folder = f"tokenizers/punkt_tab/{language}/"
    try:
        found = nltk.data.find(folder)
    except LookupError:
        say(
            f"sentences: NLTK has no punkt_tab data for {language}; learning parameters from the input, up to half a "
            "minute"
        )
        parameters, characters = learn(sample())
        return parameters, "learned", f"learned from {characters / 1e6:.1f} million characters of the input"
    except (ValueError, OSError, BadZipFile) as error:
        raise _unreadable(language, folder, error) from error
    try:
        return _frozen(load_punkt_params(found)), "trained", f"trained Punkt data of {found}"
    except (LookupError, ValueError, OSError, TypeError, BadZipFile) as error:
        raise _unreadable(language, str(found), error) from error


def _unreadable(language: str, folder: str, error: Exception) -> DataError:
    reason = " ".join(str(error).split())[:200]
    return DataError(
        f"--lang {language}: NLTK's data in {folder} cannot be read ({reason}); install punkt_tab again or remove it"
    )


def _frozen(found: Any) -> PunktParameters:
    collocations = frozenset((first, second) for first, second in found.collocations)
    contexts = {word: int(bits) for word, bits in found.ortho_context.items() if bits}
    return PunktParameters(frozenset(found.abbrev_types), collocations, frozenset(found.sent_starters), contexts)


# ---------------------------------------------------------------- from the input


def learn(texts: Iterator[str], most: int = LEARN_FROM) -> tuple[PunktParameters, int]:
    """Learns parameters; returns them and the number of characters used. Equal texts give equal parameters."""
    trainer = _trainer()
    total, pending, held = 0, [], 0
    for text in texts:
        text = text[: most - total]
        total += len(text)
        pending.append(text)
        held += len(text)
        if held >= _LEARN_AT_ONCE:
            trainer.train("\n\n".join(pending), finalize=False)
            pending, held = [], 0
        if total >= most:
            break
    if held:
        trainer.train("\n\n".join(pending), finalize=False)
    trainer.finalize_training()
    return _frozen(trainer.get_params()), total


def _trainer() -> Any:
    """Returns NLTK's trainer of Punkt parameters, made deterministic. NLTK's time limits, which take half of the time,
    are left out."""
    from nltk.tokenize.punkt import PunktLanguageVars, PunktToken, PunktTrainer

    class Words(PunktLanguageVars):
        def word_tokenize(self, s: str) -> list[str]:
            return tokens(s)

    class Token(PunktToken):
        __slots__ = ()
        _RE_ELLIPSIS, _RE_INITIAL, _RE_ALPHA = ELLIPSIS, INITIAL, ALPHA

        def _get_type(self, tok: str) -> str:
            return word_type(tok)

    class Trainer(PunktTrainer):
        def _unique_types(self, tokens: Any) -> list[str]:  # NLTK's order differs between processes
            return sorted(super()._unique_types(tokens))

    return Trainer(lang_vars=Words(), token_cls=Token)


def texts_of_sample(sources: Sequence[InputFile], keys: Sequence[str]) -> Iterator[str]:
    """Yields texts from evenly spaced files, independent of the partition: from evenly spaced places in files of JSON
    lines, from the beginning of other files. Skips bad lines, which the run itself reports."""
    for source in sources:
        if source.kind == "stdin":
            raise ConfigError(
                f"--split-sentences: sentence ends cannot be learned from {source.path}, which is read only once; "
                "give a file, or install NLTK's punkt_tab data"
            )
    chosen = _evenly(sources, _SAMPLED_FILES)
    for source in chosen:
        for segment in _sampled_segments(source, max(1, _SAMPLED_SEGMENTS // len(chosen))):
            for batch in read_batches(segment, keys):
                for _, texts_of_keys in batch.documents:
                    for texts in texts_of_keys:
                        yield from texts


def _sampled_segments(source: InputFile, count: int) -> list[Segment] | Iterator[Segment]:
    if source.kind == "lines":  # computed directly, because the plan of a terabyte has millions of segments
        starts = _evenly(range(0, source.size, _SAMPLED_BYTES), count)
        stops = [min(start + _SAMPLED_BYTES, source.size) for start in starts]
        return [Segment(source, i, start, stop, None, stop) for i, (start, stop) in enumerate(zip(starts, stops))]
    return islice(plan_segments([source], segment_bytes=_SAMPLED_BYTES), count)  # the first segments


def _evenly(items: Sequence[T], count: int) -> list[T]:
    if len(items) <= count:
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


# ---------------------------------------------------------------- the parameters file


def _encode(parameters: PunktParameters, language: str, source: str) -> bytes:
    """Encodes sorted, so that equal parameters give equal bytes."""
    body = {
        "abbreviations": sorted(parameters.abbreviations),
        "collocations": sorted(map(list, parameters.collocations)),
        "sentence_starters": sorted(parameters.sentence_starters),
        "contexts": dict(sorted(parameters.contexts.items())),
    }
    head = {"format": FORMAT, "version": VERSION, "language": language, "source": source}
    return json.dumps({**head, "checksum": _checksum({**head, **body}), **body}, indent=0).encode("ascii") + b"\n"


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode("ascii")).hexdigest()


def _load(path: Path, language: str) -> tuple[PunktParameters, str, str]:
    """Returns (parameters, source, checksum) of a parameters file; the source is "trained" or "learned"."""
    try:
        content = json.loads(path.read_bytes())
        checksum = content.pop("checksum")
        if content["format"] != FORMAT or content["version"] != VERSION or checksum != _checksum(content):
            raise ValueError("another format, version or checksum")
        parameters = PunktParameters(
            frozenset(content["abbreviations"]),
            frozenset((first, second) for first, second in content["collocations"]),
            frozenset(content["sentence_starters"]),
            content["contexts"],
        )
        written_for, source = content["language"], content["source"]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path}: damaged, or not sentence parameters; delete it and all outputs that it split, then run again"
        ) from error
    if written_for != language:
        raise ConfigError(
            f"--lang {language}: {path} is for {written_for}; give --lang {written_for}, or delete that file, "
            "or choose another --output-prefix"
        )
    return parameters, source, checksum
