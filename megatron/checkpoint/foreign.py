"""What --load may have been given instead of a checkpoint of ours: a Hugging Face folder, or a name on its Hub."""

from __future__ import annotations

import re
from pathlib import Path

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def is_hugging_face(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def way_in(folder: Path) -> str:
    """How a Hugging Face folder becomes a checkpoint of ours."""
    return (
        f"it holds a Hugging Face model: import it with tools/convert_checkpoint.py --from hf --load {folder} "
        "--to native --save DIR, then --load DIR"
    )


def hub_hint(path: Path) -> str:
    """For a path that does not exist: what to do if it is a name on the Hub. Empty if it cannot be."""
    if _HUB_NAME.fullmatch(str(path)) is None:
        return ""
    return f"; if {path} is a model on the Hugging Face Hub, `hf download {path} --local-dir DIR` fetches it"
