"""Entry points of the core as the commands call them: with readers of other programs' files."""

from __future__ import annotations

from functools import partial

from megatron.checkpoint import found_step
from megatron.compat.deepspeed_file.source import deepspeed_assignments
from megatron.config import cli
from megatron.inference import model
from megatron.interop.source import OTHER_PROGRAMS
from megatron.training import settings

parse_args = partial(cli.parse_args, other_file=deepspeed_assignments)
read_settings = partial(settings.read_settings, source=OTHER_PROGRAMS, other_file=deepspeed_assignments)
find_checkpoint = partial(found_step.find_checkpoint, source=OTHER_PROGRAMS)
subject_of = partial(model.subject_of, source=OTHER_PROGRAMS)
