"""Records what came with an imported model besides weights: class, special token ids, generation settings.

Every checkpoint of a continued run keeps them, and an export writes them back unchanged.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.errors import CheckpointError
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.huggingface import refuse_outside
from megatron.utils.foreign import read_finite_json

GENERATION = "generation_config.json"
_AGAIN = "download the model again"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Origin:
    model_type: str
    token_ids: Mapping[str, Any]
    """Ids as in config.json: an id, several, or null. Ids that are absent there are absent here."""
    generation: Mapping[str, Any] | None
    """Whole content of generation_config.json, if there is one."""

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def read_origin(folder: Path) -> Origin:
    values, generation = read_finite_json(folder / "config.json"), folder / GENERATION
    ids = {name: values[name] for name in _IDS if name in values}
    if generation.exists():
        refuse_outside(folder, generation)
    return _checked(
        Origin(str(values.get("model_type")), ids, read_finite_json(generation) if generation.exists() else None),
        str(folder / "config.json"),
    )


def origin_of(saved: Mapping[str, Any], where: Path) -> Origin | None:
    """Returns the origin that a checkpoint records; None for a model that was not imported."""
    if not saved:
        return None
    try:
        origin = Origin(saved["model_type"], saved["token_ids"], saved["generation"])
    except KeyError as error:
        raise CheckpointError(
            f"{where}: its manifest's origin has no {error.args[0]}; import the model again"
        ) from error
    return _checked(origin, str(where))


def _checked(origin: Origin, where: str) -> Origin:
    if not isinstance(origin.token_ids, Mapping) or not isinstance(origin.generation, Mapping | None):
        raise CheckpointError(
            f"{where}: the ids of special tokens or the generation settings are not a JSON object; {_AGAIN}"
        )
    for name, value in origin.token_ids.items():
        several = value if isinstance(value, list) else [value]
        if name not in _IDS or not all(one is None or (type(one) is int and one >= 0) for one in several):
            raise CheckpointError(f"{where}: {name} {value!r} is not the id of a token; {_AGAIN}")
    return origin


def own_token_ids(tokenizer: Tokenizer | None, roles: Mapping[str, str]) -> dict[str, int | None]:
    """Returns special token ids for a model that was not imported: those that its tokenizer names, else its
    end-of-document id."""
    end = None if tokenizer is None else tokenizer.eod_id
    named = {} if tokenizer is None else {role: tokenizer.token_id(token) for role, token in roles.items()}
    ids = {"bos_token_id": named.get("bos_token", end), "eos_token_id": end}
    return ids | ({"pad_token_id": named["pad_token"]} if "pad_token" in named else {})
