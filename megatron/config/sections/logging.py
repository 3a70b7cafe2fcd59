"""Logging, evaluation and profiling."""

from dataclasses import dataclass
from functools import partial

from megatron.config.flag import Need, flag
from megatron.utils.numerals import INT32

_TENSORBOARD = Need("--tensorboard-dir", lambda run: run.logging.tensorboard_dir is not None)
_WANDB = Need("--wandb-project", lambda run: run.logging.wandb_project is not None)
_TIMERS = Need("--timing-log-level 1 or 2", lambda run: run.logging.timing_log_level > 0)
_EVALUATION = Need("--eval-iters above 0", lambda run: run.evaluation.eval_iters > 0)
_VALIDATION = Need("validation data", lambda run: run.data.may_validate)
_TRACE = Need("--profile", lambda run: run.profile.profile or "profile" in run.origins)
_MEMORY = Need("--profile with --record-memory-history", lambda run: run.profile.record_memory_history)
_tensorboard_flag = partial(flag, needs=(_TENSORBOARD,))
_trace_flag = partial(flag, needs=(_TRACE,), insists=True)
_validation_flag = partial(flag, needs=(_EVALUATION, _VALIDATION))


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    log_interval: int = flag(100, "Steps between log lines.", at_least=1)
    log_format: str = flag(
        "classic", "Format of log lines. classic: as Megatron-LM's, for its parsers; compact: short, with the time.",
        choices=("classic", "compact"),
    )  # fmt: skip
    log_kernels: bool = flag(False, "Print which implementation of each operation runs, and why.")
    tensorboard_dir: str | None = flag(None, "Directory of TensorBoard event files.", path=True)
    tensorboard_log_interval: int = _tensorboard_flag(1, "Steps between TensorBoard entries.", at_least=1)
    tensorboard_queue_size: int = _tensorboard_flag(1000, "Pending TensorBoard entries before a flush.", at_least=1)
    log_memory_interval: int | None = flag(
        None,
        "Steps between log lines with the memory of the rank that uses most, a multiple of --log-interval.",
        at_least=1,
    )
    metrics_jsonl: str | None = flag(None, "File for metrics, one JSON object per logged iteration.", path=True)
    log_timers_to_tensorboard: bool = _tensorboard_flag(False, "Write the timers to TensorBoard.")
    log_memory_to_tensorboard: bool = _tensorboard_flag(False, "Write memory use to TensorBoard.")
    log_validation_ppl_to_tensorboard: bool = _tensorboard_flag(
        False, "Write the validation perplexity to TensorBoard."
    )
    log_world_size_to_tensorboard: bool = _tensorboard_flag(False, "Write the number of ranks to TensorBoard.")
    log_batch_size_to_tensorboard: bool = _tensorboard_flag(False, "Write the global batch size to TensorBoard.")
    log_learning_rate_to_tensorboard: bool = _tensorboard_flag(
        True, "Do not write the learning rate to TensorBoard.", off="--no-log-learnig-rate-to-tensorboard",
        aliases=("--no-log-learning-rate-to-tensorboard",))  # fmt: skip
    log_loss_scale_to_tensorboard: bool = _tensorboard_flag(
        True, "Do not write the loss scale to TensorBoard.", off="--no-log-loss-scale-to-tensorboard"
    )
    log_params_norm: bool = flag(False, "Report the L2 norm of the parameters.")
    log_num_zeros_in_grad: bool = flag(False, "Report how many gradient entries are zero.")
    log_throughput: bool = flag(
        False, "Report TFLOP/s per device.", status="no-op", note="throughput is always reported"
    )
    timing_log_level: int = flag(
        0, "Timers to log. 0: only the iteration; 1: also its parts; 2: all.", choices=(0, 1, 2)
    )
    timing_log_option: str = flag(
        "minmax",
        "Times to log. max: the slowest rank; minmax: the fastest and the slowest rank; all: every rank.",
        choices=("max", "minmax", "all"),
        needs=(_TIMERS,),
    )
    wandb_project: str | None = flag(None, "Weights & Biases project. Turns Weights & Biases on.")
    wandb_exp_name: str | None = flag(None, "Weights & Biases run name.", needs=(_WANDB,))
    wandb_save_dir: str | None = flag(None, "Directory for Weights & Biases files.", needs=(_WANDB,), path=True)
    wandb_entity: str | None = flag(None, "Weights & Biases entity.", needs=(_WANDB,))
    log_straggler: bool = flag(False, "Report slow ranks.", status="later", note="remove the flag")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    eval_interval: int = _validation_flag(1000, "Steps between evaluations.", at_least=1)
    start_eval_at_iter: int = _validation_flag(0, "First iteration after which an evaluation may run.", at_least=0)
    eval_global_batch_size: int | None = flag(
        None,
        "Samples per evaluation step over all ranks. Unset: the final global batch size of training.",
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
    eval_iters: int = flag(100, "Global batches per evaluation. 0 turns evaluation off.", at_least=0)
    full_validation: bool = _validation_flag(False, "Evaluate on the whole validation set each time.")
    validation_samples: tuple[str, ...] | None = _validation_flag(
        None,
        "Evaluate on the first N samples each time: N, or NAME=N for each of several sets. With --full-validation, "
        "sets without N are read whole.",
        nargs="+",
    )


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    profile: bool = flag(False, "Trace a window of steps with PyTorch's profiler and print a summary of the time.")
    profile_step_start: int = _trace_flag(10, "Iteration after which the trace begins.", at_least=0)
    profile_step_end: int = _trace_flag(12, "Last iteration that is traced.", at_least=1)
    profile_ranks: tuple[int, ...] = _trace_flag((0,), "Ranks that are traced.", nargs="+")
    profile_dir: str = _trace_flag("profile", "Folder of the traces, for tools/profile_summary.py.", path=True)
    use_pytorch_profiler: bool = flag(
        False, "Trace with PyTorch's profiler.", status="no-op", note="--profile always does"
    )
    pytorch_profiler_collect_shapes: bool = _trace_flag(False, "Record the input shapes of every operation.")
    pytorch_profiler_collect_callstack: bool = _trace_flag(False, "Record the Python call stack of every operation.")
    record_memory_history: bool = _trace_flag(
        False, "Record every allocation of the window in the trace, and on CUDA also in a memory snapshot."
    )
    memory_snapshot_path: str | None = flag(
        None,
        "File of the memory snapshot (CUDA). .rankN is inserted before its suffix.",
        needs=(_MEMORY,),
        insists=True,
        path=True,
    )

    @property
    def iterations(self) -> range:
        return range(self.profile_step_start + 1, self.profile_step_end + 1)
