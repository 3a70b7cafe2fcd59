"""Checks a launch before any process starts: `python -m megatron.cli.check_launch RANKS FLAGS...`

An error is printed once, while a launch would print it once per rank. With --dry-run, missing files are reported but
are not errors, because a launch may be planned before its data exists. This module does not load torch.
"""

import sys
from collections.abc import Sequence

from megatron.compat.deepspeed_file.source import deepspeed_assignments
from megatron.config import check_world
from megatron.config.refusals import Refusals
from megatron.errors import MegatronError
from megatron.interop.source import OTHER_PROGRAMS
from megatron.training.settings import read_settings


def check_launch(ranks: int, flags: Sequence[str]) -> tuple[str, ...]:
    """Returns lines about missing files (only with --dry-run). Raises a ConfigError if a launch would be rejected."""
    absent = Refusals() if "--dry-run" in flags else None
    config = read_settings(flags, absent=absent, source=OTHER_PROGRAMS, other_file=deepspeed_assignments)
    check_world(config, ranks)
    return () if absent is None else absent.lines


def main(argv: Sequence[str]) -> int:
    try:
        for line in check_launch(int(argv[0]), argv[1:]):
            print(f"before a launch: {line}")
    except MegatronError as error:
        print("\n".join(f"error: {line}" for line in error.lines), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
