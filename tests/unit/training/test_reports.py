"""Reports of a run: Megatron's log line, the metrics file, TensorBoard, evaluations."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config import check_world, parse_args
from megatron.errors import ConfigError
from megatron.ops import resolve
from megatron.training.assemble import assemble
from megatron.training.log_lines import LOG_FORMS
from megatron.training.metric_writers import build_metric_writers
from megatron.training.metrics import TrainRecord
from megatron.utils.log import RankLog
from tests.helpers.distributed import run_ranks
from tests.helpers.kernels import backend
from tests.helpers.runs import flags, make_parts, make_run, pretrain_gpt, pretrain_here, read_metrics, train_here

# What the community's parsers expect, number for number.
MEGATRON_LINE = re.compile(
    r" iteration +(\d+)/ +(\d+) \| consumed samples: +(\d+) \| elapsed time per iteration \(ms\): ([\d.]+) \| "
    r"learning rate: (\d\.\d{3}E[+-]\d\d) \| global batch size: +(\d+) \| lm loss: (\d\.\d{6}E[+-]\d\d) \| "
    r"loss scale: ([\d.]+) \| grad norm: ([\d.]+) \| number of skipped iterations: +(\d+) \| "
    r"number of nan iterations: +(\d+) \|"
)


def lines_of(text: str) -> list[re.Match[str]]:
    return [m for line in text.splitlines() if (m := MEGATRON_LINE.match(line))]


def test_the_log_line_is_megatrons(capsys: pytest.CaptureFixture[str]) -> None:
    train_here(flags(log_interval=2))
    lines = lines_of(capsys.readouterr().out)
    assert [int(line[1]) for line in lines] == [2, 4, 6]
    assert [int(line[3]) for line in lines] == [16, 32, 48]
    assert int(lines[0][2]) == 6 and int(lines[0][6]) == 8


def test_the_classic_line_ends_with_the_date_and_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    before = datetime.now().replace(microsecond=0)
    train_here(flags(train_iters=1))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if MEGATRON_LINE.match(line)]
    (stamp,) = re.findall(r" \| datetime: ([\d :-]+) \|$", line)
    assert before <= datetime.fromisoformat(stamp) <= datetime.now()


COMPACT_LINE = re.compile(
    r"(\d\d:\d\d:\d\d) iteration +(\d+)/(\d+) \| lm loss (\d+\.\d{6}) \| grad norm [\d.]+ \| lr [\d.e+-]+ \| "
    r"[\d.]+ ms \| \d+ tokens/s \| ETA [\d:]+$"
)


def test_the_compact_log_is_stamped_in_every_line_and_fits_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    settings = {"log_format": "compact", "metrics_jsonl": metrics, "eval_iters": 2, "eval_interval": 3}
    assert pretrain_here(flags(**settings)) == 0
    said = capsys.readouterr().out.splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in said), said
    lines = [match for line in said if (match := COMPACT_LINE.match(line))]
    assert [float(line[4]) for line in lines] == [
        pytest.approx(row["mean_lm_loss"], abs=1e-6) for row in read_metrics(metrics)
    ]
    assert len(lines) == 6 and max(len(line[0]) for line in lines) <= 120
    evaluated = [line for line in said if "perplexity" in line]
    assert [re.sub(r"^[\d:]+ (iteration \d+).*", r"\1", line) for line in evaluated[:2]] == [
        "iteration 3",
        "iteration 6",
    ]
    assert re.search(r"on test set \| lm loss \d\.\d{6} \| perplexity [\d.]+$", evaluated[-1])


def test_the_compact_line_shows_what_is_not_as_it_should_be() -> None:
    record = TrainRecord(
        iteration=7, total_iterations=1000, consumed_train_samples=56, learning_rate=1e-4, weight_decay=0.0,
        global_batch_size=8, lm_loss=2.0, mean_lm_loss=2.5, loss_scale=4096.0, grad_norm=1.25,
        reported={"num_zeros": 3.0, "params_norm": 10.0, "load_balancing_loss": 1.5}, skipped_iterations=2,
        nan_iterations=1,
        seconds_per_iteration=0.25, data_wait_seconds=0.0, tokens_per_second=1e4, samples_per_second=5.0,
        tflops_per_device=123.4, model_flops_utilisation=0.456, eta_seconds=3661.0,
    )  # fmt: skip
    assert LOG_FORMS["compact"].train(record, datetime(2026, 1, 2)) == (
        "iteration    7/1000 | lm loss 2.500000 | grad norm 1.250 | lr 1.000e-04 | loss scale 4096 | num zeros 3 | "
        "params norm 10.000 | load_balancing_loss 1.5 | 2 skipped | 1 not finite | 250.0 ms | 10000 tokens/s | "
        "MFU 45.6% | ETA 01:01:01"
    )


def test_in_fp64_what_runs_instead_of_the_kernels_is_one_line_of_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    """Every operation has a fallback then. Only rank 0 logs the line."""
    backend("cpu")
    _, parts = make_parts(flags(train_iters=1), dtype=torch.float64)
    with parts:
        parts.trainer.fit()
    said = capfd.readouterr()
    assert said.out.count("native kernels do not support float64") == 1 and "float64" not in said.err
    resolve("auto", "cpu", warn=RankLog(1).warn).squared_relu(torch.ones(2, dtype=torch.float64))
    assert capfd.readouterr() == ("", "")


def test_the_logged_loss_is_the_mean_since_the_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = tmp_path / "metrics.jsonl"
    records = train_here(flags())["records"]
    capsys.readouterr()
    train_here(flags(log_interval=3, metrics_jsonl=metrics))
    shown = [float(line[7]) for line in lines_of(capsys.readouterr().out)]
    losses = [record["lm_loss"] for record in records]
    assert shown == pytest.approx([sum(losses[:3]) / 3, sum(losses[3:]) / 3], rel=1e-6)
    written = read_metrics(metrics)
    assert [record["lm_loss"] for record in written] == [losses[2], losses[5]], "all digits, and the iteration's own"


def test_the_metrics_file_has_what_tools_need(tmp_path: Path) -> None:
    metrics = tmp_path / "deep" / "metrics.jsonl"
    run, parts = make_parts(flags(eval_iters=2, eval_interval=3, metrics_jsonl=metrics))
    del run
    with parts:
        parts.trainer.fit()
    wanted = {
        "iteration", "split", "lm_loss", "grad_norm", "learning_rate", "loss_scale", "consumed_train_samples",
        "tokens_per_second",
    }  # fmt: skip
    assert all(wanted <= record.keys() for record in read_metrics(metrics))
    valid = read_metrics(metrics, "valid")
    assert [record["iteration"] for record in valid] == [3, 6]
    assert all(record["counted_tokens"] == 2 * 8 * 16 for record in valid)


def test_tensorboard_has_megatrons_tags(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings: dict[str, Any] = {
        "tensorboard_dir": tmp_path,
        "eval_iters": 1,
        "eval_interval": 3,
        "log_validation_ppl_to_tensorboard": True,
        "log_params_norm": True,
        "log_num_zeros_in_grad": True,
        "log_batch_size_to_tensorboard": True,
        "log_world_size_to_tensorboard": True,
        "log_memory_to_tensorboard": True,
        "log_timers_to_tensorboard": True,
    }
    records = train_here_with_hooks(flags(**settings))
    events = EventAccumulator(str(tmp_path)).Reload()
    tags = set(events.Tags()["scalars"])
    assert {
        "lm loss", "lm loss vs samples", "learning-rate", "batch-size", "loss-scale", "grad-norm", "num-zeros",
        "params-norm", "world-size", "iteration-time", "lm loss validation", "lm loss validation ppl",
    } <= tags  # fmt: skip
    logged = [event.value for event in events.Scalars("lm loss")]
    assert logged == pytest.approx([record["lm_loss"] for record in records])


def train_here_with_hooks(argv: list[str]) -> list[dict[str, Any]]:
    return train_here(argv)["records"]


def test_evaluation_leaves_training_untouched() -> None:
    """An evaluation draws no random number, so training stays bit-equal although dropout is on."""
    plain = train_here(flags())
    evaluated = train_here(flags(eval_iters=2, eval_interval=1))
    assert [r["lm_loss"] for r in plain["records"]] == [r["lm_loss"] for r in evaluated["records"]]
    for name, expected in plain["weights"].items():
        assert torch.equal(evaluated["weights"][name], expected), name


def test_every_evaluation_reads_the_next_part_of_the_validation_set() -> None:
    result = train_here(flags(eval_iters=2, eval_interval=3))
    assert result["parts"].progress.consumed_valid_samples == 2 * 2 * 8


def test_an_evaluation_interval_beyond_the_run_is_no_evaluation() -> None:
    assert train_here(flags(eval_iters=2, eval_interval=7))["parts"].progress.consumed_valid_samples == 0


def test_evaluations_have_their_own_batch_and_beginning(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    settings = {"eval_iters": 2, "eval_interval": 2, "eval_global_batch_size": 4, "start_eval_at_iter": 3}
    result = train_here(flags(**settings, metrics_jsonl=metrics))
    assert [each["iteration"] for each in read_metrics(metrics, "valid")] == [4, 6]
    assert {each["counted_tokens"] for each in read_metrics(metrics, "valid")} == {2 * 4 * 16}
    assert result["parts"].progress.consumed_valid_samples == 2 * 2 * 4
    same = train_here(flags(eval_iters=4, eval_interval=2, global_batch_size=4, train_iters=12))
    assert same["parts"].progress.consumed_valid_samples == 6 * 4 * 4
    with pytest.raises(ConfigError, match=r"--eval-global-batch-size 3: .*not a multiple of 2 .*use .* 2 or 4"):
        check_world(parse_args(flags(eval_iters=1, eval_global_batch_size=3)), 1)


def test_evaluations_have_their_own_micro_batches(tmp_path: Path) -> None:
    """The loss does not depend on how many samples the model evaluates at once."""
    script, losses = pretrain_gpt(), []
    for size, expected in ((None, [2] * 8), (4, [4] * 4)):
        run = make_run(parse_args(flags(eval_iters=2, eval_interval=9, train_iters=3, eval_micro_batch_size=size)))
        sizes: list[int] = []

        def spy(model: Any, batch: Any, sizes: list[int] = sizes) -> Any:
            sizes.append(len(batch["tokens"]))
            return script.forward_step(model, batch)

        with assemble(run, script.datasets_provider, script.model_provider, spy) as parts:
            parts.trainer.fit()
            trained = len(sizes)
            record = parts.evaluator.valid(parts.progress, "here")
        assert record is not None and (sizes[:trained], sizes[trained:]) == ([2] * 12, expected)
        losses.append(record.lm_loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    with pytest.raises(ConfigError, match=r"--eval-micro-batch-size 3: 8 samples .* multiple of 3 .*use .* 6 or 9"):
        check_world(parse_args(flags(eval_iters=1, eval_micro_batch_size=3)), 1)


def test_the_memory_of_the_fullest_rank_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    train_here(flags(log_interval=2, log_memory_interval=4))
    lines = re.findall(r"memory after iteration (\d+) \(MB, the rank that uses most\): (.*)", capsys.readouterr().out)
    assert [number for number, _ in lines] == ["4"]
    assert re.fullmatch(r"peak resident \d+\.\d \(rank 0\)", lines[0][1])
    with pytest.raises(ConfigError, match=r"--log-memory-interval 3 is not a multiple of --log-interval 2"):
        parse_args(flags(log_interval=2, log_memory_interval=3))


def test_the_batch_grows_by_the_schedule() -> None:
    plain = {"global_batch_size": None, "train_iters": None, "train_samples": 30, "lr_decay_style": "constant"}
    result = train_here(flags(**plain, step_batch_size_schedule="0:4 128:8"))
    records = result["records"]
    assert [each["global_batch_size"] for each in records] == [4, 4, 8, 8]
    assert result["parts"].progress.consumed_train_samples == 24
    with pytest.raises(ConfigError, match="--step-batch-size-schedule 0:4 128:7: not all sizes are divisible by"):
        check_world(parse_args(flags(**plain, step_batch_size_schedule="0:4 128:7")), 1)


def test_a_metrics_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--metrics-jsonl .*cannot be written"):
        make_parts(flags(metrics_jsonl=tmp_path / "file" / "metrics.jsonl"))


def test_wandb_is_asked_for_and_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    config = parse_args(flags(wandb_project="p"))
    with pytest.raises(ConfigError, match="pip install wandb"):
        build_metric_writers(config, world_size=1, device=torch.device("cpu"))


def hooks_of_rank(rank: int, size: int, argv: list[str]) -> list[str]:
    _, parts = make_parts(argv, rank=rank, world_size=size)
    with parts:
        return [type(hook).__name__ for hook in parts.trainer.hooks]


def test_only_the_first_rank_writes(tmp_path: Path) -> None:
    argv = flags(metrics_jsonl=tmp_path / "m.jsonl", tensorboard_dir=tmp_path, check_replicas_every=2, manual_gc=True)
    both = ["ManualGarbageCollection", "ReplicaCheck"]
    assert run_ranks(2, hooks_of_rank, 2, argv) == [[*both, "MetricsFile", "TensorBoard"], both]


def train_rank(rank: int, size: int, argv: list[str]) -> list[str]:
    torch.set_num_threads(1)
    with make_parts(argv, rank=rank, world_size=size)[1] as parts:
        parts.trainer.fit()
        return [type(hook).__name__ for hook in parts.trainer.hooks]


def test_a_norm_for_tensorboard_is_made_by_ranks_that_have_no_hooks_too(tmp_path: Path) -> None:
    """The norm is a collective: the others would wait for a rank that left it out."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    argv = flags(
        tensorboard_dir=tmp_path,
        tensorboard_log_interval=2,
        log_interval=5,
        log_params_norm=True,
        tensor_model_parallel_size=2,
    )
    assert run_ranks(2, train_rank, 2, argv) == [["TensorBoard"], []]
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("params-norm")] == [2, 4, 6]


def test_full_validation_reads_the_whole_split_every_time(tmp_path: Path) -> None:
    import numpy as np

    from megatron.data.indexed.builder import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "corpus"), np.uint16)
    for _ in range(100):
        builder.add_document(np.arange(50, dtype=np.uint16), None)
    builder.finalize()
    metrics = tmp_path / "metrics.jsonl"
    train_here(
        flags(
            mock_data=None,
            data_path=tmp_path / "corpus",
            tokenizer_type="NullTokenizer",
            split="50,50,0",
            full_validation=True,
            eval_iters=1,
            eval_interval=3,
            metrics_jsonl=metrics,
        )
    )
    records = read_metrics(metrics, "valid")
    samples = (50 * 50 - 1) // 16 // 2 * 2  # whole micro-batches of 2
    assert [record["counted_tokens"] for record in records] == [samples * 16] * 2


def test_timing_log_level_prints_the_parts_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    train_here(flags(timing_log_level=1, timing_log_option="max"))
    out = capsys.readouterr().out
    for part in ("batch-generator", "forward-backward", "all-grads-sync", "optimizer"):
        assert out.count(f"    {part} .") == 6
