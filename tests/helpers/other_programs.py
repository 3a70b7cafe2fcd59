"""The core's entries as the commands call them: with what reads other programs' files."""

from __future__ import annotations

from functools import partial

from megatron.checkpoint import found_step
from megatron.inference import model
from megatron.interop.source import OTHER_PROGRAMS
from megatron.training import settings

read_settings = partial(settings.read_settings, source=OTHER_PROGRAMS)
find_checkpoint = partial(found_step.find_checkpoint, source=OTHER_PROGRAMS)
subject_of = partial(model.subject_of, source=OTHER_PROGRAMS)
