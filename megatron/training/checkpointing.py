"""Between a run and its checkpoints: which values are the run's state, and how they are put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from megatron.checkpoint import LoadedState, RunHistory, TrainState, hold_directory, load_checkpoint, save_checkpoint
from megatron.config import RunConfig, to_dict
from megatron.distributed.rng import get_rng_state, set_rng_state
from megatron.distributed.shard import ShardSpec
from megatron.model.gpt import GPT
from megatron.optimizer import Optimizer, Schedule
from megatron.parallelize import persistent_buffers
from megatron.training.exit_reason import ExitRecord
from megatron.training.initialize import Run
from megatron.training.origin import Origin
from megatron.training.process import named
from megatron.training.progress import Progress


@contextmanager
def held_save_directory(run: Run) -> Iterator[tuple[RunHistory, ExitRecord]]:
    """The --save directory is this run's from the first moment (a second run, or a directory that cannot be written,
    is refused before any work), and an error of this run is recorded there. A run that only evaluates holds nothing."""
    save = run.config.checkpoint.save
    directory = Path(save) if save and not run.config.training.skip_train else None
    history, record = RunHistory(run.run_id), ExitRecord(directory, run.launch.rank)
    if directory is not None:
        hold_directory(directory, parallel=run.parallel, history=history)
    try:
        record.clear()
        yield history, record
    except (Exception, KeyboardInterrupt) as error:
        record.failed(named(error))
        raise
    finally:
        history.close()


@dataclass
class RunCheckpoints:
    """Saves and loads one run. `data` names the datasets: a resumed run must see the same ones."""

    run: Run
    model: nn.Module
    specs: Mapping[str, ShardSpec]
    optimizer: Optimizer | None  # this and the schedule: None in a run that only evaluates
    schedule: Schedule | None
    data: Mapping[str, Any]
    history: RunHistory

    def save(self, progress: Progress) -> None:
        config = self.run.config
        assert config.checkpoint.save is not None
        info = save_checkpoint(
            Path(config.checkpoint.save),
            self._state(progress),
            parallel=self.run.parallel,
            save_tokenizer=self._tokenizer_saver(),
            run_id=self.run.run_id,
            history=self.history,
            retain_interval=config.checkpoint.save_retain_interval,
        )
        for message in info.messages:
            self.run.log.info(message)
        if not info.already_there:
            self.run.log.info(  # Megatron's words, then what it cost
                f"  successfully saved checkpoint at iteration {progress.iteration:7d} to {config.checkpoint.save} "
                f"({info.bytes_written / 1e6:.1f} MB in {info.seconds:.2f} s)"
            )

    def load(self, progress: Progress, origin: Origin) -> bool:
        """Fill the model, the optimizer and `progress`; False for a fresh start. The random states come last."""
        config = self.run.config.checkpoint
        assert config.load is not None
        if origin.found is None and not config.finetune:
            return False  # announced when it was looked for
        loaded = load_checkpoint(
            Path(config.load),
            parallel=self.run.parallel,
            params=self._params(),
            step=config.ckpt_step,
            finetune=config.finetune,
            load_optim=config.load_optim and self.optimizer is not None,
            load_rng=config.load_rng and self.optimizer is not None,
            save_dir=Path(config.save) if config.save else None,
            strict=config.strict_load,
            model_config=self.run.config.model if isinstance(self.model, GPT) else None,
            moe_config=self.run.config.moe,
            history=self.history,
            log=self.run.log.info,
            found=origin.found,
        )
        if loaded is None:
            return False
        self._restore(loaded, progress)
        return True

    def _restore(self, loaded: LoadedState, progress: Progress) -> None:
        progress.iteration = loaded.iteration
        progress.consumed_train_samples = loaded.consumed_train_samples
        progress.consumed_valid_samples = loaded.consumed_valid_samples
        if self.optimizer is not None:
            if loaded.optimizer is not None:
                self.optimizer.load_state(loaded.optimizer, loaded.optimizer_extra or {})
            else:
                self.optimizer.refresh_masters()
        if self.schedule is not None and loaded.scheduler is not None:
            progress.schedule_samples = self.schedule.load_state(loaded.scheduler)
        if loaded.rng is not None:
            set_rng_state(loaded.rng, self.run.device)
        self.run.log.info(
            f"loaded {loaded.path}: continuing at iteration {loaded.iteration}, "
            f"{loaded.consumed_train_samples} samples consumed"
        )

    def _state(self, progress: Progress) -> TrainState:
        assert self.optimizer is not None and self.schedule is not None, "a run that only evaluates saves nothing"
        config = self.run.config.checkpoint
        optimizer = None
        if config.save_optim:
            optimizer = {
                name: {kind: (self.specs[name], tensor) for kind, tensor in kinds.items()}
                for name, kinds in self.optimizer.state().items()
            }
        return TrainState(
            iteration=progress.iteration,
            consumed_train_samples=progress.consumed_train_samples,
            consumed_valid_samples=progress.consumed_valid_samples,
            params=self._params(),
            optimizer=optimizer,
            optimizer_extra=self.optimizer.extra_state(),
            scheduler=self.schedule.state(progress.schedule_samples),
            rng=get_rng_state(self.run.device) if config.save_rng else None,
            config=to_dict(self.run.config),
            args=classic_args(self.run, progress, is_gpt=isinstance(self.model, GPT)),
            data=self.data,
        )

    def _params(self) -> dict[str, tuple[ShardSpec, Tensor]]:
        """All that the model is: parameters, and the buffers that belong to its state."""
        tensors = {**dict(self.model.named_parameters()), **persistent_buffers(self.model)}
        return {name: (self.specs[name], tensor) for name, tensor in tensors.items()}

    def _tokenizer_saver(self) -> Callable[[Path], None] | None:
        tokenizer = self.run.tokenizer
        if tokenizer is None or not tokenizer.files():  # NullTokenizer: numbers are not made from text
            return None
        length = self.run.config.data.seq_length
        return lambda folder: tokenizer.save_pretrained(folder, model_max_length=length)


def classic_args(run: Run, progress: Progress, *, is_gpt: bool) -> dict[str, Any]:
    """What Megatron's own readers of a `model_optim_rng.pt` look up in `args`, but for what the checkpoint itself
    derives from the model's settings (shape, activation)."""
    config: RunConfig = run.config
    parallel = run.parallel
    return {
        **(_classic_model_args(run) if is_gpt else {}),
        "seq_length": config.data.seq_length,
        "fp16": config.precision.fp16,
        "bf16": config.precision.bf16,
        "params_dtype": config.precision.params_dtype,
        "seed": config.training.seed,
        "iteration": progress.iteration,
        "consumed_train_samples": progress.consumed_train_samples,
        "consumed_valid_samples": progress.consumed_valid_samples,
        "tensor_model_parallel_size": parallel.tp.size,
        "pipeline_model_parallel_size": parallel.pp.size,
        "data_parallel_size": parallel.dp.size,
        "world_size": parallel.world.size,
    }


def _classic_model_args(run: Run) -> dict[str, Any]:
    model = run.config.model
    return {
        "num_query_groups": model.query_groups,
        "vocab_size": run.vocab_size,
        "padded_vocab_size": run.padded_vocab_size,
        "make_vocab_size_divisible_by": model.make_vocab_size_divisible_by,
        "normalization": model.normalization,
        "norm_epsilon": model.norm_epsilon,
        "apply_query_key_layer_scaling": model.apply_query_key_layer_scaling,
        "add_bias_linear": model.add_bias_linear,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "init_method_std": model.init_method_std,
    }
