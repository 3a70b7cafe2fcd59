"""Recognises a Hugging Face model, or a name on its Hub, where --load expects a native checkpoint."""

import difflib
import json
import re
from pathlib import Path
from typing import Any

from megatron.errors import CheckpointError, ConfigError

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
ADAPTER = "adapter_config.json"
_TRACKER = "latest_checkpointed_iteration.txt"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def is_hugging_face(folder: Path) -> bool:
    """True if a folder holds a model of `transformers`, or only its configuration or weights. True also for an
    adapter, so that callers can report that it is one."""
    if (folder / _TRACKER).exists():
        return False
    if any((folder / name).is_file() for name in ("config.json", ADAPTER)):
        return True
    return any(next(folder.glob(pattern), None) is not None for pattern in _WEIGHTS)


def is_not_a_directory(path: Path) -> str:
    """Error text for a path that should be a directory."""
    if not path.exists():
        return f"no such directory{model_meant(path)}"
    if path.suffix == ".gguf":
        return (
            "is a file of llama.cpp, whose format is not supported; give the Hugging Face folder that it was made from"
        )
    return "is a file; give the folder of a model"


def refuse_hugging_face(folder: Path) -> None:
    """Raises if a folder holds a Hugging Face model. The error has the command that imports it."""
    if is_hugging_face(folder):
        raise ConfigError(
            f"--load {folder}: holds a Hugging Face model: import it with python tools/convert_checkpoint.py --load "
            f"{folder} --from hf --to native --save DIR, then give --load DIR (pretrain_gpt.py --finetune loads the "
            "model directly)"
        )


def may_be_on_hub(text: str) -> bool:
    """True for OWNER/NAME or a bare NAME, unless a local file or folder has the name before the slash."""
    return _HUB_NAME.fullmatch(text) is not None and not Path(text.partition("/")[0]).exists()


def tokenizer_on_hub(name: str) -> str:
    """The command that fetches a model's tokenizer from the Hub; empty if `name` cannot be there."""
    if not may_be_on_hub(name):
        return ""
    folder = name.rpartition("/")[2]
    return f"; from the Hugging Face Hub: hf download {name} --include 'tokenizer*' 'special*' --local-dir {folder}"


def model_meant(path: Path) -> str:
    """Suggests a fix for a missing path of a model: a similar name beside it, or how to fetch it from the Hub."""
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    models = [folder.name for folder in beside if (folder / _TRACKER).is_file() or is_hugging_face(folder)]
    if near := difflib.get_close_matches(path.name, models, n=1):
        return f"; did you mean {path.with_name(near[0])}?"
    if not may_be_on_hub(str(path)):
        return ""
    return (
        f"; if {path} is a model on the Hugging Face Hub, `hf download {path} --local-dir DIR` fetches it, "
        "pretrain_gpt.py --load DIR --finetune trains it further and tools/convert_checkpoint.py --load DIR --from hf "
        "imports it"
    )


def read_finite_json(path: Path) -> dict[str, Any]:
    """Reads the JSON object in a file of a Hugging Face model."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist; give the folder of a Hugging Face model") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); download it again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not a JSON object; download it again")
    return values


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")
