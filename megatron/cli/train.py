"""Pretrains a GPT: `torchrun -m megatron.cli.train --num-layers 12 ...`, or pretrain_gpt.py in a checkout.

Passes three functions to `megatron.pretrain.pretrain`. For a model of your own, copy this file and change them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import megatron_anywhere  # noqa: F401
from megatron.pretrain import pretrain

if TYPE_CHECKING:  # `--help` loads no torch
    from torch import Tensor, nn

    from megatron.data.datasets import Datasets
    from megatron.engine import Batch
    from megatron.training.initialize import Run


def datasets_provider(run: Run, num_samples: tuple[int, int | None, int]) -> Datasets:
    """Returns the training, validation and test sets, each with at least `num_samples` samples."""
    from megatron.data.index_builders import Builders
    from megatron.data.split_datasets import build_train_valid_test

    return build_train_valid_test(
        run.config.data,
        num_samples=num_samples,
        seed=run.config.training.seed,
        vocab_size=run.data_vocab_size,
        eod_id=run.eod_id,
        tokenizer_fingerprint=run.tokenizer_fingerprint,
        tokenizer=run.tokenizer,
        chat=run.chat,
        builders=Builders.resolve(say=run.log.info),
    )


def model_provider(run: Run) -> nn.Module:
    """Returns the model without parallelism, which `megatron.parallelize` and the trainer add."""
    from megatron.model.gpt import GPT

    return GPT(
        run.config.model,
        vocab_size=run.vocab_size,
        padded_vocab_size=run.padded_vocab_size,
        kernels=run.kernels,
        moe=run.config.moe,
        recompute=run.config.recompute,
    )


def forward_step(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns the sum of the losses of the counted tokens, and the number of these tokens."""
    losses = model(  # [batch, seq]
        batch["tokens"],
        position_ids=batch.get("position_ids"),
        labels=batch["labels"],
        document_ids=batch.get("document_ids"),
    )
    mask = batch["loss_mask"]
    return (losses * mask).sum(), mask.sum()


def main() -> int:
    pretrain(datasets_provider, model_provider, forward_step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
