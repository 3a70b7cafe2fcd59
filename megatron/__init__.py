"""A Megatron-style pretraining framework. Importing it loads nothing heavy: `--help` needs no torch.

`megatron.pretrain` has the training loop for your own script.

For a model and a loop of your own: `megatron.initialize(model=..., optimizer=..., config=...)` is DeepSpeed's call
(`add_config_arguments` and `init_distributed` may come before it), `OSS` and `ShardedDataParallel` are FairScale's
pair, and `DistributedDataParallel` has the shape of torch's.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

if sys.version_info < (3, 11):  # noqa: UP036 - a checkout can meet an older one, which fails with a riddle
    print(
        f"error: Python {sys.version.split()[0]} at {sys.executable}: not supported; use Python 3.11 to 3.13 "
        "(bash examples/quickstart.sh finds one and makes a .venv with it)",
        file=sys.stderr,
    )
    raise SystemExit(2)

__version__ = "0.1.0"
__all__ = [
    "OSS",
    "DistributedDataParallel",
    "ShardedDataParallel",
    "__version__",
    "add_config_arguments",
    "init_distributed",
    "initialize",
]

_LAZY = {
    "DistributedDataParallel": "megatron.compat.ddp",
    "OSS": "megatron.compat.fairscale.oss",
    "ShardedDataParallel": "megatron.compat.fairscale.sharded_ddp",
    "add_config_arguments": "megatron.compat.any_model",
    "init_distributed": "megatron.compat.any_model",
    "initialize": "megatron.compat.any_model",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import_module("megatron.utils.one_line_errors").install()
        import_module("megatron.utils.loading").before_torch()
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'megatron' has no attribute '{name}'")
