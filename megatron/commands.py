"""Commands in messages: `python tools/generate.py` in a checkout, `megatron-generate` in an installed package.

Messages in the code use the first form. In an installed package, `as_typed_here` replaces it by the second.
"""

import importlib.metadata
import json
import re
import shlex
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_DISTRIBUTION = "megatron-anywhere"
IN_CHECKOUT = (_ROOT / "csrc" / "build.py").is_file()
TOOLS = (
    *("check_layout", "convert_checkpoint", "draw_pipeline", "env", "evaluate", "generate", "harness"),
    *("inspect_dataset", "merge_datasets", "plot_loss", "preprocess_data", "profile_summary", "results_table"),
    *("train_tokenizer", "verify_checkpoint"),
)
"""Files of tools/ that are also installed as commands. Each has a module of the same name in `megatron.cli`."""
_SHORT = {"convert_checkpoint": "convert", "preprocess_data": "preprocess"}
_FILE = re.compile(
    rf"(?P<torchrun>\btorchrun(?: --?[\w=-]+(?: \d+)?)* )?(?:\bpython3? )?(?<![\w./-])"
    rf"(?:(?:tools/)?(?P<tool>{'|'.join(TOOLS)})|pretrain_gpt)\.py\b"
)


def script(tool: str) -> str:
    """Returns the installed command of a tool, such as megatron-convert for convert_checkpoint."""
    return f"megatron-{_SHORT.get(tool, tool).replace('_', '-')}"


def as_typed_here(text: str, *, in_checkout: bool = IN_CHECKOUT) -> str:
    """Replaces script names in a text by the installed commands, unless this is a checkout."""
    return text if in_checkout else _FILE.sub(_installed, text)


def _installed(found: re.Match[str]) -> str:
    tool = found["tool"]
    if found["torchrun"]:
        return f"{found['torchrun']}-m megatron.cli.{tool or 'train'}"
    return script(tool or "train")


def build_command(root: Path = _ROOT) -> str:
    """Returns the command that builds the kernels and the index builders."""
    if (root / "csrc" / "build.py").is_file():
        return "python csrc/build.py"
    return shlex.join(["pip", "install", "--force-reinstall", "--no-deps", *_origin(root)])


def _origin(root: Path) -> list[str]:
    """Returns the pip arguments that install the package from source again: the sources' location, or the name."""
    found = next(iter(importlib.metadata.distributions(name=_DISTRIBUTION, path=[str(root)])), None)
    record = json.loads((found.read_text("direct_url.json") if found else None) or "{}")
    if "vcs_info" in record:
        return [f"{record['vcs_info']['vcs']}+{record['url']}"]
    if "dir_info" in record:
        return [record["url"]]
    return ["--no-binary", _DISTRIBUTION, _DISTRIBUTION]
