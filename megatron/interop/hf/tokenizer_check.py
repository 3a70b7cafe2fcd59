"""Checks that `transformers` reads a folder's tokenizer as our run does. A fresh process without this project's package
compares ids, offsets, text, special tokens, a padded batch, and `pipeline`."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.interop.hf.families import by_model_type
from megatron.tokenizer.base import gives_up, library_errors
from megatron.tokenizer.for_transformers import JSON, TokenizerFiles, is_qwen2
from megatron.tokenizer.huggingface import ROLES, load_tokenizers
from megatron.utils.cpu import available_memory
from megatron.utils.foreign import read_finite_json

PYTHON = sys.executable
PROGRAM = Path(__file__).with_name("auto_tokenizer.py")
TEXTS = (
    "a",
    "Hello world, it's 2026: don't they'LL",
    "0 1 12 123 1234 12345 1234567890 3.14159 1,000,000 2024-01-01 ١٢٣ ² ⅷ",
    "  two  spaces   three\tand\t\ttabs \u00a0no-break\u3000wide ",
    "caf\u00e9 cafe\u0301 na\u00efve \u00fcber u\u0308ber \u212b \ufb01ne \u1e9b\u0323",
    "🙂 👩\u200d👩\u200d👧\u200d👦 👍🏽 🇩🇪 \u2764\ufe0f",
    "one\ntwo\n\nthree\r\nfour\n\n\n  five \n",
    "def f(x):\n    if x >= 10:\n\t\treturn x**2  # square\n    return {'a': [1, 2]}\n\n\nclass A: ...",
    "東京は日本の首都です。Привет, мир! שלום עולם مرحبا बहुत",
    "ALL CAPS CamelCase snake_case kebab-case http://a.b/c?d=e&f=%20 <b>&amp;</b> ... --- !!!???",
)
_TOKENS = 12
"""Number of added tokens that are compared, from both ends of the list."""


@dataclass(frozen=True)
class Expected:
    """Results of this project's tokenizer, in the form in which auto_tokenizer.py answers."""

    request: dict[str, Any]
    texts: list[dict[str, Any]]
    tokens: dict[str, int | None]
    rows: int


def ask_fresh(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the answer of auto_tokenizer.py in a fresh process."""
    command = [PYTHON, str(PROGRAM)]
    done = subprocess.run(
        command, input=json.dumps(request) + "\n", capture_output=True, encoding="utf-8", errors="replace"
    )
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        answer = {"error": last}  # Python itself failed
    return answer


def compare_tokenizer(expected: Expected, advice: str) -> str:
    """Raises unless the folder is read as expected. Returns one line about what was compared."""
    answer = ask_fresh(expected.request)
    if problem := first_misreading(expected, answer):
        version = answer.get("version") or "(version unknown)"
        raise CheckpointError(f"{expected.request['folder']}: transformers {version} {problem}; {advice}")
    ran = ", and its pipeline runs" if answer["pipeline"] is not None else ""
    return (
        f"transformers {answer['version']} encodes and decodes {len(expected.texts)} texts alike "
        f"(ids, offsets, special tokens, a padded batch){ran}"
    )


def check_folder(folder: Path, run: TokenizerFiles | None) -> str:
    """Raises unless `transformers` reads a folder's tokenizer like `run`, the tokenizer of the run that exported it.
    Without `run`, the folder's own tokenizer.json is the reference. Returns one line about what was compared."""
    if not folder.is_dir():
        raise ConfigError(f"--check {folder}: no such directory; give an exported folder")
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(f"--check {folder}: needs the transformers package; run pip install transformers")
    own = TokenizerFiles.of(folder)
    if not own.has_json:
        raise ConfigError(f"--check {folder}: has no {JSON}; give an exported folder with a tokenizer")
    values = read_finite_json(folder / "config.json")
    advice = "export it again with tools/convert_checkpoint.py --to hf"
    if type(rows := values.get("vocab_size")) is not int:
        raise ConfigError(f"--check {folder}: its config.json has no vocab_size; give an exported folder")
    if by_model_type(values.get("model_type")).rebuilds_tokenizer and not is_qwen2(own.json(JSON)):
        raise CheckpointError(
            f"{folder}: transformers 5.8 and later read its tokenizer as Qwen2's, because its model_type is "
            f"{values['model_type']}; {advice}"
        )
    context = values.get("max_position_embeddings") or values.get("n_positions")
    size, free = sum(path.stat().st_size for path in folder.iterdir()), available_memory()
    expected = expected_of(
        run or own, folder, rows, context if type(context) is int else 96, pipeline=free is None or 2 * size < free
    )
    against = f"its own {JSON}" if run is None else f"the tokenizer in {run.folder}"
    return f"compared {folder} with {against}: {compare_tokenizer(expected, advice)}"


def expected_of(source: TokenizerFiles, folder: Path, rows: int, context: int, *, pipeline: bool) -> Expected:
    """Returns the results of the tokenizer in `source` for the texts, to compare `folder` with them."""
    tokenizer, plain, roles = source.tokenizer(), load_tokenizers(source.folder / JSON), source.roles(rows)
    # transformers matches every special token in texts; a run never does in its documents.
    listed = {token.content for token in plain.get_added_tokens_decoder().values()}
    plain.add_special_tokens(sorted({*roles.values()} - listed))
    added = [token.content for token in plain.get_added_tokens_decoder().values()]
    texts, answers = [], []
    for text in (*TEXTS, *_around_each(added)):
        try:
            with library_errors(gives_up(tokenizer.name)):
                encoding, whole = plain.encode(text, add_special_tokens=False), plain.encode(text)
            ids = encoding.ids if any(token in text for token in added) else tokenizer.tokenize(text)
        except DataError:  # a run rejects this text, for example because of a letter that the vocabulary lacks
            continue
        texts.append(text)
        decoded = tokenizer.detokenize(ids)
        offsets = [list(pair) for pair in encoding.offsets]
        answers.append({"ids": ids, "offsets": offsets, "whole": whole.ids, "decoded": decoded})
    short = (t for t, a in zip(texts, answers, strict=True) if 0 < len(a["whole"]) < context and max(a["whole"]) < rows)
    request = {
        "folder": str(folder.resolve()),
        "texts": texts,
        "roles": ROLES,
        "prompt": next(short, None) if pipeline else None,
    }
    tokens = {role: tokenizer.token_id(roles[role]) if role in roles else None for role in ROLES}
    return Expected(request, answers, tokens, rows)


def _around_each(tokens: Sequence[str]) -> list[str]:
    some = [*tokens[: _TOKENS // 2], *tokens[_TOKENS // 2 :][-_TOKENS // 2 :]]
    return [f"one {token}two{token} 3 {token}\n" for token in some]


def first_misreading(expected: Expected, answer: dict[str, Any]) -> str | None:
    """Describes the first difference in the answer of auto_tokenizer.py; None if there is none."""
    if "error" in answer:
        return f"does not open it ({answer['error']:.300})"
    for text, ours, theirs in zip(expected.request["texts"], expected.texts, answer["texts"], strict=True):
        for what, name in (("ids", "ids"), ("whole", "ids with special tokens"), ("offsets", "offsets")):
            if ours[what] != theirs[what]:
                return f"reads {text!r:.60} as the {name} {_around(theirs[what], ours[what])}"
        if ours["decoded"] != theirs["decoded"]:
            return f"decodes {text!r:.60} to {theirs['decoded']!r:.80}, the run's tokenizer to {ours['decoded']!r:.80}"
    for role, index in expected.tokens.items():
        if answer["tokens"][role] != index:
            return f"has {role}_id {answer['tokens'][role]}, the run's tokenizer {index}"
    return _batch_difference(expected, answer["batch"]) or _pipeline_difference(expected, answer["pipeline"])


def _around(theirs: list[Any], ours: list[Any]) -> str:
    """Shows both lists near their first difference."""
    at = next((n for n, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(len(theirs), len(ours)))
    part = slice(max(at - 1, 0), at + 4)
    return f"{theirs[part]}, the run's tokenizer as {ours[part]} (from element {part.start + 1} on)"


def _batch_difference(expected: Expected, batch: dict[str, Any] | None) -> str | None:
    if batch is None:
        return None
    if batch["keys"] != ["attention_mask", "input_ids"]:
        return f"gives the model {', '.join(batch['keys'])}, instead of only input_ids and attention_mask"
    for ids, mask, ours in zip(batch["ids"], batch["mask"], expected.texts, strict=True):
        kept = [index for index, use in zip(ids, mask, strict=True) if use]
        filled = {index for index, use in zip(ids, mask, strict=True) if not use}
        if kept != ours["whole"] or not filled <= {batch["pad"]}:
            return f"pads a batch to {ids[:8]}, but the text has the ids {ours['whole'][:8]}"
    if not 0 <= batch["pad"] < expected.rows:
        return f"pads with the id {batch['pad']}, but the token embedding has {expected.rows} rows"
    return None


def _pipeline_difference(expected: Expected, pipeline: dict[str, Any] | None) -> str | None:
    if pipeline is None:
        return None
    for text, ours, whole in zip(expected.request["texts"], expected.texts, pipeline["whole"], strict=True):
        if whole != ours["whole"]:
            return f"reads {text!r:.60} in a pipeline as {_around(whole, ours['whole'])}"
    return None
