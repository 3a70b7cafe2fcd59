"""Drop-in calls of DeepSpeed, FairScale and torch, for your own model and training loop.

`initialize(model=..., optimizer=..., config=...)` is DeepSpeed's call; `add_config_arguments` and `init_distributed`
may precede it. `OSS` and `ShardedDataParallel` follow FairScale, `DistributedDataParallel` follows torch. Each name is
imported on first access.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.compat.any_model import add_config_arguments, init_distributed, initialize
    from megatron.compat.ddp import DistributedDataParallel
    from megatron.compat.fairscale.oss import OSS
    from megatron.compat.fairscale.sharded_ddp import ShardedDataParallel

__all__ = [
    "OSS",
    "DistributedDataParallel",
    "ShardedDataParallel",
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
    raise AttributeError(f"module 'megatron.compat' has no attribute '{name}'")
