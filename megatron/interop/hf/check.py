"""Checks an export: transformers must open it, encode texts like the run, and compute the same logits.

Logits are compared in fp32 whatever the dtype of the weights, so rounding hides no difference.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megatron.errors import CheckpointError, ConfigError
from megatron.inference.restore import restore_model
from megatron.interop.conversion import Show, no_progress
from megatron.interop.hf.export import Export, exported_tensor, our_tensors
from megatron.interop.hf.importer import open_folder, read_tensors
from megatron.interop.hf.tokenizer_check import compare_tokenizer, expected_of
from megatron.utils.cpu import available_memory

TOLERANCE = 1e-4  # of the largest logit
_POSITIONS = 96
_BYTES_PER_WEIGHT = 4 * 3  # our model, theirs, and the temporary memory of building one


@dataclass(frozen=True)
class Comparison:
    largest_difference: float
    largest_logit: float
    positions: int

    @property
    def relative(self) -> float:
        return self.largest_difference / max(self.largest_logit, 1e-30)


def check_export(
    export: Export, folder: Path, log: Callable[[str], object], *, insist: bool = False, show: Show = no_progress
) -> None:
    """Raises unless the folder holds the exported model. Compares all weights, and also logits if transformers is
    installed and memory suffices. With `insist`, it is an error if logits cannot be compared."""
    compare_weights(export, folder, show)
    log("check: every weight reads back bit-equal")
    if importlib.util.find_spec("transformers") is None:
        _not_compared("transformers is not installed", log, insist)
        log("check: tokenizers were not compared: transformers is not installed")
        return
    need = _BYTES_PER_WEIGHT * sum(prod(record.logical_shape) for record in export.reader.manifest.model.values())
    enough = (free := available_memory()) is None or need <= free
    _check_tokenizer(export, folder, log, pipeline=enough)
    if not enough:
        _not_compared(f"this needs about {need} bytes of memory, but {free} are available", log, insist)
        return
    result = compare_logits(export, folder)
    log(
        f"check: logits equal those of {export.family.architecture} at all {result.positions} positions; "
        f"largest difference: {result.relative:.1e} of the largest logit (tolerance {TOLERANCE:.0e})"
    )


def _check_tokenizer(export: Export, folder: Path, log: Callable[[str], object], *, pipeline: bool) -> None:
    """Compares tokenizers. With `pipeline`, also runs a pipeline of transformers, which needs memory for the
    weights."""
    if export.tokenizer is None or not export.tokenizer.has_json:
        log("check: tokenizers were not compared: the checkpoint has no tokenizer.json")
        return
    facts = export.facts
    expected = expected_of(export.tokenizer, folder, facts.vocab_size, facts.context or _POSITIONS, pipeline=pipeline)
    log(f"check: {compare_tokenizer(expected, 'nothing was exported')}")


_AGAIN = "export it again"


def _not_compared(why: str, log: Callable[[str], object], insist: bool) -> None:
    if insist:
        raise ConfigError(f"--verify: logits cannot be compared: {why}; remove --verify to compare only the weights")
    log(f"check: logits were not compared: {why}")


def compare_weights(export: Export, folder: Path, show: Show = no_progress) -> None:
    """Compares the weights that an import would read with those that were exported."""
    source, done = open_folder(folder), 0
    ours = {name: partial(exported_tensor, export, name) for name in export.reader.manifest.model}
    for name, _, tensor in read_tensors(source):
        read = ours.pop(name, None)
        if read is None:
            raise CheckpointError(f"{folder}: has a parameter {name} that was not exported; {_AGAIN}")
        if not torch.equal(read(), tensor):
            raise CheckpointError(f"{folder}: {name} has other values than those that were written; {_AGAIN}")
        done += tensor.nbytes
        show(done, export.bytes)
    if ours:
        raise CheckpointError(f"{folder}: the export lacks {', '.join(ours)}; {_AGAIN}")


@torch.no_grad()
def compare_logits(export: Export, folder: Path) -> Comparison:
    """Compares our logits with those of transformers on random tokens. Raises if they differ by more than rounding."""
    generator = torch.Generator().manual_seed(1234)
    length = min(_POSITIONS, export.facts.context or _POSITIONS)
    tokens = torch.randint(0, export.facts.vocab_size, (2, length), generator=generator)
    ours, theirs = our_logits(export, tokens), their_logits(folder, tokens)
    if ours.shape != theirs.shape:
        raise CheckpointError(
            f"{folder}: logits of transformers have shape {tuple(theirs.shape)}, this project's {tuple(ours.shape)}"
        )
    result = Comparison(float((ours - theirs).abs().max()), float(ours.abs().max()), ours.shape[0] * ours.shape[1])
    if not result.relative <= TOLERANCE:
        raise CheckpointError(
            f"{folder}: logits of transformers differ from this project's by {result.relative:.1e} of the largest "
            f"logit (tolerance {TOLERANCE:.0e}); nothing was exported"
        )
    return result


def our_logits(export: Export, tokens: Tensor) -> Tensor:
    """Computes our logits with reference kernels, because the check compares functions, not implementations."""
    model = restore_model(
        export.reader, dtype=torch.float32, device=torch.device("cpu"), kernels="ref", tensors=our_tensors(export)
    )
    return model(tokens).float()


def their_logits(folder: Path, tokens: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM, __version__

    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
    except ValueError as error:  # version 4 knows fewer kinds of rope_scaling
        raise CheckpointError(
            f"{folder}: transformers {__version__} cannot open it ({error}); nothing was exported; "
            "install a newer version"
        ) from error
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped product needs widths that are multiples of 4
    logits: Tensor = model.eval()(tokens).logits.float()
    return logits
