"""Between a run and its checkpoints: which values are the run's state, and how they are put back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from megatron.checkpoint.load import load_checkpoint
from megatron.checkpoint.save import save_checkpoint
from megatron.checkpoint.state import LoadedState, RunHistory, TrainState
from megatron.config import RunConfig, to_dict
from megatron.distributed.rng import get_rng_state, set_rng_state
from megatron.distributed.shard import ShardSpec
from megatron.optimizer import Optimizer, Schedule
from megatron.training.initialize import Run
from megatron.training.progress import Progress


@dataclass
class RunCheckpoints:
    """Saves and loads one run. `data` names the datasets: a resumed run must see the same ones."""

    run: Run
    model: nn.Module
    specs: Mapping[str, ShardSpec]
    optimizer: Optimizer
    schedule: Schedule
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

    def load(self, progress: Progress) -> bool:
        """Fill the model, the optimizer and `progress`; False for a fresh start. The random states come last."""
        config = self.run.config.checkpoint
        assert config.load is not None
        loaded = load_checkpoint(
            Path(config.load),
            parallel=self.run.parallel,
            params=self._params(),
            step=config.ckpt_step,
            finetune=config.finetune,
            load_optim=config.load_optim,
            load_rng=config.load_rng,
            save_dir=Path(config.save) if config.save else None,
            strict=config.strict_load,
            model_config=self.run.config.model,
            history=self.history,
            log=self.run.log.info,
        )
        if loaded is None:
            return False
        self._restore(loaded, progress)
        return True

    def _restore(self, loaded: LoadedState, progress: Progress) -> None:
        progress.iteration = loaded.iteration
        progress.consumed_train_samples = loaded.consumed_train_samples
        progress.consumed_valid_samples = loaded.consumed_valid_samples
        if loaded.optimizer is not None:
            self.optimizer.load_state(loaded.optimizer, loaded.optimizer_extra or {})
        else:
            self.optimizer.refresh_masters()
        if loaded.scheduler is not None:
            progress.schedule_samples = self.schedule.load_state(loaded.scheduler)
        if loaded.rng is not None:
            set_rng_state(loaded.rng, self.run.device)
        self.run.log.info(
            f"loaded {loaded.path}: continuing at iteration {loaded.iteration}, "
            f"{loaded.consumed_train_samples} samples consumed"
        )

    def _state(self, progress: Progress) -> TrainState:
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
            args=classic_args(self.run, progress),
            data=self.data,
        )

    def _params(self) -> dict[str, tuple[ShardSpec, Tensor]]:
        return {name: (self.specs[name], parameter) for name, parameter in self.model.named_parameters()}

    def _tokenizer_saver(self) -> Callable[[Path], None] | None:
        tokenizer = self.run.tokenizer
        if tokenizer is None or not tokenizer.files():  # NullTokenizer: numbers are not made from text
            return None
        length = self.run.config.data.seq_length
        return lambda folder: tokenizer.save_pretrained(folder, model_max_length=length)


def classic_args(run: Run, progress: Progress) -> dict[str, Any]:
    """What Megatron's own readers of a `model_optim_rng.pt` look up in `args`."""
    config: RunConfig = run.config
    model, parallel = config.model, run.parallel
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_size,
        "num_attention_heads": model.num_attention_heads,
        "kv_channels": model.head_dim,
        "num_query_groups": model.query_groups,
        "max_position_embeddings": model.max_position_embeddings,
        "seq_length": config.data.seq_length,
        "vocab_size": run.vocab_size,
        "padded_vocab_size": run.padded_vocab_size,
        "make_vocab_size_divisible_by": model.make_vocab_size_divisible_by,
        "bias_gelu_fusion": model.bias_gelu_fusion,
        "openai_gelu": model.openai_gelu,
        "swiglu": model.swiglu,
        "normalization": model.normalization,
        "layernorm_epsilon": model.norm_epsilon,
        "norm_epsilon": model.norm_epsilon,
        "apply_query_key_layer_scaling": model.apply_query_key_layer_scaling,
        "untie_embeddings_and_output_weights": not model.tied,
        "add_bias_linear": model.add_bias_linear,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "init_method_std": model.init_method_std,
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
