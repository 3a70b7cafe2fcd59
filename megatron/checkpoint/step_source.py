"""Protocols of steps and models that other programs saved. The implementations are in `megatron/interop/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron.errors import ConfigError

if TYPE_CHECKING:  # the settings are read without torch
    from megatron.checkpoint.manifest import Manifest
    from megatron.checkpoint.reader import StepReader
    from megatron.checkpoint.run_state import LoadedState, Sharded, Take
    from megatron.config import ModelConfig, MoEConfig
    from megatron.distributed.parallel_state import ParallelState

Say = Callable[[str], object]


class ForeignStep(Protocol):
    """A step that another program saved: a manifest made from its files, and a reader of the manifest's slices."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def reader(self) -> StepReader: ...

    @property
    def optimizer_problem(self) -> str | None:
        """Reason why the step's optimizer state cannot be read; None if it can, or if the step has none."""

    def with_vocabulary(self, rows: int) -> ForeignStep:
        """Returns the step with its vocabulary tables cut to `rows` rows."""


class ForeignModel(Protocol):
    """A description of a model in another program's folder; no tensor has been read."""

    @property
    def model_type(self) -> str: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def dtype(self) -> str: ...

    def settings(self) -> dict[str, dict[str, Any]]:
        """Settings that a native checkpoint of this model would have."""


class StepSource(Protocol):
    """Reads steps and models that other programs saved."""

    def open_step(self, directory: Path, say: Say, *, check_hashes: bool = True) -> ForeignStep | None:
        """Opens a step that another program wrote; None if the step is native or does not exist. Data that is read is
        compared with the checksums in its files. `say` reports files without checksums."""

    def open_model(self, folder: Path) -> ForeignModel: ...

    def origin(self, folder: Path) -> Mapping[str, Any]:
        """Data of this model that a later export restores unchanged."""

    def load_model(
        self,
        folder: Path,
        *,
        parallel: ParallelState,
        params: Mapping[str, Sharded],
        take: Take | None = None,
        model_config: ModelConfig | None,
        moe_config: MoEConfig | None,
        log: Say,
    ) -> LoadedState:
        """Fills `params` in place, cast to their dtypes. All ranks call it; `log` is called on the first one."""


class OwnSteps:
    """Source that reads only native steps."""

    def open_step(self, directory: Path, say: Say, *, check_hashes: bool = True) -> ForeignStep | None:
        return None

    def open_model(self, folder: Path) -> ForeignModel:
        raise _not_read(folder)

    def origin(self, folder: Path) -> Mapping[str, Any]:
        raise _not_read(folder)

    def load_model(self, folder: Path, **_: Any) -> LoadedState:
        raise _not_read(folder)


def _not_read(folder: Path) -> ConfigError:
    return ConfigError(
        f"--load {folder}: holds another program's model, which only megatron.pretrain reads; start with "
        "pretrain_gpt.py"
    )


OWN_STEPS = OwnSteps()
