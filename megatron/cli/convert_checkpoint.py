"""The command line of tools/convert_checkpoint.py: converts checkpoints from and to other formats."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from megatron.compat.renamed_tools import converting
from megatron.errors import ConfigError
from megatron.utils.command_line import Parser, dtype_name, integer, run_tool
from megatron.utils.foreign import is_hugging_face, is_not_a_directory
from megatron.utils.log import print_line
from megatron.utils.numerals import INT32, LARGEST_WORLD, size_in_bytes
from megatron.utils.progress import ByteProgress

if TYPE_CHECKING:
    from megatron.checkpoint.found_step import FoundStep
    from megatron.interop.megatron_lm.write import TargetLayout


def parser(*, check: bool = False) -> Parser:
    """Returns the parser. For a command with --check (`check`), no other flag is required."""
    p = Parser(
        prog="convert_checkpoint.py",
        description="Converts a checkpoint. --to hf writes a folder with the run's tokenizer, which transformers opens "
        "offline. The folder gets its final name only if its logits and token ids equal those of the run.",
    )
    p.add_argument(
        "--check",
        type=Path,
        metavar="FOLDER",
        help="Check a folder that was exported earlier, without a conversion: transformers must read its tokenizer "
        "like the run's tokenizer (--load), or like its own tokenizer.json.",
    )
    p.add_argument(
        "--load", type=Path, required=not check, help="A run's save directory, or a Hugging Face model folder."
    )
    p.add_argument("--ckpt-step", type=integer(0), help="Iteration to convert (default: the newest).")
    p.add_argument(
        "--from", dest="source", choices=("native", "hf", "megatron"), help="Format of --load (default: detected)."
    )
    p.add_argument(
        "--true-vocab-size", type=integer(1, INT32), help="Vocabulary size without padding (--from megatron)."
    )
    p.add_argument(
        "--target-tensor-parallel-size", type=integer(1, LARGEST_WORLD), metavar="N", help="TP size for Megatron (1)."
    )
    p.add_argument(
        "--target-pipeline-parallel-size", type=integer(1, LARGEST_WORLD), metavar="N", help="PP size for Megatron (1)."
    )
    p.add_argument(
        "--megatron-names",
        choices=("classic", "core", "te"),
        help="Parameter names (--to megatron): of 23.06 (classic, the default), of Megatron core, or of core with "
        "Transformer Engine.",
    )
    p.add_argument("--to", required=not check, choices=("hf", "native", "megatron"), help="Format of --save.")
    p.add_argument("--save", type=Path, required=not check, help="Folder to write.")
    p.add_argument(
        "--dtype",
        type=dtype_name,
        choices=("float32", "bfloat16", "float16"),
        help="Precision of the export (--to hf; default: as trained).",
    )
    p.add_argument("--max-shard-size", help="Largest file of weights, such as 500MB or 2GB (--to hf; default: 5GB).")
    p.add_argument(
        "--no-safe-serialization",
        action="store_true",
        help="Write pytorch_model.bin instead of safetensors (--to hf).",
    )
    p.add_argument("--verify", action="store_true", help="Fail if logits cannot be compared (--to hf).")
    p.add_argument("--overwrite", action="store_true", help="Replace --save if it exists.")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv

    def convert() -> None:
        _refuse_theirs(words)
        checks = any(word.partition("=")[0] == "--check" for word in words)
        arguments = parser(check=checks).parse_known_flags(argv)
        check_exported_folder(arguments) if checks else convert_checkpoint(arguments)

    return run_tool("error", convert)


def _refuse_theirs(words: Sequence[str]) -> None:
    """Rejects flags of Megatron-LM's own converter."""
    names = [word.partition("=")[0] for word in words]
    theirs = [name for name in names if name in ("--model-type", "--loader", "--saver", "--load-dir", "--save-dir")]
    if theirs:
        raise ConfigError(f"{', '.join(theirs)}: flags of Megatron-LM's converter; run: {converting(words)}")
    if "--target-expert-parallel-size" in names:
        raise ConfigError(
            "--target-expert-parallel-size: --to megatron writes all experts for expert-parallel size 1; remove the "
            "flag, and divide the experts with Megatron-LM's own tools/checkpoint/convert.py"
        )


def check_exported_folder(arguments: argparse.Namespace) -> None:
    from megatron.interop.hf.tokenizer_check import check_folder

    given = [name for name, value in vars(arguments).items() if value and name not in ("check", "load", "ckpt_step")]
    if others := [f"--{name.replace('_', '-')}" for name in given if not name.startswith("_")]:
        raise ConfigError(f"--check {arguments.check}: converts nothing; remove {', '.join(others)}")
    arguments.source = "native"
    found = None if arguments.load is None else _found(arguments)
    tokenizer = None if found is None else found.tokenizer_files
    if found is not None and (tokenizer is None or not tokenizer.has_json):
        raise ConfigError(f"--load {arguments.load}: has no tokenizer.json to compare with; remove --load")
    print_line(check_folder(arguments.check, tokenizer))


def convert_checkpoint(arguments: argparse.Namespace) -> None:
    if not arguments.load.exists():
        raise ConfigError(f"--load {arguments.load}: {is_not_a_directory(arguments.load)}")
    if arguments.source is None:
        arguments.source = _format(arguments.load, arguments.ckpt_step)
    if arguments.source == arguments.to and arguments.to != "megatron":
        raise ConfigError(f"--to {arguments.to}: --load has this format already; give another format")
    if arguments.true_vocab_size is not None and arguments.source != "megatron":
        given = f"--true-vocab-size {arguments.true_vocab_size}"
        raise ConfigError(f"{given}: has no effect without --from megatron; remove the flag")
    _refuse_targets(arguments)
    if arguments.overwrite:
        from megatron.interop.conversion import refuse_what_must_stay

        refuse_what_must_stay(arguments.load, arguments.save)
    if arguments.to == "hf":
        to_hugging_face(arguments)
    elif arguments.to == "megatron":
        save_for_megatron(arguments)
    elif arguments.source == "megatron":
        from_megatron(arguments)
    else:
        from_hugging_face(arguments)


def _format(directory: Path, step: int | None) -> str:
    """Returns the format of the checkpoint or model in a directory."""
    if is_hugging_face(directory):
        return "hf"
    from megatron.checkpoint.find import find_candidates
    from megatron.interop.megatron_lm import open_foreign

    candidates = find_candidates(directory, step=step, strict=True).directories
    return "megatron" if open_foreign(candidates[0]) is not None else "native"


def _refuse_targets(arguments: argparse.Namespace) -> None:
    """Rejects flags of a format that is neither read nor written."""
    for flag in ("target_tensor_parallel_size", "target_pipeline_parallel_size", "megatron_names"):
        value = getattr(arguments, flag)
        if value is not None and arguments.to != "megatron":
            raise ConfigError(f"--{flag.replace('_', '-')} {value}: has no effect without --to megatron; remove it")
    given = {"--dtype": arguments.dtype, "--max-shard-size": arguments.max_shard_size, "--verify": arguments.verify}
    given |= {"--no-safe-serialization": arguments.no_safe_serialization}
    for flag, value in given.items():
        if value and arguments.to != "hf":
            raise ConfigError(f"{flag}{f' {value}' * (value is not True)}: has no effect without --to hf; remove it")
    if arguments.ckpt_step is not None and arguments.source == "hf":
        raise ConfigError(f"--ckpt-step {arguments.ckpt_step}: does not apply to --from hf; remove the flag")


def save_for_megatron(arguments: argparse.Namespace) -> None:
    from megatron.interop.megatron_lm.write import TargetLayout, to_megatron

    taken = arguments.save.exists() and (not arguments.save.is_dir() or any(arguments.save.iterdir()))
    if taken and not arguments.overwrite:
        raise ConfigError(f"--save {arguments.save}: exists already; give another directory, or --overwrite")
    target = TargetLayout(
        1 if arguments.target_tensor_parallel_size is None else arguments.target_tensor_parallel_size,
        1 if arguments.target_pipeline_parallel_size is None else arguments.target_pipeline_parallel_size,
        arguments.megatron_names or "classic",
    )
    with _ours(arguments, target) as found, _progress("written") as show:
        written = to_megatron(found, arguments.save, target, show)
    print_line(
        f"saved {written} for Megatron-LM, TP {target.tp}, PP {target.pp}, {target.names} names; load it there with "
        "--no-load-rng, because random states are not converted"
    )


def from_megatron(arguments: argparse.Namespace) -> None:
    from megatron.interop.megatron_lm.convert import import_step

    _refuse_occupied(arguments)
    found = _found(arguments)
    with _target(arguments) as directory, _progress("converted") as show:
        info = import_step(found, directory, arguments.save, show)
    rows = found.saved_settings()["tokenizer"]["vocab_size"]
    ending = "--finetune" if info.step == 0 else "--no-load-rng"
    path = arguments.save / info.path.name
    print_line(f"saved {path}, vocabulary {rows}; train on with --load and {ending}")


@contextmanager
def _ours(arguments: argparse.Namespace, target: "TargetLayout") -> "Iterator[FoundStep]":
    """Yields the native step to convert. A Hugging Face model is first imported into a temporary folder beside --save,
    after a check that it fits the layout `target`."""
    if arguments.source != "hf":
        yield _found(arguments)
        return
    from megatron.checkpoint.paths import TEMPORARY
    from megatron.interop.hf.convert import import_weights
    from megatron.interop.hf.importer import open_folder

    source = open_folder(arguments.load, _warn)
    target.check(source.config, source.moe, source.vocab_size)
    arguments.save.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f"{TEMPORARY}{arguments.save.name}-", dir=arguments.save.parent) as between:
        with _progress("read") as show:
            import_weights(source, Path(between), Path(between), show)
        yield _step_in(Path(between), None)


def _step_in(directory: Path, step: int | None) -> "FoundStep":
    from megatron.checkpoint.found_step import describe_step
    from megatron.interop.source import OTHER_PROGRAMS

    found = describe_step(directory, step=step, strict=True, check_hashes=True, log=print, source=OTHER_PROGRAMS)
    assert found is not None, "without a save directory there is no fresh start"
    return found


def _found(arguments: argparse.Namespace) -> "FoundStep":
    from megatron.interop.megatron_lm.convert import with_true_vocabulary

    found = _step_in(arguments.load, arguments.ckpt_step)
    if (found.foreign is not None) != (arguments.source == "megatron"):
        raise ConfigError(f"--from {arguments.source}: {found.directory} is in another format; remove --from")
    return with_true_vocabulary(found, arguments.true_vocab_size)


def to_hugging_face(arguments: argparse.Namespace) -> None:
    from megatron.interop.hf.check import check_export
    from megatron.interop.hf.export import plan_export, write_export

    if arguments.save.exists() and not arguments.overwrite:
        raise ConfigError(f"--save {arguments.save}: exists already; give another folder, or --overwrite")
    found = _found(arguments)
    export = plan_export(
        found,
        dtype=arguments.dtype,
        shard_bytes=_shard_bytes(arguments.max_shard_size),
        as_bin=arguments.no_safe_serialization,
    )
    print_line(f"exporting {found.directory} as {export.family.architecture}, vocabulary {export.facts.vocab_size}")
    if export.instead_of is not None:
        print_line(
            f"not as {export.instead_of.architecture}, whose tokenizer transformers 5.8 and later always read as "
            f"Qwen2's; {export.family.architecture} is the same model, with additional biases of zero"
        )
    with _progress("exported") as written, _progress("checked") as checked:
        write_export(
            export,
            arguments.save,
            overwrite=arguments.overwrite,
            check=lambda folder: check_export(export, folder, print_line, insist=arguments.verify, show=checked),
            show=written,
        )
    print_line(f"saved {arguments.save}")


def _shard_bytes(given: str | None) -> int:
    try:
        return size_in_bytes(given or "5GB")
    except ValueError as error:
        raise ConfigError(f"--max-shard-size {given}: {error}") from None


def from_hugging_face(arguments: argparse.Namespace) -> None:
    from megatron.interop.hf.convert import import_weights
    from megatron.interop.hf.importer import open_folder

    _refuse_occupied(arguments)
    source = open_folder(arguments.load, _warn)
    with _target(arguments) as directory, _progress("converted") as show:
        info = import_weights(source, directory, arguments.save, show)
    path = arguments.save / info.path.name
    print_line(f"saved {path} ({source.family.architecture}, {source.dtype}); train on with --load and --finetune")


def _warn(text: str) -> None:
    print_line(f"warning: {text}")


def _refuse_occupied(arguments: argparse.Namespace) -> None:
    from megatron.checkpoint.paths import holds_nothing

    if not arguments.overwrite and not holds_nothing(arguments.save):
        raise ConfigError(f"--save {arguments.save}: holds checkpoints already; give another directory, or --overwrite")


@contextmanager
def _target(arguments: argparse.Namespace) -> Iterator[Path]:
    """Yields the directory to write a native checkpoint in. With --overwrite, it replaces the old one at the end."""
    from megatron.checkpoint.paths import holds_nothing
    from megatron.interop.conversion import written_aside

    if holds_nothing(arguments.save):
        yield arguments.save
        return
    with written_aside(arguments.save, "converting") as temporary:
        yield temporary


@contextmanager
def _progress(verb: str) -> Iterator[Callable[[int, int], None]]:
    progress = ByteProgress(verb)
    try:
        yield progress.show
    finally:
        progress.close()
