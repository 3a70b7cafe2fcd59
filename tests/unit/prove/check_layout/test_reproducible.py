"""Settings that tools/check_layout.py runs: shrunk with their structure kept, and valid for the world size."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config import BatchPlan, RunConfig, check_settings, check_world, parse_args
from megatron.errors import ConfigError
from megatron.prove.check_layout.reproducible import changed_settings, is_large, ranks_of, reproducible, shrink
from megatron.training.initialize import tokenizer_of
from tests.helpers.runs import flags
from tests.unit.tokenizer.support import write_small_bpe

LARGE = {
    "llama3-8b, tp 8 with sequence, pp 4 with virtual stages": (
        "--model llama3-8b --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 "
        "--num-layers-per-virtual-pipeline-stage 2 --global-batch-size 512 --train-iters 9 --seq-length 8192"
    ),
    "llama3-8b, more ranks than groups": (
        "--model llama3-8b --tensor-model-parallel-size 16 --global-batch-size 512 --train-iters 9 --seq-length 4096"
    ),
    "gpt2-124m, uneven stages": (
        "--model gpt2-124m --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2 "
        "--decoder-last-pipeline-num-layers 2 --global-batch-size 64 --train-iters 9 --seq-length 1024"
    ),
    "mixtral, ep 8": (
        "--model mixtral-8x7b --expert-model-parallel-size 8 --tensor-model-parallel-size 2 --sequence-parallel "
        "--global-batch-size 256 --train-iters 9 --seq-length 4096"
    ),
    "llama3-8b, all-to-all context": (
        "--model llama3-8b --context-parallel-size 4 --cp-comm-type a2a --tensor-model-parallel-size 2 "
        "--global-batch-size 64 --train-iters 9 --seq-length 8192"
    ),
}


def prepared(text: str) -> tuple[RunConfig, int]:
    words = [*text.split(), "--micro-batch-size", "1", "--lr", "1e-4", "--mock-data", "--vocab-size", "50257"]
    config = parse_args(words)
    ranks = ranks_of(config, None)
    return reproducible(config, ranks, 3, Path("cache")), ranks


@pytest.mark.parametrize("case", LARGE)
def test_a_large_configuration_is_shrunk_to_the_same_structure(case: str) -> None:
    config, ranks = prepared(LARGE[case])
    assert is_large(config, ranks, 50257)
    small = shrink(config, ranks)
    assert small.model.hidden_size <= 256 and small.data.seq_length <= 256, changed_settings(config, small)
    check_settings(small, needs_data=False)
    check_world(small, ranks)
    before, after, tp = config.model, small.model, config.parallel.tensor_model_parallel_size
    assert (before.query_groups < before.num_attention_heads) == (after.query_groups < after.num_attention_heads)
    assert (before.query_groups < tp) == (after.query_groups < tp)
    assert (before.num_layers == config.parallel.pipeline_model_parallel_size) or after.num_layers > 1
    assert (before.tied, before.gated, before.positions) == (after.tied, after.gated, after.positions)
    assert any(line.startswith("--hidden-size ") for line in changed_settings(config, small))
    for size in ("tensor", "pipeline", "expert"):
        name = f"{size}_model_parallel_size"
        assert getattr(small.parallel, name) == getattr(config.parallel, name)


@pytest.mark.parametrize(
    ("cut", "layers", "first", "last"),
    [
        ("4 --decoder-first-pipeline-num-layers 20 --decoder-last-pipeline-num-layers 4", 8, 3, 1),
        ("4 --decoder-first-pipeline-num-layers 6", 7, 1, None),
        ("4 --decoder-last-pipeline-num-layers 12", 8, None, 2),
        ("2 --decoder-first-pipeline-num-layers 30", 3, 2, None),
        ("4", 8, None, None),
    ],
)
def test_uneven_stages_are_shrunk_and_stay_uneven(cut: str, layers: int, first: int | None, last: int | None) -> None:
    config, ranks = prepared(
        f"--num-layers 48 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512 "
        f"--train-iters 9 --pipeline-model-parallel-size {cut}"
    )
    small = shrink(config, ranks)
    assert small.model.num_layers == layers, changed_settings(config, small)
    assert small.parallel.decoder_first_pipeline_num_layers == first
    assert small.parallel.decoder_last_pipeline_num_layers == last


@pytest.mark.parametrize(("micro_batches", "few"), [(20, 6), (10, 6), (23, 5), (5, 3), (7, 5)])
def test_groups_of_the_interleaved_schedule_stay_larger_than_the_pipeline(micro_batches: int, few: int) -> None:
    config, ranks = prepared(
        "--num-layers 32 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512 "
        "--train-iters 9 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4 "
        f"--microbatch-group-size-per-virtual-pipeline-stage 5 --global-batch-size {2 * micro_batches} "
        "--micro-batch-size 1"
    )
    small = shrink(config, ranks)
    assert small.parallel.micro_batch_group == 3
    plan = BatchPlan.on(small, ranks)
    assert plan.micro_batches(plan.final_batch_size) == few


def test_a_small_configuration_is_not_shrunk() -> None:
    config, ranks = prepared("--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
                             "--max-position-embeddings 64 --train-iters 9")  # fmt: skip
    assert not is_large(config, ranks, 50257)


def test_a_world_that_holds_the_layout() -> None:
    for words, ranks in (("", 2), ("--tensor-model-parallel-size 2", 4), ("--pipeline-model-parallel-size 2 "
        "--tensor-model-parallel-size 4", 8)):  # fmt: skip
        config = parse_args([*flags(num_layers=4), *words.split()])
        assert ranks_of(config, None) == ranks
    with pytest.raises(ConfigError, match="use 2"):
        ranks_of(parse_args(flags()), 1)


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ({"global_batch_size": 3}, 3),  # not 2, which does not divide the batch
        ({"global_batch_size": 1, "tensor_model_parallel_size": 2}, 2),  # no second data-parallel rank
        ({"micro_batch_size": 4, "global_batch_size": 4, "pipeline_model_parallel_size": 2}, 2),
        ({"profile": True, "profile_step_start": 1, "profile_step_end": 2, "profile_ranks": 63}, 2),
    ],
)
def test_a_world_that_fits_the_batch(settings: dict[str, object], ranks: int) -> None:
    assert ranks_of(parse_args(flags(**{"num_layers": 4, "micro_batch_size": 1, **settings})), None) == ranks


@pytest.mark.parametrize(
    ("asked", "settings", "named"),
    [
        (3, {}, "--global-batch-size 8 is not divisible by --micro-batch-size 1 x 3 data-parallel ranks"),
        (16, {}, "--global-batch-size 8 is not divisible by"),
        (None, {"global_batch_size": 1}, "--global-batch-size 1 is not divisible by --micro-batch-size 1 x 2"),
        (
            2,
            {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1, "global_batch_size": 3},
            "--global-batch-size 3: the interleaved schedule takes micro-batches in groups",
        ),
        (
            256,
            {"global_batch_size": 256},
            "needs 256 processes on this machine, but check_layout.py starts at most 128",
        ),
    ],
)
def test_a_world_is_checked_as_a_training_checks_it(asked: int | None, settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ranks_of(parse_args(flags(**{"num_layers": 4, "micro_batch_size": 1, **settings})), asked)


def test_rows_beyond_those_of_the_tokenizer_go_with_the_load(tmp_path: Path) -> None:
    """A folder's table may have more rows than its tokenizer has entries; only --load reads them."""
    vocab, merges = write_small_bpe(tmp_path)
    files = {"mock_data": None, "data_path": "corpus", "vocab_file": vocab, "merge_file": merges, "vocab_size": 1000}
    config = parse_args(flags(**files, load=tmp_path, finetune=True))
    tokenizer = tokenizer_of(config)
    assert tokenizer is not None and tokenizer.vocab_size < 1000
    compared = reproducible(config, 2, 3, tmp_path)
    assert compared.checkpoint.load is None and tokenizer_of(compared) is not None
    synthetic = parse_args(flags(vocab_size=1000, load=tmp_path, finetune=True))
    assert reproducible(synthetic, 2, 3, tmp_path).tokenizer.vocab_size == 1000
