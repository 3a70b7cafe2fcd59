"""The command line of tools/convert_checkpoint.py: native checkpoints to Hugging Face, and back."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from megatron.errors import ConfigError, StorageError
from megatron.utils.command_line import Parser, run_tool
from megatron.utils.foreign import hub_hint, is_hugging_face


def parser() -> Parser:
    p = Parser(
        prog="convert_checkpoint.py",
        description="Convert a checkpoint. --to hf writes a folder that transformers opens offline, with the run's "
        "tokenizer, and compares its logits with ours before it appears under its name.",
    )
    p.add_argument("--load", type=Path, required=True, help="A run's save directory, or a Hugging Face model folder.")
    p.add_argument("--ckpt-step", type=int, help="This iteration instead of the newest.")
    p.add_argument("--from", dest="source", choices=("native", "hf"), help="Format of --load (default: what it is).")
    p.add_argument("--to", required=True, choices=("hf", "native", "megatron"), help="Format of --save.")
    p.add_argument("--save", type=Path, required=True, help="Where to write.")
    p.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="Other than trained (--to hf).")
    p.add_argument("--overwrite", action="store_true", help="Replace --save if it exists (--to hf).")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    return run_tool("error", lambda: run(parser().parse_known_flags(argv)))


def run(arguments: argparse.Namespace) -> None:
    if arguments.to == "megatron":
        raise ConfigError("--to megatron: not supported yet; the native files already have Megatron's names")
    if not arguments.load.exists():
        raise ConfigError(f"--load {arguments.load}: no such directory{hub_hint(arguments.load)}")
    if arguments.source is None:
        arguments.source = "hf" if is_hugging_face(arguments.load) else "native"
    if arguments.source == arguments.to:
        raise ConfigError(f"--to {arguments.to}: --load is in that format already; there is nothing to convert")
    if arguments.to == "hf":
        to_hugging_face(arguments)
    else:
        from_hugging_face(arguments)


def to_hugging_face(arguments: argparse.Namespace) -> None:
    from megatron.checkpoint import find_checkpoint
    from megatron.checkpoint.build import saved_tokenizer
    from megatron.checkpoint.hf import check_export, plan_export, write_export
    from megatron.checkpoint.hf.origin import own_token_ids
    from megatron.distributed.state import ParallelState
    from megatron.layout import Layout

    if arguments.save.exists() and not arguments.overwrite:
        raise ConfigError(f"--save {arguments.save}: exists already; give another folder, or --overwrite")
    alone = ParallelState.build(Layout(1), 0)
    found = find_checkpoint(arguments.load, parallel=alone, step=arguments.ckpt_step, strict=True)
    assert found is not None, "without a save directory there is no fresh start"
    tokenizer = saved_tokenizer(found)
    export = plan_export(found, dtype=arguments.dtype, token_ids=own_token_ids(tokenizer, found.tokenizer))
    print(f"exporting {found.directory} as {export.family.architecture}, vocabulary {export.facts.vocab_size}")
    write_export(
        export,
        arguments.save,
        tokenizer=found.tokenizer,
        overwrite=arguments.overwrite,
        check=lambda folder: check_export(export, folder, print),
    )
    print(f"saved {arguments.save}")


def from_hugging_face(arguments: argparse.Namespace) -> None:
    from megatron.checkpoint import RunHistory, TrainState, save_checkpoint
    from megatron.checkpoint.hf import open_folder, read_tensors
    from megatron.checkpoint.hf.origin import read_origin
    from megatron.checkpoint.paths import holds_nothing
    from megatron.distributed.shard import ShardSpec
    from megatron.distributed.state import ParallelState
    from megatron.layout import Layout

    for flag, value in (("--ckpt-step", arguments.ckpt_step), ("--dtype", arguments.dtype)):
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
