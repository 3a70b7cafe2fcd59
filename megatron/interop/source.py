"""Source of steps and models for a run that may start from another program's files."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.step_source import ForeignModel, ForeignStep, Say, StepSource

if TYPE_CHECKING:
    from megatron.checkpoint.run_state import LoadedState


class OtherPrograms:
    """Reads Hugging Face's folders and Megatron-LM's steps; their modules are imported on first use."""

    def open_step(self, directory: Path, say: Say, *, check_hashes: bool = True) -> ForeignStep | None:
        from megatron.interop.megatron_lm import open_foreign

        return open_foreign(directory, say, check_hashes=check_hashes)

    def open_model(self, folder: Path) -> ForeignModel:
        from megatron.interop.hf.importer import open_folder

        return open_folder(folder)

    def origin(self, folder: Path) -> Mapping[str, Any]:
        from megatron.interop.hf.origin import read_origin

        return read_origin(folder).plain()

    def load_model(self, folder: Path, **how: Any) -> "LoadedState":
        from megatron.interop.hf.direct import load_hugging_face

        return load_hugging_face(folder, **how)


OTHER_PROGRAMS: StepSource = OtherPrograms()
