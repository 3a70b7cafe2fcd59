"""Import from and export to `transformers`: the families of `families/`."""

from megatron.interop.hf.check import check_export
from megatron.interop.hf.direct import load_hugging_face
from megatron.interop.hf.export import Export, plan_export, write_export
from megatron.interop.hf.importer import HuggingFaceFolder, open_folder, read_tensors
from megatron.interop.hf.tokenizer_check import check_folder

__all__ = [
    "Export",
    "HuggingFaceFolder",
    "check_export",
    "check_folder",
    "load_hugging_face",
    "open_folder",
    "plan_export",
    "read_tensors",
    "write_export",
]
