"""Makes this rank's micro-batches: from `Datasets` by megatron.data, from a script's own datasets by torch's loader."""

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import islice
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.data import Dataset, default_collate

from megatron.config import RunConfig
from megatron.config.notices import spelled
from megatron.config.validation import ONE_SET, ValidationPlan, validation_plan
from megatron.data.datasets import Datasets
from megatron.data.loader import BatchIterator, build_loader, pack_batch
from megatron.data.masks import ALL_FIELDS, MaskConfig
from megatron.data.sampler import BlockShape, sample_batches
from megatron.errors import ConfigError, DataError, MegatronError
from megatron.model.passes import Batch
from megatron.training.initialize import Run
from megatron.utils.device_kind import kind_of

Provided = Datasets | tuple[Any, Any, Any]
"""Return value of a datasets_provider: a `Datasets`, or the script's own training, validation and test sets."""
NumSamples = tuple[int, int | None, int]
"""Number of samples requested from the training, validation and test sets; None: the whole set once."""
DatasetsProvider = Callable[[Run, NumSamples], Provided]


def as_datasets(provided: Provided) -> Datasets:
    return provided if isinstance(provided, Datasets) else Datasets(*provided, table="")


@dataclass(frozen=True)
class Data:
    """Training, validation and test sets, and the facts about them that a checkpoint saves."""

    datasets: Datasets
    remembered: Mapping[str, Any]


def usable_samples(run: Run, dataset: Any) -> int:
    """Number of samples that an evaluation reads: whole global batches only, so that every layout gives the same
    loss."""
    batch_size = run.batch_plan.evaluation_batch_size
    return len(dataset) // batch_size * batch_size


def validation_plan_of(run: Run) -> ValidationPlan | None:
    return validation_plan(run.config, run.batch_plan.evaluation_batch_size)


def check_validation(run: Run, found: int, split: str) -> None:
    """Rejects a validation set of `found` samples if each evaluation needs more."""
    plan, name = validation_plan_of(run), "validation set" if split == ONE_SET else f"set {split}"
    wanted = None if plan is None else plan.of(split)
    if wanted is None or wanted <= found:
        return
    flag = "eval_iters" if run.config.evaluation.validation_samples is None else "validation_samples"
    raise DataError(
        f"the {name} has {found} samples, but {spelled(run.config, flag)} needs {wanted}; lower it, or evaluate on the "
        "whole set with --full-validation"
    )


def check_evaluation(run: Run, dataset: Any, name: str) -> None:
    """Rejects a set without one whole global batch."""
    if dataset is not None and not usable_samples(run, dataset):
        raise DataError(
            f"the {name} has {len(dataset)} samples, fewer than one global batch of "
            f"{run.batch_plan.evaluation_batch_size}; give more data, lower --eval-global-batch-size or "
            "--global-batch-size, or evaluate on the whole set with --full-validation"
        )


class BatchMaker:
    """Makes one rank's micro-batches, starting at any sample. The samples of a step depend only on the global batch
    size. `fields`: the fields that this rank's model uses; None means all. Samples of a script's own dataset keep all
    fields. `close()` ends the loaders' workers, which otherwise live until the process ends.
    """

    def __init__(self, run: Run, fields: Set[str] | None = None) -> None:
        self.run, self.fields = run, fields or ALL_FIELDS
        self._open: WeakSet[BatchIterator] = WeakSet()

    def close(self) -> None:
        for loader in list(self._open):
            loader.close()

    def train(self, dataset: Any, consumed: int) -> Iterator[Batch]:
        if dataset is None:
            raise DataError("the training set is empty: give it a share of --split, or more data")
        return self._load(dataset, consumed, order=self.run.config.data.dataloader_type)

    def evaluation(self, dataset: Any, consumed: int) -> Iterator[Batch]:
        """Yields batches from sample `consumed` on, without end: after the last whole global batch it starts over."""
        usable = usable_samples(self.run, dataset)
        start = consumed % usable
        while True:
            shape = self._shape_of_evaluation
            yield from islice(self._load(dataset, start, shape=shape), (usable - start) // shape.block)
            start = 0

    def once(self, dataset: Any, samples: int | None = None) -> Iterator[Batch]:
        """Yields every sample once, or only the first `samples` samples. A block has one micro-batch for each rank of
        `dp`; the samples of an incomplete last block go to these ranks one at a time."""
        shape, samples = self._shape_of_evaluation, len(dataset) if samples is None else samples
        yield from self._load(dataset, 0, shape=shape, samples=samples)
        whole = samples // shape.block * shape.block
        if whole < samples:
            alone = BlockShape(micro_batch_size=1, dp_rank=0, dp_size=1)
            rest: Iterator[Batch] = self._load(dataset, whole, shape=alone, samples=samples)
            if self.run.parallel.ep.size > 1 or self.run.config.parallel.zero >= 2:
                rest = self._filled_up(rest)
            yield from islice(rest, self.run.parallel.dp.rank, None, self.run.parallel.dp.size)

    def _filled_up(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Adds batches without counted tokens until every data-parallel rank has the same number, because ranks that
        share experts or weights must run equally many passes."""
        count = 0
        for batch in batches:
            count += 1
            yield batch
        for _ in range(-count % self.run.parallel.dp.size):
            if "loss_mask" in batch:
                yield {**batch, "loss_mask": torch.zeros_like(batch["loss_mask"])}
            elif "loss_mask" not in self.fields:  # a stage that computes no loss
                yield batch
            else:
                raise DataError(
                    "--full-validation or --validation-samples: samples have no loss_mask, so the last batch cannot "
                    "be padded; use a number of samples that is divisible by "
                    f"{self.run.parallel.dp.size}, or add a loss_mask"
                )

    @property
    def _shape_of_evaluation(self) -> BlockShape:
        return self._shape_of(self.run.batch_plan.evaluation_micro_batch_size)

    def _shape_of(self, micro_batch_size: int) -> BlockShape:
        dp = self.run.parallel.dp
        return BlockShape(micro_batch_size=micro_batch_size, dp_rank=dp.rank, dp_size=dp.size)

    def _load(
        self,
        dataset: Any,
        consumed: int,
        *,
        order: str = "single",
        shape: BlockShape | None = None,
        samples: int | None = None,
    ) -> BatchIterator:
        config, plan = self.run.config, self.run.batch_plan
        trained = self._shape_of(plan.micro_batch_size)
        micro_batches = plan.final_batch_size // trained.block
        sample_ids = sample_batches(
            order, samples or len(dataset), consumed, shape or trained, data_sharding=config.data.data_sharding
        )
        workers, pin_memory = config.data.num_workers, kind_of(self.run.device.type).pinned_batches
        if is_token_dataset(dataset):
            loader = build_loader(
                dataset,
                sample_ids,
                num_workers=workers,
                masks=_masks(config, self.run.eod_id),
                vocab_size=self.run.data_vocab_size if self.run.has_vocabulary else None,
                pin_memory=pin_memory,
                read_ahead=max(2, min(64, micro_batches)),  # a step takes all its micro-batches at once
                fields=self.fields,
            )
        else:
            loader = BatchIterator(
                _OwnBatches(dataset),
                sample_ids,
                num_workers=workers,
                pin_memory=pin_memory,
                collate=pack_batch if workers else None,
            )
        self._open.add(loader)
        return loader


def _masks(config: RunConfig, eod_id: int | None) -> MaskConfig:
    if config.data.sft:
        return MaskConfig(conversations=True)
    return MaskConfig(
        eod_id=eod_id,
        reset_position_ids=config.data.reset_position_ids,
        reset_attention_mask=config.data.isolates_documents,
        eod_mask_loss=config.data.eod_mask_loss,
    )


def is_token_dataset(dataset: Any) -> bool:
    """True if samples are rows of tokens (megatron.data's TokenDataset); the loader then makes labels and masks."""
    return hasattr(dataset, "seq_length") and hasattr(dataset, "locate")


class _OwnBatches(Dataset[dict[str, Any] | MegatronError]):
    """Indexes a script's own dataset by lists of sample numbers. Its samples are dicts, collated by torch's rules.
    MegatronErrors are returned, because one raised in a worker process would lose its message."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, sample_ids: list[int]) -> dict[str, Any] | MegatronError:
        samples = [self.dataset[number] for number in sample_ids]
        if not isinstance(samples[0], Mapping):
            return ConfigError(
                f"datasets_provider: sample {sample_ids[0]} is a {type(samples[0]).__name__}; a sample must be a dict, "
                "such as {'x': tensor, 'y': 3}"
            )
        return {**default_collate(samples), "sample_ids": torch.tensor(sample_ids)}
