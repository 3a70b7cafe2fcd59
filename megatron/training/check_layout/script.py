"""The pretrain script whose layout is compared: how it is loaded, and how one rank trains with it."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from megatron.errors import ConfigError
from megatron.training.check_layout.errors import in_one_line

if TYPE_CHECKING:
    from megatron.config import RunConfig
    from megatron.training.check_layout.outcome import RankOutcome

PRETRAIN_GPT = Path(__file__).resolve().parents[3] / "pretrain_gpt.py"
_PROVIDERS = ("datasets_provider", "model_provider", "forward_step")


def load_script(path: str | None) -> ModuleType:
    """The module of `path`, by default that of pretrain_gpt.py; it must have the three providers."""
    file = PRETRAIN_GPT if path is None else Path(path)
    spec = importlib.util.spec_from_file_location("pretrain_script", file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"--script {file}: no such Python file; name a pretrain script")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a script that trains when it is imported leaves by SystemExit
        raise ConfigError(f"--script {file}: cannot be imported: {in_one_line(error)}; {_form()}") from error
    missing = [name for name in _PROVIDERS if not hasattr(module, name)]
    if missing:
        raise ConfigError(f"--script {file}: has no {', '.join(missing)}; {_form()}")
    return module


def _form() -> str:
    return (
        "give a script with the three providers of pretrain_gpt.py that calls pretrain() under "
        '`if __name__ == "__main__"`'
    )


def train_rank(
    script: ModuleType, config: RunConfig, rank: int, ranks: int, *, steps: int, fault: str | None
) -> RankOutcome:
    """Trains a few steps as one rank of the layout, in fp64 and silently, with a planted fault if one is named."""
    import torch

    from megatron.distributed.launch import LaunchInfo
    from megatron.training.assemble import assemble
    from megatron.training.check_layout.faults import FAULTS
    from megatron.training.check_layout.outcome import train_outcome
    from megatron.training.initialize import build_run
    from megatron.utils.log import RankLog

    launch = LaunchInfo(rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks)
    log = RankLog(rank, io.StringIO())
    run = build_run(config, launch, device=torch.device("cpu"), dtype=torch.float64, log=log, needs_data=False)
    with assemble(run, script.datasets_provider, script.model_provider, script.forward_step) as parts:
        if fault is not None:
            FAULTS[fault](parts)
        return train_outcome(parts, steps)
