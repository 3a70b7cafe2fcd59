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
        None, "Directory for checkpoints, written every --save-interval steps and at the end of the run.", path=True
    )
    load: str | None = flag(
        None,
        "Directory to resume from. If it is empty and also --save, a new run starts. With --finetune it may be a "
        "Hugging Face model.",
        path=True,
    )
    save_interval: int | None = _save_flag(
        None,
        "Steps between checkpoints. Unset: only one checkpoint, at the end.",
        at_least=1,
        aliases=("--persistent-save-interval",),
    )
    save_optim: bool = _save_flag(True, "Do not save the optimizer's state.", off="--no-save-optim")
    save_rng: bool = _save_flag(True, "Do not save the random states.", off="--no-save-rng")
    load_optim: bool = flag(True, "Do not load the optimizer's state.", off="--no-load-optim", needs=(RESUME,))
    load_rng: bool = flag(True, "Do not load the random states.", off="--no-load-rng", needs=(RESUME,))
    finetune: bool = _load_flag(False, "Load weights only and start at iteration 0.", insists=True)
    use_checkpoint_args: bool = _load_flag(
        False, "Take the model's shape and the tokenizer from the checkpoint.", insists=True
    )
    save_tokenizer_assets: bool = _save_flag(
        True,
        "Do not save the tokenizer, which exports and tools/generate.py need.",
        off="--no-save-tokenizer-assets",
        aliases=("--disable-save-tokenizer-assets",),
    )
    exit_on_missing_checkpoint: bool = flag(
        False,
        "Stop when --load has no checkpoint.",
        status="no-op",
        note="a --load without a checkpoint always stops the run, unless --save is the same directory",
    )
    strict_load: bool = _load_flag(
        False, "Reject a damaged checkpoint or a lost tracker instead of falling back to the newest valid step."
    )
    skip_hash: bool = _load_flag(
        False,
        "Do not verify checksums. On an accelerator, this saves reading the files a second time. File sizes are always "
        "compared.",
        cli_only=True,
    )
    perform_initialization: bool = _load_flag(
        True, "Do not draw initial weights (they are loaded from --load).", off="--no-initialization", insists=True
    )
    ckpt_format: str = flag(
        "torch",
        "Format of the checkpoints. Only torch is written.",
        choices=("torch", "torch_dist", "torch_dcp", "fsdp_dtensor", "zarr"),
        status="no-op",
        note="checkpoints are written in the format torch, which loads into any layout",
    )
    ckpt_step: int | None = _load_flag(None, "Load this iteration instead of the newest.", at_least=0, insists=True)
    override_ckpt_iteration: int | None = flag(
        None,
        "Relabel the loaded state as iteration N. The data position and the learning rate become those of iteration N.",
        at_least=0,
        needs=(RESUME,),
        insists=True,
    )
    async_save: bool = _save_flag(
        False, "Write checkpoints in the background. Training waits only for the copy to host memory."
    )
    save_retain_interval: int | None = _save_flag(
        None,
        "Delete older checkpoints, except those of iterations that are multiples of this number. The two newest are "
        "always kept.",
        at_least=1,
    )
    save_retain_last: int | None = _save_flag(
        None,
        "Number of newest checkpoints to keep. Older ones are deleted unless --save-retain-interval keeps them.",
        at_least=2,
    )
    non_persistent_save_interval: int | None = _save_flag(
        None,
        "Steps between non-persistent checkpoints, written for restarts. Only the newest is kept.",
        at_least=1,
    )
    non_persistent_ckpt_type: str | None = _save_flag(
        None,
        "Place of non-persistent checkpoints. global: one directory that all ranks share; local: each rank's share on "
        "a disk or memory file system of its machine.",
        choices=("global", "local", "in_memory"),
        refused={
            "in_memory": "process memory is lost when the process ends; use local, with "
            "--non-persistent-local-ckpt-dir in a memory file system such as /dev/shm/NAME"
        },
    )
    non_persistent_global_ckpt_dir: str | None = flag(
        None,
        "Directory of global non-persistent checkpoints. Unset: the folder non_persistent in --save.",
        path=True,
        needs=(_GLOBAL,),
    )
    non_persistent_local_ckpt_dir: str | None = flag(
        None, "Directory of local non-persistent checkpoints, on every machine.", path=True, needs=(_LOCAL,)
    )
    non_persistent_local_ckpt_algo: str = flag(
        "fully_parallel",
        "Algorithm that divides local non-persistent checkpoints. There is one.",
        choices=("fully_parallel", "atomic"),
        status="no-op",
        note="every rank writes its own share, and --replication copies it to another machine",
    )
    replication: bool = flag(
        False, "Copy every rank's share of a local non-persistent checkpoint to other machines.", needs=(_LOCAL,)
    )
    replication_jump: int | None = flag(
        None,
        "Rank stride J of the copies: ranks N, N+J, N+2J, ... of a block of J x factor ranks store each other's "
        "shares. Unset: the ranks per machine.",
        at_least=1,
        needs=(_REPLICATION,),
    )
    replication_factor: int = flag(
        2, "Number of copies of each share, the rank's own included.", at_least=2, needs=(_REPLICATION,)
    )
    ckpt_convert_format: str | None = flag(
        None, "Convert the checkpoint to this format.", status="never", note="use tools/convert_checkpoint.py"
    )

    @property
    def resumes(self) -> bool:
        """True if --load restores the state of a run, not only its weights."""
        return self.load is not None and not self.finetune
