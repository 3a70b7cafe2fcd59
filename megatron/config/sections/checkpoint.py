"""Saving and loading of checkpoints."""

from dataclasses import dataclass
from functools import partial

from megatron.config.flag import Need, flag

_SAVE = Need("--save", lambda run: run.checkpoint.save is not None)
_LOAD = Need("--load", lambda run: run.checkpoint.load is not None)
_GLOBAL = Need("--non-persistent-ckpt-type global", lambda run: run.checkpoint.non_persistent_ckpt_type == "global")
_LOCAL = Need("--non-persistent-ckpt-type local", lambda run: run.checkpoint.non_persistent_ckpt_type == "local")
_REPLICATION = Need("--replication", lambda run: run.checkpoint.replication)
RESUME = Need("--load without --finetune", lambda run: run.checkpoint.resumes)
_save_flag = partial(flag, needs=(_SAVE,))
_load_flag = partial(flag, needs=(_LOAD,))


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    save: str | None = flag(
        None, "Directory to save checkpoints in: at the end of the run, and every --save-interval.", path=True
    )
    load: str | None = flag(
        None,
        "Directory to resume from; the same as --save starts afresh while it is empty. With --finetune also a "
        "Hugging Face model.",
        path=True,
    )
    save_interval: int | None = _save_flag(
        None, "Steps between checkpoints. Unset: one at the end.", at_least=1, aliases=("--persistent-save-interval",)
    )
    save_optim: bool = _save_flag(True, "Leave the optimizer out of checkpoints.", off="--no-save-optim")
    save_rng: bool = _save_flag(True, "Leave the random states out of checkpoints.", off="--no-save-rng")
    load_optim: bool = flag(True, "Do not load the optimizer.", off="--no-load-optim", needs=(RESUME,))
    load_rng: bool = flag(True, "Do not load the random states.", off="--no-load-rng", needs=(RESUME,))
    finetune: bool = _load_flag(False, "Load weights only and start at iteration 0.", insists=True)
    use_checkpoint_args: bool = _load_flag(
        False, "Take the model's shape and the tokenizer from the checkpoint.", insists=True
    )
    save_tokenizer_assets: bool = _save_flag(
        True,
        "Leave the tokenizer out of checkpoints: an export and tools/generate.py need it.",
        off="--no-save-tokenizer-assets",
        aliases=("--disable-save-tokenizer-assets",),
    )
    exit_on_missing_checkpoint: bool = flag(
        False,
        "Stop when --load has no checkpoint.",
        status="no-op",
        note="a --load without a checkpoint always stops the run, unless it is also --save",
    )
    strict_load: bool = _load_flag(
        False, "Refuse a damaged checkpoint or a lost tracker instead of falling back to the newest valid step."
    )
    skip_hash: bool = _load_flag(
        False,
        "Do not verify checksums before loading, which reads every file once more; sizes are always compared.",
        cli_only=True,
    )
    perform_initialization: bool = _load_flag(
        True, "Do not draw initial weights (they are loaded from --load).", off="--no-initialization", insists=True
    )
    ckpt_format: str = flag(
        "torch",
        "Format of the checkpoints; there is one.",
        choices=("torch", "torch_dist", "torch_dcp", "fsdp_dtensor", "zarr"),
        status="no-op",
        note="checkpoints are written in the format torch, which loads into any layout",
    )
    ckpt_step: int | None = _load_flag(None, "Load this iteration instead of the newest.", at_least=0, insists=True)
    override_ckpt_iteration: int | None = flag(
        None,
        "Go on from the loaded state as iteration N: with the samples and the learning rate that follow on N "
        "iterations of this run's batch sizes.",
        at_least=0,
        needs=(RESUME,),
        insists=True,
    )
    async_save: bool = _save_flag(
        False, "Write checkpoints in the background: training waits for a copy in host memory alone."
    )
    save_retain_interval: int | None = _save_flag(
        None, "Of the older checkpoints keep only those at multiples of this; the newest is always kept.", at_least=1
    )
    save_retain_last: int | None = _save_flag(
        None,
        "Of the older checkpoints keep only so many of the newest, and those that --save-retain-interval keeps.",
        at_least=2,
    )
    non_persistent_save_interval: int | None = _save_flag(
        None,
        "Steps between non-persistent checkpoints, of which the newest alone is kept: for a restart that loses little.",
        at_least=1,
    )
    non_persistent_ckpt_type: str | None = _save_flag(
        None,
        "Where non-persistent checkpoints are: global, in one directory that all ranks see; local, each rank's share "
        "on a disk, or in a file system in memory, of its machine.",
        choices=("global", "local", "in_memory"),
        refused={
            "in_memory": "the memory of a process ends with it; use local, with --non-persistent-local-ckpt-dir in a "
            "file system in memory, such as /dev/shm/NAME"
        },
    )
    non_persistent_global_ckpt_dir: str | None = flag(
        None,
        "Directory of global non-persistent checkpoints. Unset: non_persistent in that of --save.",
        path=True,
        needs=(_GLOBAL,),
    )
    non_persistent_local_ckpt_dir: str | None = flag(
        None, "Directory of local non-persistent checkpoints, on every machine.", path=True, needs=(_LOCAL,)
    )
    non_persistent_local_ckpt_algo: str = flag(
        "fully_parallel",
        "How local non-persistent checkpoints are divided; there is one way.",
        choices=("fully_parallel", "atomic"),
        status="no-op",
        note="every rank writes its own share, and --replication copies it to another machine",
    )
    replication: bool = flag(
        False, "Copy every rank's share of a local non-persistent checkpoint to other machines.", needs=(_LOCAL,)
    )
    replication_jump: int | None = flag(
        None,
        "The copies of rank N are with ranks N+J, N+2J, ... of the same J x factor ranks. Unset: the ranks of a "
        "machine.",
        at_least=1,
        needs=(_REPLICATION,),
    )
    replication_factor: int = flag(
        2, "How many machines have each share, its own included.", at_least=2, needs=(_REPLICATION,)
    )
    ckpt_convert_format: str | None = flag(
        None, "Convert on the way.", status="never", note="use tools/convert_checkpoint.py"
    )

    @property
    def resumes(self) -> bool:
        """Whether the state of a run is loaded, and not its weights alone."""
        return self.load is not None and not self.finetune
