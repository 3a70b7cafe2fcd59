"""Progress of a run, and the checkpoint from which it resumes. A resumed run must read the same samples in the same
order.

The checkpoint is found before the datasets are built, because the requested number of samples decides their order.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.checkpoint.architecture import check_architecture
from megatron.checkpoint.besides_tensors import saved_values
from megatron.checkpoint.found_step import FoundStep, find_checkpoint, saved_tokenizer
from megatron.checkpoint.local.steps import LocalNonPersistent
from megatron.checkpoint.non_persistent import NonPersistent
from megatron.checkpoint.paths import NON_PERSISTENT
from megatron.checkpoint.run_state import RunHistory
from megatron.config import BatchPlan, RunConfig, to_dict
from megatron.config.split import parse_split
from megatron.errors import ConfigError, DataError
from megatron.tokenizer import Tokenizer
from megatron.training.checks import copies_of
from megatron.training.initialize import Run
from megatron.utils.token_difference import token_difference, tokens_of

# Settings that decide the samples and their order, besides the files and --split.
_ORDER = {
    "training": ("seed",),
    "data": (
        *("seq_length", "split_rule", "dataloader_type", "data_sharding", "sft"),
        *("fim_data", "fim_rate", "fim_spm_rate", "fim_split_sample", "fim_fragment_rate", "fim_no_prefix"),
        *("fim_prefix_token", "fim_middle_token", "fim_suffix_token", "fim_eod_token"),
    ),
}
_ACCEPT = (
    "or --accept-changed-data to continue with these anyway, or --finetune to load the weights and start the data "
    "from its beginning"
)


@dataclass
class Progress:
    """Position of a run. With the data and the seed, these integers decide all samples to come."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    schedule_samples: int = 0  # a skipped step consumes data but does not advance the schedules


@dataclass(frozen=True)
class ResumePoint:
    """Checkpoint of --load, of which only the manifest has been read. `found` is None for a start at iteration 0."""

    found: FoundStep | None
    moved_to: int | None = None
    """Iteration that --override-ckpt-iteration gives the checkpoint; None keeps the saved iteration."""

    @property
    def resumed(self) -> bool:
        return self.found is not None and not self.found.release

    @property
    def _data(self) -> Mapping[str, Any]:
        return self.found.manifest.data if self.found is not None else {}

    def train_samples(self, plan: BatchPlan) -> int:
        """Number of samples to build the training set for. The earlier run's number is kept if it suffices, so that the
        order stays the same."""
        if self.found is None or not self.resumed:
            return plan.train_samples
        saved = self.found.manifest
        step, consumed = saved.step, saved.consumed_train_samples
        if self.moved_to is not None:
            step, consumed = self.moved_to, plan.samples_after(self.moved_to)
        needed = consumed + plan.samples_left(step, consumed)
        with saved_values("number of training samples", self.found.directory, "use another checkpoint"):
            before = int(self._data.get("train_samples", 0))
        return before if needed <= before else needed

    def order_warning(self, train_samples: int) -> list[str]:
        before = self._data.get("train_samples")
        if not self.resumed or before is None or before == train_samples or self._data.get("fingerprint") == "mock":
            return []
        return [
            f"this run requests {train_samples} training samples, the previous run requested {before}: if the number "
            "of epochs changes, samples of this epoch may repeat or be skipped"
        ]

    def check_architecture(self, config: RunConfig) -> None:
        """Rejects another architecture before data or memory is requested. (Flags do not describe a script's own model;
        its tensors are compared when they are loaded.)"""
        if self.found is None:
            return
        saved = self.found.manifest
        if "model" in saved.config and "padded_vocab_size" in saved.args:
            check_architecture(saved.config, config.model, config.moe, finetune=self.found.release)

    def check_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """Rejects another tokenizer, even if the data does not record its own."""
        before = self._data.get("tokenizer")
        if self.found is None or not self.resumed or before is None or tokenizer is None:
            return
        if before not in tokenizer.fingerprints:
            saved = saved_tokenizer(self.found)
            token = "" if saved is None else token_difference(tokens_of(saved), "the checkpoint", tokenizer)
            raise DataError(
                f"the tokenizer ({tokenizer.name}, fingerprint {tokenizer.fingerprint[:12]}) is not the tokenizer of "
                f"{self.found.directory} (fingerprint {str(before)[:12]}){token}; resume with the tokenizer of the "
                "previous run, or start another run from its weights with --finetune"
            )

    def check_settings(self, config: RunConfig) -> list[str]:
        """Rejects settings that change the samples that the run reads. Returns warnings about changes that
        --accept-changed-data accepts."""
        if self.found is None or not self.resumed:
            return []
        saved, ours = self.found.manifest.config, to_dict(config)
        changed = [
            f"--{name.replace('_', '-')} is {ours[section][name]} here and {saved[section][name]} in the checkpoint"
            for section, names in _ORDER.items()
            for name in names
            if section in saved and saved[section].get(name, ours[section][name]) != ours[section][name]
        ]
        if "data" in saved and _split_of(ours) != _split_of(saved):
            changed.append(f"--split is {_split_as_text(ours)} here and {_split_as_text(saved)} in the checkpoint")
        if not changed:
            return []
        difference = f"the order of the samples differs from the checkpoint's: {'; '.join(changed)}"
        if config.data.accept_changed_data:
            return [f"--accept-changed-data: {difference}"]
        raise ConfigError(f"{difference}. Give the previous run's settings, {_ACCEPT}")

    def check_content(self, fingerprint: str, *, accept: bool) -> list[str]:
        before = self._data.get("fingerprint")
        if self.found is None or not self.resumed or not before or not fingerprint or before == fingerprint:
            return []
        difference = (
            f"the data differs from that of {self.found.directory}: its content or its sources' weights have changed"
        )
        if accept:
            return [f"--accept-changed-data: {difference}; the count of consumed samples is kept"]
        raise DataError(
            f"{difference}, so the count of consumed samples does not fit. Resume with the previous run's data, "
            f"{_ACCEPT}"
        )


def find_resume_point(run: Run, history: RunHistory, *, hash_later: bool) -> ResumePoint:
    """Finds the checkpoint of --load. `hash_later`: see `find_checkpoint`."""
    config = run.config.checkpoint
    if config.load is None or config.finetune:
        return ResumePoint(None)
    found = find_step(run, history, hash_later=hash_later)
    return ResumePoint(found, _moved_to(run, found))


def _moved_to(run: Run, found: FoundStep | None) -> int | None:
    """Iteration of --override-ckpt-iteration, or None to keep the iteration of the step. It is also kept if a run with
    the same flag and --save directory saved the step: otherwise every restart would begin at the same iteration."""
    config = run.config.checkpoint
    wanted = config.override_ckpt_iteration
    if wanted is None:
        return None
    given = f"--override-ckpt-iteration {wanted}"
    if found is None:
        run.log.info(f"{given}: has no effect, because nothing was loaded")
        return None
    before = found.manifest.config.get("checkpoint", {}).get("override_ckpt_iteration")
    same_folder = config.save is not None and Path(config.save).resolve() == found.saved_by.resolve()
    if same_folder and before == wanted:
        run.log.info(
            f"{given}: {found.directory} was saved by a run with this flag, so this run continues from there; give "
            "another --save to begin at that iteration again"
        )
        return None
    if wanted < found.manifest.step and _steps_between(run) is not None:
        raise ConfigError(
            f"{given}: is before the loaded step {found.manifest.step}, so a restart would skip the non-persistent "
            "checkpoints between the two; remove --non-persistent-save-interval, or give another --save"
        )
    return wanted


def non_persistent_of(run: Run) -> NonPersistent | None:
    """Store of the non-persistent checkpoints that the settings enable."""
    settings = run.config.checkpoint
    if settings.save is None or settings.non_persistent_ckpt_type is None:
        return None
    save = Path(settings.save)
    if settings.non_persistent_ckpt_type == "local":
        assert settings.non_persistent_local_ckpt_dir is not None
        directory = Path(settings.non_persistent_local_ckpt_dir)
        return LocalNonPersistent(directory, save, run.parallel, copies_of(run.config, run.launch))
    given = settings.non_persistent_global_ckpt_dir
    return NonPersistent(save / NON_PERSISTENT if given is None else Path(given), save, run.parallel)


def _steps_between(run: Run) -> NonPersistent | None:
    """Non-persistent checkpoints that --load may also use; None if a step was requested or this is not a restart."""
    config = run.config.checkpoint
    if config.load is None or config.save is None or config.ckpt_step is not None or config.finetune:
        return None
    return non_persistent_of(run) if Path(config.load).resolve() == Path(config.save).resolve() else None


def find_step(run: Run, history: RunHistory, *, hash_later: bool) -> FoundStep | None:
    """Finds the step that --load uses; None is a fresh start, which has been logged."""
    config = run.config.checkpoint
    assert config.load is not None
    non_persistent = _steps_between(run)
    return find_checkpoint(
        Path(config.load),
        parallel=run.parallel,
        step=config.ckpt_step,
        save_dir=Path(config.save) if config.save else None,
        strict=config.strict_load,
        check_hashes=not config.skip_hash,
        hash_later=hash_later,
        history=history,
        log=run.log.info,
        source=run.source,
        newer=None if non_persistent is None else partial(non_persistent.newer, check_hashes=not config.skip_hash),
    )


def _split_of(config: Mapping[str, Mapping[str, Any]]) -> tuple[float, ...] | None:
    """Shares of --split; None if there are no files to split."""
    data = config.get("data", {})
    cut = data.get("data_path") or data.get("data_args_path")
    return parse_split(data["split"]) if cut and "split" in data else None


def _split_as_text(config: Mapping[str, Mapping[str, Any]]) -> str:
    return "not used (no --data-path to split)" if _split_of(config) is None else str(config["data"]["split"])
