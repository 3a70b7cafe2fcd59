"""Suggests a command if --data-path is text, or the name of a dataset on the Hugging Face Hub."""

import json
import re
import shlex
from pathlib import Path

from megatron.config.blend import datasets_of
from megatron.config.run import RunConfig
from megatron.utils.foreign import may_be_on_hub
from megatron.utils.plain_text import is_plain_text, json_lines_command

_PEEK = 65536


def fix_of_prefix(config: RunConfig, flag: str, prefix: str) -> str | None:
    """Returns the reason and the fix if `prefix` is text or a name on the Hub. None for all else, and if datasets with
    this prefix exist."""
    path = Path(prefix)
    if path.suffix in (".bin", ".idx") or Path(f"{prefix}.idx").exists() or datasets_of(path):
        return None
    if path.is_file():
        key = _key_of_text(path)
        return None if key is None else _preprocess(config, flag, path, key)
    if not path.exists() and may_be_on_hub(prefix):
        folder = path.name
        return (
            f"no such file; for a dataset of the Hugging Face Hub: hf download {prefix} --repo-type dataset "
            f"--local-dir {folder}; then python tools/preprocess_data.py --input {folder} --output-prefix {folder} ..."
        )
    return None


def _key_of_text(path: Path) -> str | None:
    """Returns the JSON key of the text in the first line: "text" or, without that key, the key of the longest string.
    None if the file is not text."""
    with path.open("rb") as file:
        beginning = file.read(_PEEK)
    try:
        text = beginning.decode("utf-8", errors="strict" if len(beginning) < _PEEK else "ignore")
        first = json.loads(text.partition("\n")[0])
    except UnicodeDecodeError:
        return None
    except (ValueError, RecursionError):
        keys = re.findall(r'"([^"\\]{1,80})"\s*:\s*"', text) if text.startswith("{") and "\n" not in text else []
        return (
            None if "\0" in text else "text" if "text" in keys or not keys else keys[-1]
        )  # the last key: its text is longer than the part that was read
    texts = {name: value for name, value in first.items() if isinstance(value, str)} if isinstance(first, dict) else {}
    return "text" if "text" in texts or not texts else max(texts, key=lambda name: len(texts[name]))


def _preprocess(config: RunConfig, flag: str, path: Path, key: str) -> str:
    output, tokenizer = path.with_suffix(""), config.tokenizer
    first, lines = json_lines_command(str(path)) if is_plain_text(path) else ("", str(path))
    words = ["python", "tools/preprocess_data.py", "--input", lines, "--output-prefix", str(output)]
    words += [] if key == "text" else ["--json-keys", key]
    for name in ("tokenizer_type", "vocab_file", "merge_file", "tokenizer_model", "vocab_size"):
        value = getattr(tokenizer, name)
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    words.append("--append-eod")
    line = f"{first} && {shlex.join(words)}" if first else shlex.join(words)
    return f"this is text, not a dataset; make one: {line} ; then give {flag} {output}_{key}_document"
