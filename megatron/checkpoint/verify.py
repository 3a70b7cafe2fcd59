"""Verifies that a step on disk is what was saved, for the loader and for tools/verify_checkpoint.py."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from megatron.checkpoint import classic, manifest, paths, slices, storage
from megatron.checkpoint.architecture import model_config, moe_config
from megatron.checkpoint.besides_tensors import encode_values, values_file, values_of_file
from megatron.checkpoint.manifest import Manifest, Slice, TensorRecord
from megatron.checkpoint.positions import Positions, Stretch
from megatron.checkpoint.storage import FileRecord, Places
from megatron.errors import CheckpointError, MegatronError
from megatron.model.parameters import VOCABULARY_TABLES, WORD_TABLE, parameters
from megatron.state.division import Range
from megatron.torch_files import safe_load
from megatron.torch_files.torch_file import TorchFile
from megatron.utils.dtype import is_finite

Kind = Literal["corrupt", "unsafe", "incomplete", "extra"]
"""Kinds of problems. `extra` is a file that the manifest does not list; the step loads, with a warning."""

_NAMED = 8  # number of unlisted files in a message
_IN_SHAPE = ("exp_avg", "exp_avg_sq", "master")  # kinds that have their parameter's shape if in full precision
_MOST_LAYERS = 100_000
_SHOWN = 4


class DamagedCheckpointError(CheckpointError):
    """The step differs from what was saved. The loader may fall back to another one."""


@dataclass(frozen=True)
class Problem:
    kind: Kind
    text: str
    file: str | None = None
    """File that is known to be damaged without reading its bytes."""


def inspect_step(directory: Path, *, deep: bool = False) -> tuple[Manifest | None, list[Problem]]:
    """Returns the manifest and all problems of a step directory. Sizes and hashes are always compared; `deep` also
    opens every tensor."""
    record, problems = _structure(directory)
    if record is not None and not problems:
        problems += [Problem("corrupt", f"{directory}: {text}") for text in model_problems(record)]
    if record is not None:
        problems += _damage(directory, record, record.blocks_of(0, 1), passed_over={p.file for p in problems})
    extra = None if record is None else unlisted(directory, record)
    if record is not None and deep and not problems:
        problems += _contents(directory, record)
    return record, problems + ([Problem("extra", extra)] if extra else [])


def verified_manifest(directory: Path) -> Manifest:
    """Returns the manifest if all of its files exist with their sizes. Raises an error that names the first problem."""
    record, problems = _structure(directory)
    _refuse(problems)
    assert record is not None
    return record


def verify_share(
    directory: Path, record: Manifest, part: int, parts: int, into: Mapping[str, Places] = MappingProxyType({})
) -> None:
    """Hashes one of `parts` equal parts of the step's bytes, and raises an error that names the first damaged file.
    Also fills the memory in `into`, by file, with its bytes, even if they are outside of this part."""
    share: dict[str, Sequence[int]] = dict(record.blocks_of(part, parts))
    for name, places in into.items():
        share[name] = sorted(storage.blocks_for(places).union(share.get(name, ())))
    _refuse(_damage(directory, record, share, into=into))


def identity(directory: Path, record: Manifest) -> str:
    """Returns an id of the files. It is equal on machines that see the same files, as on a shared file system. A copy
    has another id."""
    return identity_of([paths.member(directory, name) for name in sorted(record.files)], record.run_id)


def identity_of(files: Iterable[Path], name: str) -> str:
    found = [path.stat() for path in files]
    seen = [(each.st_ino, each.st_size, each.st_mtime_ns) for each in found]
    return hashlib.sha256(repr((name, seen)).encode()).hexdigest()


def _refuse(problems: list[Problem]) -> None:
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise DamagedCheckpointError(problems[0].text + more)


def _structure(directory: Path) -> tuple[Manifest | None, list[Problem]]:
    """Reads the manifest, and finds problems without reading the files that it lists."""
    try:
        record = manifest.read(directory)
    except manifest.MissingManifestError as error:
        return None, [Problem("incomplete", str(error))]
    except paths.UnsafePathError as error:
        return None, [Problem("unsafe", str(error))]
    except CheckpointError as error:
        return None, [Problem("corrupt", str(error))]
    problems = _step_number(directory, record) + _coverage(directory, record) + _extra_files(directory, record)
    for name, expected in record.files.items():
        problems += _file(directory, name, expected)
    return record, problems or _positions(directory, record)


def _step_number(directory: Path, record: Manifest) -> list[Problem]:
    named = paths.step_of(directory.name)
    if named is None or named == record.step:
        return []
    return [
        Problem("corrupt", f"{directory} holds step {record.step}, but its name says step {named}; restore the name")
    ]


def _coverage(directory: Path, record: Manifest) -> list[Problem]:
    problems = []
    files, divisions = record.bytes_listed()
    for name, tensor in manifest.all_tensors(record):
        unknown = [piece.file for piece in tensor.slices if piece.file not in (divisions if piece.share else files)]
        if unknown:
            problems.append(
                Problem("incomplete", f"{directory}: {name} lies in {unknown[0]}, which the manifest does not list")
            )
        elif not slices.covers_exactly(tensor):
            problems.append(Problem("incomplete", f"{directory}: the slices of {name} do not cover it exactly once"))
    return problems


def _positions(directory: Path, record: Manifest) -> list[Problem]:
    try:
        Positions(record).check()
    except ValueError as error:
        return [Problem("corrupt", f"{directory / paths.MANIFEST}: {error}")]
    return []


def _extra_files(directory: Path, record: Manifest) -> list[Problem]:
    """Finds links, and weight files that the manifest does not list: a sign that two checkpoints were mixed."""
    problems = []
    for folder, subfolders, files in os.walk(directory):
        for name in [*subfolders, *files]:
            path = Path(folder) / name
            relative = path.relative_to(directory).as_posix()
            if path.is_symlink():
                problems.append(Problem("unsafe", f"{path} is a symbolic link; a checkpoint holds plain files only"))
            elif name in files and path.suffix == ".pt" and relative not in record.files:
                problems.append(Problem("corrupt", f"{path} is not in the manifest"))
    return problems


def unlisted(directory: Path, record: Manifest) -> str | None:
    """Names the files that the manifest does not list, in one line. Leaves out `.pt` files, which `_extra_files`
    reports."""
    known = {*record.files, paths.MANIFEST}
    found = [
        name
        for folder, _, files in os.walk(directory)
        for path in (Path(folder) / file for file in files)
        if (name := path.relative_to(directory).as_posix()) not in known and path.suffix != ".pt"
    ]
    if not found:
        return None
    some = ", ".join(f"{name!r:.80}" for name in sorted(found)[:_NAMED]) + ", ..." * (len(found) > _NAMED)
    return (
        f"{directory} has {len(found)} file(s) that its manifest does not list ({some}): they are not "
        "verified, and exports do not copy them; remove them"
    )


def _file(directory: Path, name: str, expected: FileRecord) -> list[Problem]:
    try:
        path = paths.member(directory, name)
    except paths.UnsafePathError as error:
        return [Problem("unsafe", str(error), name)]
    if not paths.is_plain_file(path):
        return [Problem("incomplete", f"{path} is missing", name)]
    try:
        size = path.stat().st_size
    except OSError as error:
        return [_unreadable(path, name, error)]
    if size != expected.size:
        return [Problem("corrupt", f"{path} has {size} bytes, but {expected.size} were written", name)]
    if len(expected.blocks) != storage.blocks_in(size):
        return [
            Problem(
                "corrupt", f"{path} has {storage.blocks_in(size)} blocks, but {len(expected.blocks)} checksums", name
            )
        ]
    return []


def _damage(
    directory: Path,
    record: Manifest,
    share: Mapping[str, Sequence[int]],
    passed_over: Set[str | None] = frozenset(),
    into: Mapping[str, Places] = MappingProxyType({}),
) -> list[Problem]:
    """Finds files whose bytes in these blocks differ from what was written."""
    problems = []
    for name, blocks in share.items():
        if name in passed_over:
            continue
        path, expected = paths.member(directory, name), record.files[name].blocks
        try:
            found = storage.hash_blocks(path, blocks, record.hash, torch.get_num_threads(), into.get(name, ()))
        except OSError as error:
            problems.append(_unreadable(path, name, error))
            continue
        differing = [block for block, hashed in zip(blocks, found) if hashed != expected[block]]
        if differing or len(found) != len(blocks):
            problems.append(Problem("corrupt", f"{path} differs from what was written, {_where(differing, expected)}"))
    return problems


def _unreadable(path: Path, name: str, error: OSError) -> Problem:
    return Problem("corrupt", f"{path} cannot be read ({error.strerror})", name)


def _where(differing: list[int], blocks: Sequence[str]) -> str:
    if not differing:
        return "in length"
    size = storage.BLOCK_BYTES
    first = differing[0] * size
    return f"first between bytes {first} and {first + size} ({len(differing)} of {len(blocks)} blocks)"


def _contents(directory: Path, record: Manifest) -> list[Problem]:
    """Opens every tensor and checks its shape, its dtype and that it is finite."""
    problems: list[Problem] = []
    stored: dict[str, list[tuple[str, TensorRecord, Slice, Stretch]]] = {}
    positions = Positions(record)
    for name, tensor in manifest.all_tensors(record):
        for piece in tensor.slices:
            for stretch in positions.stretches(tensor, piece):
                stored.setdefault(stretch.file, []).append((name, tensor, piece, stretch))
    for file in sorted(name for name in record.files if name.endswith(".pt")):
        path = paths.member(directory, file)
        try:
            content, described = safe_load.load_file(path), TorchFile.open(path, None)
        except (safe_load.UnsafeFileError, paths.UnsafePathError) as error:
            problems.append(Problem("unsafe", str(error)))
            continue
        except CheckpointError as error:
            problems.append(Problem("corrupt", str(error)))
            continue
        texts = [*_plain_values(record, file, content), *_beside(directory, record, file, content)]
        for name, tensor, piece, stretch in stored.get(file, []):
            found = classic.lookup(content, piece.key)
            texts += [f"{name} {text}" for text in _stored(tensor, piece, stretch, found, described)]
        problems += [Problem("corrupt", f"{path}: {text}") for text in texts]
    return problems


def _beside(directory: Path, record: Manifest, file: str, content: Any) -> Iterator[str]:
    values = values_file(file)
    if values in record.files:
        try:
            same = encode_values(values_of_file(content))
        except (AttributeError, KeyError, TypeError, ValueError):  # not written by a run
            same = None
        if paths.member(directory, values).read_bytes() != same:
            yield f"its plain values differ from those in {values}"


_PARTS = {"optimizer": ("optimizer", "extra"), "scheduler": ("opt_param_scheduler",), "rng": ("rng_state",)}
"""Keys that lead to each part of `Manifest.holds` in a file."""


def _plain_values(record: Manifest, file: str, content: Any) -> Iterator[str]:
    """Finds plain values that a load needs but a file lacks, and an iteration that differs from the manifest's."""
    step = classic.lookup(content, ("iteration",))
    if step != record.step:
        yield f"has iteration {step!r:.40}, but the manifest has {record.step}"
    for part in record.holds if file.endswith(paths.MODEL_FILE) else ():
        found = classic.lookup(content, _PARTS.get(part, (part,)))
        if part == "rng":  # one for each replica that has no file of its own
            found = found[0] if isinstance(found, list) and found else None
        if not isinstance(found, Mapping):
            yield f"has no {part} state, although the manifest lists it"


def _stored(record: TensorRecord, piece: Slice, stretch: Stretch, found: Any, described: TorchFile) -> Iterator[str]:
    problem = stored_problem(record, piece, found, stretch.elements)
    if problem is not None:
        yield problem
        return
    if not is_finite(found):
        yield "holds NaN or infinite values"
    if stretch.start is not None and found.numel():
        place = described.place(classic.lookup(described.content, piece.key))
        if place is None or place[0] != stretch.start:
            where = "is not stored in order" if place is None else f"begins at byte {place[0]}"
            yield f"{where}, but in the manifest it begins at byte {stretch.start}"


def stored_problem(record: TensorRecord, piece: Slice, found: Any, held: Range) -> str | None:
    """Describes how a stored tensor differs from its record. The file should have the elements `held` of the slice."""
    if not isinstance(found, Tensor):
        return "is missing"
    return description_problem(record, piece, found.dtype, tuple(found.shape), held)


def description_problem(
    record: TensorRecord, piece: Slice, dtype: torch.dtype, shape: tuple[int, ...], held: Range
) -> str | None:
    expected = (held[1] - held[0],) if piece.share else piece.shape
    if str(dtype) != record.dtype or shape != expected:
        return f"is {dtype} {shape}, but in the manifest {record.dtype} {expected}"
    return None


# ---------------------------------------------------------------- the tensors of the model that is described


def describes_gpt(record: Manifest) -> bool:
    """Returns True if the saved settings describe the model. They do not for a model of a user's script, or one saved
    by a version without experts."""
    told = {"model", "moe"} <= set(record.config) and "padded_vocab_size" in record.args
    return told and WORD_TABLE in record.model


def model_problems(record: Manifest) -> list[str]:
    """Lists contradictions within the manifest, by tensor."""
    found = [text for name, each in record.model.items() for text in _contradictions(name, each)]
    for name, kinds in record.optimizer.items():
        for kind, each in kinds.items():
            found += _contradictions(f"{name} ({kind})", each)
            whole = record.model.get(name)
            in_shape = kind in _IN_SHAPE and each.dtype == "torch.float32"
            if in_shape and whole is not None and each.logical_shape != whole.logical_shape:
                found.append(f"{name} ({kind}) has shape {each.logical_shape}, but its parameter {whole.logical_shape}")
    return found + (_against_settings(record) if describes_gpt(record) else [])


def _contradictions(name: str, record: TensorRecord) -> list[str]:
    """Reports a slice with more or fewer elements than its indices. A vocabulary may also have padding rows."""
    for piece in record.slices:
        spec = slices.source_spec(name, record, piece)
        held, claimed = prod(piece.shape), prod(spec.local_shape)
        padded = record.dim == 0 and piece.shape[1:] == spec.local_shape[1:] and piece.shape[:1] > spec.local_shape[:1]
        if held != claimed and not (padded and name.partition(" ")[0] in VOCABULARY_TABLES):
            return [f"{name} has a slice of shape {piece.shape}, but its indices give {spec.local_shape}"]
    return []


def _against_settings(record: Manifest) -> list[str]:
    try:
        config, moe = model_config(record.config["model"]), moe_config(record.config)
        if config.num_layers + len(moe.expert_layers(min(config.num_layers, _MOST_LAYERS))) > _MOST_LAYERS:
            return [f"its settings describe more than {_MOST_LAYERS} layers, those with experts counted twice"]
        wanted = parameters(config, record.model[WORD_TABLE].logical_shape[0], moe)
    except MegatronError as error:
        return [f"its settings do not describe a model: {error}"]
    missing = [name for name in wanted if name not in record.model]
    extra = [name for name in record.model if name not in wanted]
    other = [
        f"{name} has shape {record.model[name].logical_shape}, but its settings give {parameter.shape}"
        for name, parameter in wanted.items()
        if name in record.model and record.model[name].logical_shape != parameter.shape
    ]
    return [
        *other,
        *([f"its settings describe a model that also has {_some(missing)}"] if missing else []),
        *([f"its settings describe a model without {_some(extra)}"] if extra else []),
    ]


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
