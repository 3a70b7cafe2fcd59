"""Flags of commands that open a trained model: the fields of ModelOptions."""

import argparse
from collections.abc import Sequence

from megatron.utils.command_line import Parser, dtype_name, integer
from megatron.utils.numerals import INT32, LARGEST_WORLD


def add_model_flags(parser: Parser, *, batch: str, axes: Sequence[str]) -> argparse._ArgumentGroup:
    """Adds the flags. `batch`: the unit of --batch-size. `axes`: parallel axes, such as "tensor-model"."""
    how = parser.add_argument_group("model")
    how.add_argument(
        "--load",
        required=True,
        metavar="DIR",
        help="A run's --save, a checkpoint of Megatron-LM, or a Hugging Face model.",
    )
    how.add_argument("--ckpt-step", type=integer(0), metavar="N", help="Iteration to load (default: the newest).")
    how.add_argument("--batch-size", type=integer(1, INT32), default=8, metavar="N", help=f"{batch} (default 8).")
    how.add_argument("--dtype", type=dtype_name, help="float32, bfloat16 or float16 (default: as trained).")
    how.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (default auto).")
    how.add_argument(
        "--kernels", default="auto", help="Implementation of each operation, as in training (default auto)."
    )
    for axis in axes:
        name = f"--{axis}-parallel-size"
        how.add_argument(
            name,
            type=integer(1, LARGEST_WORLD),
            default=1,
            metavar="N",
            help="Size of this parallel axis, as in training (default 1).",
        )
    for name in ("--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file"):
        how.add_argument(name, help="Tokenizer of a checkpoint that holds none.")
    return how
