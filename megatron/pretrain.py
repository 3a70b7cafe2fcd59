"""Entry points of training scripts. They connect the training core to the readers of other programs' files.

Your own script calls `pretrain(datasets_provider, model_provider, forward_step)`, as pretrain_gpt.py does. A `Hook`
adds code to the training loop. A script with its own loop calls `setup(argv)` for ranks, device and settings. Importing
this module does not load torch: torch is loaded after the command line was read, so `--help` and the error for a
mistyped flag appear at once.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.training.exit import StopReason
from megatron.training.hooks import Hook
from megatron.training.program import run_training
from megatron.utils.loading import before_torch
from megatron.utils.one_line_errors import install
from megatron.utils.waiting import sleep_at_once

if TYPE_CHECKING:
    from megatron.model.passes import ForwardStep
    from megatron.training.batches import DatasetsProvider
    from megatron.training.initialize import Run
    from megatron.training.model import ModelProvider

__all__ = ["Hook", "pretrain", "setup"]

install()
before_torch(trains=True)


def pretrain(
    datasets_provider: "DatasetsProvider",
    model_provider: "ModelProvider",
    forward_step: "ForwardStep",
    argv: Sequence[str] | None = None,
    *,
    needs_data: bool = True,
    hooks: Sequence[Hook] = (),
) -> StopReason:
    """Trains with the settings of the command line. An error prints one line and ends the process with its exit code.

    With `needs_data=False` the script makes its own datasets, so neither --data-path nor a tokenizer is required. A
    dataset needs `len` and `[i]`, and its samples are dicts. `forward_step` gets the samples of a batch stacked by key,
    with their `sample_ids`. It must cast the inputs of a model in half precision. See `Hook` for `hooks`.
    """
    from megatron.compat.deepspeed_file.source import deepspeed_assignments
    from megatron.interop.source import OTHER_PROGRAMS

    return run_training(
        datasets_provider,
        model_provider,
        forward_step,
        argv,
        needs_data=needs_data,
        hooks=hooks,
        source=OTHER_PROGRAMS,
        other_file=deepspeed_assignments,
    )


def setup(argv: Sequence[str] | None = None, *, needs_data: bool = True) -> "Run":
    """Prepares a script that has its own training loop: reads settings, connects ranks, seeds random streams. Errors in
    the settings are raised before the ranks connect. The script must end with
    `megatron.distributed.launch.shutdown()`."""
    sleep_at_once()
    from megatron.compat.deepspeed_file.source import deepspeed_assignments
    from megatron.config import describe
    from megatron.interop.source import OTHER_PROGRAMS
    from megatron.training.initialize import start
    from megatron.training.settings import read_settings

    config = read_settings(argv, needs_data=needs_data, source=OTHER_PROGRAMS, other_file=deepspeed_assignments)
    run = start(config, needs_data=needs_data, source=OTHER_PROGRAMS)
    if run.config.runtime.print_config:
        run.log.info(*describe(run.config).split("\n"))
        sys.exit(0)
    return run
