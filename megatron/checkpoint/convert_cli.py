"""The command line of tools/convert_checkpoint.py: native checkpoints to Hugging Face, and back."""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.errors import ConfigError, StorageError
from megatron.utils.command_line import Parser, run_tool
from megatron.utils.foreign import hub_hint, is_hugging_face

if TYPE_CHECKING:
    from megatron.checkpoint.load import FoundStep


def parser() -> Parser:
    p = Parser(
        prog="convert_checkpoint.py",
        description="Convert a checkpoint. --to hf writes a folder that transformers opens offline, with the run's "
        "tokenizer, and compares its logits with ours before it appears under its name.",
    )
    p.add_argument("--load", type=Path, required=True, help="A run's save directory, or a Hugging Face model folder.")
    p.add_argument("--ckpt-step", type=int, help="This iteration instead of the newest.")
    p.add_argument(
        "--from", dest="source", choices=("native", "hf", "megatron"), help="Format of --load (default: what it is)."
    )
    p.add_argument("--true-vocab-size", type=int, help="Rows of the vocabulary without padding (--from megatron).")
    p.add_argument("--target-tensor-parallel-size", type=int, metavar="N", help="TP of --to megatron (1).")
    p.add_argument("--target-pipeline-parallel-size", type=int, metavar="N", help="PP of --to megatron (1).")
    p.add_argument(
        "--megatron-names",
        choices=("classic", "core", "te"),
        help="Names of --to megatron: those of 23.06 (classic, the default), of Megatron core, or of core with "
        "Transformer Engine.",
    )
    p.add_argument("--to", required=True, choices=("hf", "native", "megatron"), help="Format of --save.")
    p.add_argument("--save", type=Path, required=True, help="Where to write.")
    p.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="Other than trained (--to hf).")
    p.add_argument("--max-shard-size", help="Largest file of weights, such as 500MB or 2GB (--to hf; default: 5GB).")
    p.add_argument("--verify", action="store_true", help="Compare logits, or export nothing (--to hf).")
    p.add_argument("--overwrite", action="store_true", help="Replace --save if it exists (--to hf).")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    return run_tool("error", lambda: run(parser().parse_known_flags(argv)))


def run(arguments: argparse.Namespace) -> None:
    if not arguments.load.exists():
        raise ConfigError(f"--load {arguments.load}: no such directory{hub_hint(arguments.load)}")
    if arguments.source is None:
        arguments.source = _format(arguments.load, arguments.ckpt_step)
    if arguments.source == arguments.to and arguments.to != "megatron":
        raise ConfigError(f"--to {arguments.to}: --load is in that format already; there is nothing to convert")
    if arguments.true_vocab_size is not None and arguments.source != "megatron":
        raise ConfigError(
            f"--true-vocab-size {arguments.true_vocab_size}: applies to --from megatron alone; leave it out"
        )
    _refuse_targets(arguments)
    if arguments.to == "hf":
        to_hugging_face(arguments)
    elif arguments.to == "megatron":
        to_megatron(arguments)
    elif arguments.source == "megatron":
        from_megatron(arguments)
    else:
        from_hugging_face(arguments)


def _format(directory: Path, step: int | None) -> str:
    """What is in a directory."""
    if is_hugging_face(directory):
        return "hf"
    from megatron.checkpoint.find import find_candidates
    from megatron.checkpoint.megatron_lm import open_foreign

    candidates = find_candidates(directory, step=step, strict=True).directories
    return "megatron" if open_foreign(candidates[0]) is not None else "native"


def _refuse_targets(arguments: argparse.Namespace) -> None:
    """The flags that say how to write for Megatron-LM, where nothing is written for it."""
    for flag in ("target_tensor_parallel_size", "target_pipeline_parallel_size", "megatron_names"):
        value = getattr(arguments, flag)
        if value is not None and arguments.to != "megatron":
            raise ConfigError(f"--{flag.replace('_', '-')} {value}: applies to --to megatron alone; leave it out")
    if arguments.to != "hf" and arguments.source != "hf":
        for text in (f"--dtype {arguments.dtype}" * bool(arguments.dtype), "--overwrite" * arguments.overwrite):
            if text:
                raise ConfigError(f"{text}: applies to --to hf alone; leave it out")


def to_megatron(arguments: argparse.Namespace) -> None:
    from megatron.checkpoint.megatron_lm.write import Target, to_megatron

    if arguments.source == "hf":
        raise ConfigError("--from hf --to megatron: in two steps; --to native first, then --from native --to megatron")
    if arguments.save.exists() and (not arguments.save.is_dir() or any(arguments.save.iterdir())):
        raise ConfigError(f"--save {arguments.save}: exists already; give another directory")
    target = Target(
        1 if arguments.target_tensor_parallel_size is None else arguments.target_tensor_parallel_size,
        1 if arguments.target_pipeline_parallel_size is None else arguments.target_pipeline_parallel_size,
        arguments.megatron_names or "classic",
    )
    written = to_megatron(_found(arguments), arguments.save, target)
    print(
        f"saved {written} for Megatron-LM, TP {target.tp}, PP {target.pp}, {target.names} names; load it there with "
        "--no-load-rng: random states are not carried over"
    )


def from_megatron(arguments: argparse.Namespace) -> None:
    from megatron.checkpoint.megatron_lm.convert import to_native
    from megatron.checkpoint.paths import holds_nothing

    if not holds_nothing(arguments.save):
        raise ConfigError(f"--save {arguments.save}: holds checkpoints already; give another directory")
    found = _found(arguments)
    info = to_native(found, arguments.save)
    rows = found.saved_settings()["tokenizer"]["vocab_size"]
    ending = "--finetune" if info.step == 0 else "--no-load-rng"
    print(f"saved {info.path}, vocabulary {rows}; train on with --load and {ending}")


def _found(arguments: argparse.Namespace) -> FoundStep:
    from megatron.checkpoint import find_checkpoint
    from megatron.checkpoint.megatron_lm.convert import with_true_vocabulary
    from megatron.distributed.state import ParallelState
    from megatron.layout import Layout

    alone = ParallelState.build(Layout(1), 0)
    found = find_checkpoint(arguments.load, parallel=alone, step=arguments.ckpt_step, strict=True)
    assert found is not None, "without a save directory there is no fresh start"
    if (found.foreign is not None) != (arguments.source == "megatron"):
        raise ConfigError(f"--from {arguments.source}: {found.directory} is in another format; leave --from out")
    return with_true_vocabulary(found, arguments.true_vocab_size)


def to_hugging_face(arguments: argparse.Namespace) -> None:
    from megatron.checkpoint.build import saved_tokenizer
    from megatron.checkpoint.hf import check_export, plan_export, write_export
    from megatron.checkpoint.hf.origin import own_token_ids

    if arguments.save.exists() and not arguments.overwrite:
        raise ConfigError(f"--save {arguments.save}: exists already; give another folder, or --overwrite")
    found = _found(arguments)
    tokenizer = saved_tokenizer(found)
    ids, shard_bytes = own_token_ids(tokenizer, found.tokenizer), _shard_bytes(arguments.max_shard_size)
    export = plan_export(found, dtype=arguments.dtype, token_ids=ids, shard_bytes=shard_bytes)
    print(f"exporting {found.directory} as {export.family.architecture}, vocabulary {export.facts.vocab_size}")
    write_export(
        export,
        arguments.save,
        tokenizer=found.tokenizer,
        overwrite=arguments.overwrite,
        check=lambda folder: check_export(export, folder, print, insist=arguments.verify),
    )
    print(f"saved {arguments.save}")


def _shard_bytes(given: str | None) -> int:
    """`transformers` counts in thousands too."""
    match = re.fullmatch(r"([1-9]\d{0,17})([KMGT]?)B?", (given or "5GB").upper())
    if match is None:
        raise ConfigError(f"--max-shard-size {given}: not a size; give a number with MB or GB, such as 2GB")
    return int(match[1]) * 1000 ** " KMGT".index(match[2] or " ")


def from_hugging_face(arguments: argparse.Namespace) -> None:
    from megatron.checkpoint import RunHistory, TrainState, save_checkpoint
    from megatron.checkpoint.hf import open_folder, read_tensors
    from megatron.checkpoint.hf.origin import read_origin
    from megatron.checkpoint.paths import holds_nothing
    from megatron.distributed.shard import ShardSpec
    from megatron.distributed.state import ParallelState
    from megatron.layout import Layout

    shard_size, verify = arguments.max_shard_size, True if arguments.verify else None
    refused = {"--ckpt-step": arguments.ckpt_step, "--dtype": arguments.dtype, "--max-shard-size": shard_size}
    for flag, value in {**refused, "--verify": verify}.items():
        if value is not None:
            raise ConfigError(f"{flag} {value}: does not apply to --from hf; leave it out")
    if not holds_nothing(arguments.save):
        raise ConfigError(f"--save {arguments.save}: holds checkpoints already; give another directory")
    source = open_folder(arguments.load)
    params = {name: (ShardSpec(name=name, logical_shape=shape), tensor) for name, shape, tensor in read_tensors(source)}

    def copy_tokenizer(folder: Path) -> None:
        for path in source.tokenizer_files:
            try:
                shutil.copyfile(path, folder / path.name)
            except OSError as error:
                raise StorageError(f"{path} could not be copied to {folder} ({error.strerror})") from error

    with closing(RunHistory(f"from-hf-{source.family.model_type}")) as history:
        info = save_checkpoint(
            arguments.save,
            TrainState(params=params, config=source.settings(), origin=read_origin(arguments.load).plain()),
            parallel=ParallelState.build(Layout(1), 0),
            save_tokenizer=copy_tokenizer if source.tokenizer_files else None,
            history=history,
            release=True,
        )
    print(f"saved {info.path} ({source.family.architecture}, {source.dtype}); train on with --load and --finetune")
