"""The command line of tools/verify_checkpoint.py. Exit codes: 0 good, 1 corrupt or extra files, 2 usage, 3 unsafe,
4 incomplete."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.errors import CheckpointError, ConfigError, printable
from megatron.utils.command_line import Parser, run_tool
from megatron.utils.log import print_line, print_lines

if TYPE_CHECKING:
    from megatron.checkpoint.step_source import ForeignStep

EXIT = {"corrupt": 1, "extra": 1, "unsafe": 3, "incomplete": 4}


def parser() -> Parser:
    p = Parser(
        prog="verify_checkpoint.py",
        description="Check a checkpoint against its manifest. Exit code: 0 good, 1 corrupt or with files that "
        "the manifest does not list, 2 usage, 3 unsafe, 4 incomplete.",
    )
    p.add_argument("directory", type=Path, nargs="?", help="A run's save directory, or one of its iter_* directories.")
    p.add_argument("--load", type=Path, metavar="DIR", help="The same directory, as a flag as in the other tools.")
    p.add_argument("--all", action="store_true", help="Check every step, not only the one that --load would read.")
    p.add_argument(
        "--compare",
        type=Path,
        nargs=2,
        metavar=("A", "B"),
        help="Name the first tensor in which two checkpoints differ.",
    )
    p.add_argument("--deep", action="store_true", help="Also read every tensor: shape, dtype, finite values.")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    return run_tool("error", lambda: verify(parser().parse_known_flags(argv)))


def verify(arguments: argparse.Namespace) -> int:
    if arguments.compare is not None:
        return _compare(arguments)
    if (arguments.directory is None) == (arguments.load is None):
        raise ConfigError("give one directory: the one that a run's --save names, or an iter_* in it; see --help")
    directory: Path = arguments.directory or arguments.load
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "no such directory"
        raise ConfigError(f"{directory}: {what}; give the directory that a run's --save names, or an iter_* in it")
    from megatron.checkpoint.find import refuse_shares
    from megatron.checkpoint.verify import inspect_step
    from megatron.interop.megatron_lm import open_foreign
    from megatron.report import step_summary
    from megatron.torch_files.member_checks import DamagedMemberError

    refuse_shares(directory, str(directory))
    chosen, codes = _steps(directory, everything=arguments.all)
    for step in chosen:
        try:
            foreign = open_foreign(step, lambda text: print_line(f"warning: {text}"))
        except DamagedMemberError as error:
            print_line(f"{step.name}: corrupt: {printable(str(error))}")
            codes.append(EXIT["corrupt"])
            continue
        except CheckpointError as error:
            print_line(f"{step.name}: {_kind(error)}: {printable(str(error))}")
            codes.append(EXIT[_kind(error)])
            continue
        if foreign is not None:
            codes += _tell_foreign(step, foreign, deep=arguments.deep)
            continue
        record, problems = inspect_step(step, deep=arguments.deep)
        for problem in problems:
            print_line(f"{step.name}: {problem.kind}: {printable(problem.text)}")
        if record is not None and not problems:
            print_lines([f"{step.name}: good", *(f"  {line}" for line in step_summary.lines(record))])
        codes += [EXIT[problem.kind] for problem in problems]
    for line in step_summary.set_aside(directory):
        print_line(line)
    # The most severe problem decides: unsafe, then corrupt, then incomplete.
    return next((code for code in (3, 1, 4) if code in codes), 0)


def _kind(error: CheckpointError) -> str:
    from megatron.checkpoint.paths import UnsafePathError
    from megatron.torch_files.safe_load import MissingPartError, UnsafeFileError

    if isinstance(error, (UnsafeFileError, UnsafePathError)):
        return "unsafe"
    return "incomplete" if isinstance(error, MissingPartError) else "corrupt"


def _tell_foreign(step: Path, foreign: "ForeignStep", *, deep: bool) -> list[int]:
    """Reports a step of Megatron-LM, whose files and shapes were checked on opening. With `deep`, reads all tensors to
    compare checksums. Returns the exit codes of faults."""
    from megatron.checkpoint.manifest import all_tensors
    from megatron.report import step_summary
    from megatron.torch_files.member_checks import DamagedMemberError

    try:
        for name, record in all_tensors(foreign.manifest) if deep else ():
            foreign.reader.logical(name, record)
    except DamagedMemberError as error:
        print_line(f"{step.name}: corrupt: {printable(str(error))}")
        return [EXIT["corrupt"]]
    told = "all its tensors were read" if deep else "the bytes of its tensors were not read (--deep reads them)"
    lines = (f"  {line}" for line in step_summary.lines(foreign.manifest))
    print_lines([f"{step.name}: complete, written by Megatron-LM; {told}", *lines])
    if foreign.optimizer_problem is not None:
        print_line(f"  note: {foreign.optimizer_problem}")
    return []


def _compare(arguments: argparse.Namespace) -> int:
    """Compares two checkpoints. Returns the exit code: 0 if they are equal, else 1."""
    if arguments.directory is not None or arguments.load is not None:
        raise ConfigError("--compare A B: takes only these two directories; remove the third one")
    from megatron.interop.compare import first_difference, open_step

    one, other = (open_step(directory) for directory in arguments.compare)
    difference = first_difference(one, other)
    print_line(
        difference or f"equal: {one.directory} and {other.directory}, every bit of {len(one.manifest.model)} tensors"
    )
    return 0 if difference is None else EXIT["corrupt"]


def _steps(directory: Path, *, everything: bool) -> tuple[list[Path], list[int]]:
    """Returns the step directories to check, and an exit code for each fault of the save directory itself."""
    from megatron.checkpoint import paths
    from megatron.report import step_summary

    if why := step_summary.meaning(directory.name):
        print_line(f"{directory.name}: incomplete: {why}")
        return [], [EXIT["incomplete"]]
    if (directory / paths.MANIFEST).exists() or paths.step_of(directory.name) is not None:
        return [directory], []
    tracker = paths.read_tracker(directory)
    steps = [paths.step_directory(directory, step) for step in paths.list_steps(directory)]
    release = directory / paths.RELEASE
    if release.is_dir():
        steps.append(release)
    named = release if tracker.release else paths.step_directory(directory, tracker.step or 0)
    if tracker.problem is None and named in steps:
        return (steps if everything else [named]), []
    problem = tracker.problem or f"{directory / paths.TRACKER} names {named.name}, which does not exist"
    print_line(f"{directory}: incomplete: {problem}")
    return (steps if everything else steps[:1]), [EXIT["incomplete"]]
