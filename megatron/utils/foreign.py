"""What --load may have been given instead of a checkpoint of ours: a Hugging Face model, or a name on its Hub."""

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
    """Whether it holds a model of `transformers`, or a part of one: its configuration or its weights. An adapter of one
    counts too, so that whoever opens it is told what it is, or what is missing."""
    if (folder / _TRACKER).exists():
        return False
    if any((folder / name).is_file() for name in ("config.json", ADAPTER)):
        return True
    return any(next(folder.glob(pattern), None) is not None for pattern in _WEIGHTS)


def is_not_a_directory(path: Path) -> str:
    """What to say of a path that should be a directory and is none."""
    if not path.exists():
        return "no such directory"
    if path.suffix == ".gguf":
        return "is a file of llama.cpp, whose format is not read; give the Hugging Face folder that it was made from"
    return "is a file; give the folder of a model"


def refuse_hugging_face(folder: Path) -> None:
    """Refuses it where a checkpoint of ours is meant, with the command that makes it one."""
    if is_hugging_face(folder):
        raise ConfigError(
            f"--load {folder}: holds a Hugging Face model: import it with python tools/convert_checkpoint.py --load "
            f"{folder} --from hf --to native --save DIR, then give --load DIR (pretrain_gpt.py --finetune takes the "
            "model as it is)"
        )


def hub_hint(path: Path) -> str:
    """For a path that does not exist: what to do if it is a name on the Hub. Empty if it cannot be."""
    if _HUB_NAME.fullmatch(str(path)) is None:
        return ""
    return (
        f"; if {path} is a model on the Hugging Face Hub, `hf download {path} --local-dir DIR` fetches it, "
        "pretrain_gpt.py --load DIR --finetune trains on from it and tools/convert_checkpoint.py --load DIR --from hf "
        "imports it"
    )


def read_finite_json(path: Path) -> dict[str, Any]:
    """The object in a file of a Hugging Face model."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist: not a Hugging Face model folder") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error})") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return values


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")
