"""Logging, evaluation and profiling."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flag import flag


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    log_interval: int = flag(100, "Steps between log lines.", at_least=1)
    log_format: str = flag(
        "classic", "classic: Megatron-LM's lines, which its parsers read; compact: short lines with the time of day.",
        choices=("classic", "compact"),
    )  # fmt: skip
    log_kernels: bool = flag(False, "Print which implementation of each operation runs, and why.")
    tensorboard_dir: str | None = flag(None, "Directory of TensorBoard event files.")
    tensorboard_log_interval: int = flag(1, "Steps between TensorBoard entries.", at_least=1)
    tensorboard_queue_size: int = flag(1000, "Pending TensorBoard entries before a flush.", at_least=1)
    log_memory_interval: int | None = flag(
        None, "Steps between lines with the memory of the fullest rank; a multiple of --log-interval.", at_least=1
    )
    metrics_jsonl: str | None = flag(None, "File that gets one JSON object per logged iteration.")
    log_timers_to_tensorboard: bool = flag(False, "Write the timers to TensorBoard.")
    log_memory_to_tensorboard: bool = flag(False, "Write memory use to TensorBoard.")
    log_validation_ppl_to_tensorboard: bool = flag(False, "Write the validation perplexity to TensorBoard.")
    log_world_size_to_tensorboard: bool = flag(False, "Write the number of ranks to TensorBoard.")
    log_batch_size_to_tensorboard: bool = flag(False, "Write the global batch size to TensorBoard.")
    log_learning_rate_to_tensorboard: bool = flag(
        True, "Do not write the learning rate to TensorBoard.", off="--no-log-learnig-rate-to-tensorboard",
        aliases=("--no-log-learning-rate-to-tensorboard",),
    )  # fmt: skip
    log_loss_scale_to_tensorboard: bool = flag(
        True, "Do not write the loss scale to TensorBoard.", off="--no-log-loss-scale-to-tensorboard"
    )
    log_params_norm: bool = flag(False, "Report the L2 norm of the parameters.")
    log_num_zeros_in_grad: bool = flag(False, "Report how many gradient entries are zero.")
    log_throughput: bool = flag(
        False,
        "Report TFLOP/s per device.",
        status="no-op",
        note="throughput is always reported",
    )
    timing_log_level: int = flag(0, "0: the iteration; 1: its parts; 2: every timer.", choices=(0, 1, 2))
    timing_log_option: str = flag("minmax", "Which ranks' timers are reported.", choices=("max", "minmax", "all"))
    wandb_project: str | None = flag(None, "Weights & Biases project; turns it on.")
    wandb_exp_name: str | None = flag(None, "Weights & Biases run name.")
    wandb_save_dir: str | None = flag(None, "Directory for Weights & Biases files.")
    wandb_entity: str | None = flag(None, "Weights & Biases entity.")
    log_straggler: bool = flag(False, "Report slow ranks.", status="later", note="remove it")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    eval_interval: int = flag(1000, "Steps between evaluations.", at_least=1)
    start_eval_at_iter: int = flag(0, "No evaluation before this iteration.", at_least=0)
    eval_global_batch_size: int | None = flag(
        None, "Samples per evaluation step over all ranks. Unset: the (last) global batch size of training.", at_least=1
    )
    eval_micro_batch_size: int | None = flag(
        None, "Samples per forward pass of an evaluation on one rank. Unset: --micro-batch-size.", at_least=1
    )
    eval_iters: int = flag(100, "Global batches per evaluation; 0 is none.", at_least=0)
    full_validation: bool = flag(False, "Evaluate on the whole validation set each time.")


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Which steps and ranks are traced, and where the traces go."""

    profile: bool = flag(False, "Trace a window of steps with PyTorch's profiler and print where the time went.")
    profile_step_start: int = flag(10, "The trace begins after this iteration.", at_least=0)
    profile_step_end: int = flag(12, "The last iteration that is traced.", at_least=1)
    profile_ranks: tuple[int, ...] = flag((0,), "The ranks that are traced.", nargs="+")
    profile_dir: str = flag("profile", "Folder of the traces; tools/profile_summary.py reads them.")
    use_pytorch_profiler: bool = flag(
        False, "Trace with PyTorch's profiler.", status="no-op", note="--profile always does"
    )
    pytorch_profiler_collect_shapes: bool = flag(False, "Record the input shapes of every operation.")
    pytorch_profiler_collect_callstack: bool = flag(False, "Record the Python call stack of every operation.")
    record_memory_history: bool = flag(
        False, "Record every allocation of the window: in the trace, and on CUDA as a memory snapshot too."
    )
    memory_snapshot_path: str | None = flag(
        None, "The memory snapshot of the window (CUDA); .rankN is put before its ending."
    )

    @property
    def iterations(self) -> range:
        return range(self.profile_step_start + 1, self.profile_step_end + 1)
