"""Logging, evaluation and profiling."""

from dataclasses import dataclass

from megatron.config.flag import Need, flag
from megatron.utils.numerals import INT32

_TENSORBOARD = Need("--tensorboard-dir", lambda run: run.logging.tensorboard_dir is not None)
_WANDB = Need("--wandb-project", lambda run: run.logging.wandb_project is not None)
_TIMERS = Need("--timing-log-level 1 or 2", lambda run: run.logging.timing_log_level > 0)
_EVALUATION = Need("--eval-iters above 0", lambda run: run.evaluation.eval_iters > 0)
_VALIDATION = Need("validation data", lambda run: run.data.may_validate)
_TRACE = Need("--profile", lambda run: run.profile.profile or "profile" in run.origins)
_MEMORY = Need("--profile --record-memory-history", lambda run: run.profile.record_memory_history)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    log_interval: int = flag(100, "Steps between log lines.", at_least=1)
    log_format: str = flag(
        "classic", "classic: Megatron-LM's lines, which its parsers read; compact: short lines with the time of day.",
        choices=("classic", "compact"),
    )  # fmt: skip
    log_kernels: bool = flag(False, "Print which implementation of each operation runs, and why.")
    tensorboard_dir: str | None = flag(None, "Directory of TensorBoard event files.", path=True)
    tensorboard_log_interval: int = flag(1, "Steps between TensorBoard entries.", at_least=1, needs=(_TENSORBOARD,))
    tensorboard_queue_size: int = flag(
        1000, "Pending TensorBoard entries before a flush.", at_least=1, needs=(_TENSORBOARD,)
    )
    log_memory_interval: int | None = flag(
        None, "Steps between lines with the memory of the fullest rank; a multiple of --log-interval.", at_least=1
    )
    metrics_jsonl: str | None = flag(None, "File that gets one JSON object per logged iteration.", path=True)
    log_timers_to_tensorboard: bool = flag(False, "Write the timers to TensorBoard.", needs=(_TENSORBOARD,))
    log_memory_to_tensorboard: bool = flag(False, "Write memory use to TensorBoard.", needs=(_TENSORBOARD,))
    log_validation_ppl_to_tensorboard: bool = flag(
        False, "Write the validation perplexity to TensorBoard.", needs=(_TENSORBOARD,)
    )
    log_world_size_to_tensorboard: bool = flag(
        False, "Write the number of ranks to TensorBoard.", needs=(_TENSORBOARD,)
    )
    log_batch_size_to_tensorboard: bool = flag(
        False, "Write the global batch size to TensorBoard.", needs=(_TENSORBOARD,)
    )
    log_learning_rate_to_tensorboard: bool = flag(
        True, "Do not write the learning rate to TensorBoard.", off="--no-log-learnig-rate-to-tensorboard",
        aliases=("--no-log-learning-rate-to-tensorboard",), needs=(_TENSORBOARD,))  # fmt: skip
    log_loss_scale_to_tensorboard: bool = flag(
        True,
        "Do not write the loss scale to TensorBoard.",
        off="--no-log-loss-scale-to-tensorboard",
        needs=(_TENSORBOARD,),
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
    timing_log_option: str = flag(
        "minmax", "Which ranks' timers are reported.", choices=("max", "minmax", "all"), needs=(_TIMERS,)
    )
    wandb_project: str | None = flag(None, "Weights & Biases project; turns it on.")
    wandb_exp_name: str | None = flag(None, "Weights & Biases run name.", needs=(_WANDB,))
    wandb_save_dir: str | None = flag(None, "Directory for Weights & Biases files.", needs=(_WANDB,), path=True)
    wandb_entity: str | None = flag(None, "Weights & Biases entity.", needs=(_WANDB,))
    log_straggler: bool = flag(False, "Report slow ranks.", status="later", note="remove it")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    eval_interval: int = flag(
        1000,
        "Steps between evaluations.",
        at_least=1,
        needs=(_EVALUATION, _VALIDATION),
    )
    start_eval_at_iter: int = flag(
        0,
        "No evaluation before this iteration.",
        at_least=0,
        needs=(_EVALUATION, _VALIDATION),
    )
    eval_global_batch_size: int | None = flag(
        None,
        "Samples per evaluation step over all ranks. Unset: the (last) global batch size of training.",
        at_least=1,
        at_most=INT32,
        needs=(_EVALUATION,),
    )
    eval_micro_batch_size: int | None = flag(
        None,
        "Samples per forward pass of an evaluation on one rank. Unset: --micro-batch-size.",
        at_least=1,
        at_most=INT32,
        needs=(_EVALUATION,),
    )
    eval_iters: int = flag(100, "Global batches per evaluation; 0 is none.", at_least=0)
    full_validation: bool = flag(
        False,
        "Evaluate on the whole validation set each time.",
        needs=(_EVALUATION, _VALIDATION),
    )
    validation_samples: tuple[str, ...] | None = flag(
        None,
        "Evaluate on the first N samples of the validation set each time: N, or NAME=N for each of several sets (under "
        "--full-validation the others are read whole).",
        nargs="+",
        needs=(_EVALUATION, _VALIDATION),
    )


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Which steps and ranks are traced, and where the traces go."""

    profile: bool = flag(False, "Trace a window of steps with PyTorch's profiler and print where the time went.")
    profile_step_start: int = flag(
        10, "The trace begins after this iteration.", at_least=0, needs=(_TRACE,), insists=True
    )
    profile_step_end: int = flag(12, "The last iteration that is traced.", at_least=1, needs=(_TRACE,), insists=True)
    profile_ranks: tuple[int, ...] = flag((0,), "The ranks that are traced.", nargs="+", needs=(_TRACE,), insists=True)
    profile_dir: str = flag(
        "profile",
        "Folder of the traces; tools/profile_summary.py reads them.",
        needs=(_TRACE,),
        insists=True,
        path=True,
    )
    use_pytorch_profiler: bool = flag(
        False, "Trace with PyTorch's profiler.", status="no-op", note="--profile always does"
    )
    pytorch_profiler_collect_shapes: bool = flag(
        False, "Record the input shapes of every operation.", needs=(_TRACE,), insists=True
    )
    pytorch_profiler_collect_callstack: bool = flag(
        False, "Record the Python call stack of every operation.", needs=(_TRACE,), insists=True
    )
    record_memory_history: bool = flag(
        False,
        "Record every allocation of the window: in the trace, and on CUDA as a memory snapshot too.",
        needs=(_TRACE,),
        insists=True,
    )
    memory_snapshot_path: str | None = flag(
        None,
        "The memory snapshot of the window (CUDA); .rankN is put before its ending.",
        needs=(_MEMORY,),
        insists=True,
        path=True,
    )

    @property
    def iterations(self) -> range:
        return range(self.profile_step_start + 1, self.profile_step_end + 1)
