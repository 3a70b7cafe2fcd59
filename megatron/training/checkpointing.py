"""Connects a run and its checkpoints: which values are the run's state, and how they are restored."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint.all_ranks import do_on_first, run_on_all
from megatron.checkpoint.background import Background
from megatron.checkpoint.besides_tensors import saved_values
from megatron.checkpoint.determinism import determinism_fingerprint
from megatron.checkpoint.load import load_checkpoint
from megatron.checkpoint.non_persistent import NonPersistent
from megatron.checkpoint.retention import warning_before_training
from megatron.checkpoint.run_state import LoadedState, Retention, RunHistory, SavedInfo, TrainState, writes
from megatron.checkpoint.save import Save, hold_directory, save_now
from megatron.config import to_dict
from megatron.data_parallel import bucket_size
from megatron.distributed.rng import get_rng_state, set_rng_state
from megatron.engine import Engine, Evaluation
from megatron.model.gpt import GPT
from megatron.optimizer import Optimizer, Schedule, state_spec
from megatron.parallelize import persistent_buffers
from megatron.state.shard import Shard
from megatron.training.classic_args import classic_args
from megatron.training.exit import ExitRecord, as_megatron_error
from megatron.training.initialize import Run
from megatron.training.restarts import count_start
from megatron.training.resume import Progress, ResumePoint, find_step, non_persistent_of
from megatron.utils.foreign import is_hugging_face


@contextmanager
def held_save_directory(run: Run) -> Iterator[tuple[RunHistory, ExitRecord]]:
    """Locks the --save directory for this run, and records there the error that ends it. A second run, or a directory
    that cannot be written, is rejected before any work. A run that only evaluates locks nothing."""
    save = run.config.checkpoint.save
    directory = Path(save) if save and not run.config.training.skip_train else None
    history, record = RunHistory(run.run_id), ExitRecord(directory, run.launch.rank)
    if directory is not None:
        hold_directory(directory, parallel=run.parallel, history=history)
    try:
        if directory is not None:
            non_persistent = non_persistent_of(run)
            if non_persistent is not None:
                non_persistent.hold(history)
            between = non_persistent.steps_here() if non_persistent is not None else []
            do_on_first(partial(count_start, directory, run.launch, between), run.parallel.world)
        record.clear()
        yield history, record
    except (Exception, KeyboardInterrupt) as error:
        record.failed(as_megatron_error(error))
        raise
    finally:
        history.close()


@dataclass
class RunCheckpoints:
    """Saves and loads one run. `data` identifies the datasets: a resumed run must read the same ones."""

    run: Run
    engine: Engine | Evaluation
    specs: Mapping[str, Shard]
    schedule: Schedule | None  # None in a run that only evaluates
    data: Mapping[str, Any]
    history: RunHistory
    origin: Mapping[str, Any] = field(default_factory=dict)
    """Origin of the imported model that this run continues; an export restores it."""

    @property
    def optimizer(self) -> Optimizer | None:
        return self.engine.optimizer if isinstance(self.engine, Engine) else None

    def save(self, progress: Progress) -> None:
        """Saves the run's state. With --async-save, starts the save once the previous one is done."""
        settings = self.run.config.checkpoint
        assert settings.save is not None
        self.finish()
        save = Save(
            Path(settings.save),
            self._state(progress),
            parallel=self.run.parallel,
            save_tokenizer=self._tokenizer_saver(),
            history=self.history,
            fingerprint=self._fingerprint,
        )
        self._start(save, Retention(settings.save_retain_last, settings.save_retain_interval))

    def save_non_persistent(self, progress: Progress) -> None:
        """Saves a non-persistent checkpoint, for a restart before the next regular save."""
        assert self.non_persistent is not None
        self.finish()
        save = self.non_persistent.save(self._state(progress), self.history, self._fingerprint)
        self._start(save, Retention())

    def _start(self, save: Save, retention: Retention) -> None:
        in_background = self.run.config.checkpoint.async_save
        self._tell(self.background.start(save, retention) if in_background else save_now(save, retention))

    @cached_property
    def non_persistent(self) -> NonPersistent | None:
        return non_persistent_of(self.run)

    @property
    def _fingerprint(self) -> Mapping[str, Any]:
        size = bucket_size(self.run.config.parallel.ddp_bucket_size, self.run.parallel.dp_cp.size)
        return determinism_fingerprint(self.run.device, self.run.kernels, size)

    @cached_property
    def background(self) -> Background:
        asynchronous = isinstance(self.engine, Engine) and self.engine.asynchronous
        return Background(self.run.parallel, self.run.device, later=asynchronous)

    def poll(self) -> None:
        """Advances a background save without waiting for it. Called after every iteration."""
        self._tell(self.background.poll())

    def finish(self) -> None:
        """Waits for a background save. On return the checkpoint is on disk; otherwise an error is raised."""
        self._tell(self.background.finish())

    def end(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for a background save. After an error abandons it, because other ranks may not have the error. `kind`:
        class of the error, or None."""
        if kind is None:
            self.finish()
        else:
            self.background.close()

    def _tell(self, info: SavedInfo | None) -> None:
        if info is None:
            return
        for message in info.messages:
            self.run.log.info(message)
        if info.already_there:
            return
        if info.line is None and self.non_persistent is not None:
            for message in self.non_persistent.clear():
                self.run.log.info(message)
        kind, where = "", self.run.config.checkpoint.save
        if info.line is not None and self.non_persistent is not None:
            kind, where = "non-persistent ", str(self.non_persistent.directory)
        waited = "" if info.blocked is None else f"; training waited for {info.blocked:.2f} s"
        self.run.log.info(  # Megatron's wording, then the cost of the save
            f"  successfully saved {kind}checkpoint at iteration {info.step:7d} to {where} "
            f"({info.bytes_written / 1e6:.1f} MB in {info.seconds:.2f} s{waited})"
        )

    def warn_before_training(self) -> None:
        """Warns if nothing will be saved, or if the first save sets aside steps of another run."""
        save = self.run.config.checkpoint.save
        if save is None:
            self.run.log.info("no --save: the weights are lost when this run ends; --save DIR keeps them")
        elif self.run.log.main and (warning := warning_before_training(Path(save), self.history)):
            self.run.log.warn(warning)

    def load(self, progress: Progress, resume_point: ResumePoint, *, hash_later: bool) -> None:
        """Fills the model, the optimizer, `progress` and then the random states, unless it is a fresh start."""
        loaded = self._load(resume_point, hash_later)
        if loaded is not None:
            self._restore(loaded, progress)
            if resume_point.moved_to is not None:
                self._move(progress, resume_point.moved_to, loaded)

    def _load(self, resume_point: ResumePoint, hash_later: bool) -> LoadedState | None:
        """Fills the model; returns the rest of the checkpoint's state, or None for a fresh start."""
        run, params, found = self.run, self._params(), resume_point.found
        config = run.config.checkpoint
        if config.finetune:
            assert config.load is not None
            if is_hugging_face(Path(config.load)):
                return self._load_model(Path(config.load))
            found = find_step(run, self.history, hash_later=hash_later)
        if found is None:
            return None  # already logged
        self.origin = found.manifest.origin
        return load_checkpoint(
            found,
            parallel=run.parallel,
            params=params,
            take=self._take,
            held=None if self.optimizer is None else self.optimizer.held,
            own=self.optimizer.loadable_in_place() if found.unhashed and self.optimizer is not None else None,
            finetune=config.finetune,
            load_optim=config.load_optim and self.optimizer is not None,
            load_rng=config.load_rng and self.optimizer is not None,
            model_config=run.config.model if isinstance(self.engine.model, GPT) else None,
            moe_config=run.config.moe,
            history=self.history,
            fingerprint=self._fingerprint,
            deterministic=run.config.training.deterministic_mode,
            log=run.log.info,
        )

    def _load_model(self, folder: Path) -> LoadedState:
        """Fills the model with weights in another program's format."""
        config, parallel = self.run.config, self.run.parallel
        self.origin = run_on_all(lambda: self.run.source.origin(folder), parallel.world)
        return self.run.source.load_model(
            folder,
            parallel=parallel,
            params=self._params(),
            take=self._take,
            model_config=config.model if isinstance(self.engine.model, GPT) else None,
            moe_config=config.moe,
            log=self.run.log.info,
        )

    def _restore(self, loaded: LoadedState, progress: Progress) -> None:
        progress.iteration = loaded.iteration
        progress.consumed_train_samples = loaded.consumed_train_samples
        progress.consumed_valid_samples = loaded.consumed_valid_samples
        if self.optimizer is not None:
            if loaded.optimizer is not None:
                with saved_values("optimizer state", loaded.path, "give --no-load-optim to start it anew"):
                    self.optimizer.load_state(loaded.optimizer, loaded.optimizer_extra or {})
            else:
                self.optimizer.refresh_masters()
        if self.schedule is not None and loaded.scheduler is not None:
            with saved_values("learning-rate schedule", loaded.path, "give --finetune to load only the weights"):
                progress.schedule_samples = self.schedule.load_state(loaded.scheduler)
        if loaded.rng is not None:
            with saved_values("random states", loaded.path, "give --no-load-rng to use new ones"):
                set_rng_state(loaded.rng, self.run.device)
        if self.optimizer is None:  # evaluation only
            of = f", of iteration {loaded.iteration}" if loaded.iteration else ""
            self.run.log.info(f"loaded {loaded.path}{of}")
            return
        self.run.log.info(
            f"loaded {loaded.path}: continuing at iteration {loaded.iteration}, "
            f"{loaded.consumed_train_samples} samples consumed"
        )

    def _move(self, progress: Progress, iteration: int, loaded: LoadedState) -> None:
        """Relabels the loaded state as another iteration. Data position and learning-rate schedule follow; weights,
        moments and random states stay."""
        plan = self.run.batch_plan
        progress.iteration, progress.consumed_train_samples = iteration, plan.samples_after(iteration)
        progress.schedule_samples = plan.schedule_samples_after(iteration)
        self.history.moved(loaded.iteration, iteration)
        self.run.log.info(
            f"--override-ckpt-iteration {iteration}: continuing at iteration {iteration}, "
            f"{progress.consumed_train_samples} samples consumed"
        )

    def _state(self, progress: Progress) -> TrainState:
        own = self.optimizer
        assert own is not None and self.schedule is not None, "a run that only evaluates saves nothing"
        config = self.run.config.checkpoint
        optimizer = None
        if config.save_optim:
            optimizer = {
                name: {kind: (state_spec(own.shards[name], kind, tensor), tensor) for kind, tensor in kinds.items()}
                for name, kinds in own.state().items()
            }
        return TrainState(
            iteration=progress.iteration,
            consumed_train_samples=progress.consumed_train_samples,
            consumed_valid_samples=progress.consumed_valid_samples,
            params=self._whole_params(),
            optimizer=optimizer,
            replicas=own.store.axes,
            optimizer_extra=own.extra_state(),
            scheduler=self.schedule.state(progress.schedule_samples),
            rng=get_rng_state(self.run.device) if config.save_rng else None,
            config=to_dict(self.run.config),
            args=classic_args(self.run, progress, is_gpt=isinstance(self.engine.model, GPT)),
            data=self.data,
            origin=self.origin,
        )

    def _params(self) -> dict[str, tuple[Shard, Tensor]]:
        """Parameters and persistent buffers of the model."""
        model, divided = self.engine.model, self.engine.divided
        parameters = dict(model.named_parameters())
        if divided is not None:
            parameters = {name: divided.parameter(name) for name in divided.all_names}
        return self._with_specs(parameters | persistent_buffers(model))

    def _whole_params(self) -> dict[str, tuple[Shard, Tensor]]:
        """Returns `_params` with divided tensors made whole, on the ranks that write them."""
        keep, divided = writes(self.run.parallel), self.engine.divided
        if divided is None:
            return self._params()
        wholes = {name: w.cpu() if keep else divided.parameter(name) for name, w in self.engine.whole_weights()}
        return self._with_specs(wholes | persistent_buffers(self.engine.model))

    def _with_specs(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Shard, Tensor]]:
        return {name: (self.specs[name], tensor) for name, tensor in tensors.items()}

    @property
    def _take(self) -> Callable[[str, Tensor], None] | None:
        return None if self.engine.divided is None else self.engine.divided.take

    def _tokenizer_saver(self) -> Callable[[Path], None] | None:
        tokenizer = self.run.tokenizer
        if not self.run.config.checkpoint.save_tokenizer_assets:
            return None
        if tokenizer is None or not tokenizer.files():  # NullTokenizer has no files
            return None
        length = None if self.origin else self.run.config.data.seq_length  # an imported model keeps its own
        return lambda folder: tokenizer.save_pretrained(folder, model_max_length=length)
