"""Writes the tables of docs/from_deepspeed.md from the keys: `python -m megatron.compat.deepspeed_file.docs`."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from megatron.compat.deepspeed_file.keys import Key
from megatron.compat.deepspeed_file.table import GROUPS
from megatron.config.run import settings_by_name
from megatron.config.values import show

BEGIN, END = "<!-- begin of the generated tables -->", "<!-- end of the generated tables -->"


def here(key: Key) -> str:
    """Describes what a key does here."""
    if key.line:
        return f"no effect: {key.line}"
    if key.way_out:
        neutral = " or ".join(f"`{show(value)}`" for value in key.neutral)
        asked = (
            "unless its `enabled` is `false`" if key.kind == "block" else f"unless {neutral}" if neutral else "always"
        )
        return f"rejected {asked}: {key.way_out}"
    if not key.field:
        return key.meaning
    setting = settings_by_name()[key.field]
    same = setting.spelling.lstrip("-").replace("-", "_") == key.path.rpartition(".")[2] and not key.meaning
    flag = "the flag of the same name" if same else f"`{setting.spelling}`"
    built = "" if setting.flag.status == "works" else ", not supported yet"
    return f"{flag}{built}{f'; {key.meaning}' if key.meaning else ''}"


def _rows(keys: Iterable[Key]) -> Iterator[str]:
    """Yields one row per outcome. Neighbouring keys of a block with the same outcome share a row."""
    for (block, outcome), same in groupby(
        (key for key in keys if not key.has_rows), lambda key: (key.path.rpartition(".")[0], here(key))
    ):
        names = ", ".join(f"`{key.path.rpartition('.')[2]}`" for key in same)
        yield f"| {f'`{block}`: ' if block else ''}{names} | {outcome} |".replace("||", "\\|")


def key_tables() -> str:
    lines = [BEGIN, ""]
    for title, keys in GROUPS.items():
        lines += [f"### {title}", "", "| key | here |", "|---|---|", *_rows(keys), ""]
    return "\n".join([*lines, END])


def with_new_tables(page: str) -> str:
    """Returns the page with its tables generated anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + key_tables() + after


if __name__ == "__main__":
    path = Path(__file__).parents[3] / "docs" / "from_deepspeed.md"
    path.write_text(with_new_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
