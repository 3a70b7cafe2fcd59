"""Generates the pages about flags from the declarations: `python -m megatron.config.docs > docs/flags.md`.

`PAGES` lists the arguments that select the other pages.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from megatron.config.flag import Setting, Status
from megatron.config.megatron_lm_flag_table import FAMILIES
from megatron.config.megatron_lm_flags import CompatFlag, compat_flags, retired_flags
from megatron.config.other_programs import answers
from megatron.config.presets import PRESETS, Values
from megatron.config.run import SECTIONS, all_settings
from megatron.config.values import show

_FLAGS = (
    "`python -m megatron.config.docs > docs/flags.md` generates this page.",
    "`python pretrain_gpt.py --help WORD` searches the same list.",
)
_RULES = (
    "Flags are spelled as in Megatron-LM. Dashes and underscores are equivalent.",
    "The command line takes precedence over the `--config` file, then a `--model` preset, then the default.",
    "Keys of the YAML file are the names below, flat or grouped by section.",
    "A switch that a preset or a file turned on is turned off with `--switch=false`.",
    "If a flag is given twice, the last value counts, and a notice is printed.",
    "Two spellings of one setting with different values are rejected. So is a key that is set twice in a file.",
    "`--print-config` prints every value with its origin.",
)
_MEANINGS: Mapping[Status, str] = {
    "works": "supported",
    "no-op": "accepted without effect; a notice prints what happens instead",
    "later": "rejected, because it is not supported yet; a value that turns the feature off is accepted",
    "never": "rejected, with the fix",
}
_OTHERS = (
    "`python -m megatron.config.docs --others > docs/flags_of_others.md` generates this page.",
    "[Flags](flags.md) lists the settings.",
    "[From Megatron-LM](from_megatron_lm.md) and [From DeepSpeed](from_deepspeed.md) describe the differences.",
)
_PRESETS = (
    "A preset sets only settings of the model. Any flag overrides a setting of the preset.",
    "You must still give the batch size, the sequence length, the learning rate, the number of steps and the data.",
    "",
    "- The size of the vocabulary comes from the tokenizer.",
    "- `gpt2-tiny`, `llama-tiny` and `moe-tiny` are small models for trials on a CPU.",
    "- `tests/unit/config/test_presets.py` compares the number of parameters of most presets with the published one.",
    "- The next table has the flag of each column. An empty cell means the flag's [default](flags.md#model).",
    '- The lists and the column "also" have keys of a `--config` file. `add_bias_linear` false is '
    "`--disable-bias-linear`. `window_size` 4095 0 means 4095 tokens before the query's own and none after it.",
    "",
)
_SHAPE = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "ffn_hidden_size": "ffn",
    "num_attention_heads": "heads",
    "num_query_groups": "groups",
    "max_position_embeddings": "positions",
    "untie_embeddings_and_output_weights": "untied output layer",
    "rotary_base": "rotary base",
}
"""Setting of a preset -> the title of its own column in the tables of presets."""

_STATUSES: Mapping[str, tuple[Status, str]] = {
    "Not supported yet": (
        "later",
        "These flags are rejected until the feature is built. The neutral value turns the feature off and is accepted.",
    ),
    "Not supported": ("never", "These flags are rejected. The neutral value turns the feature off and is accepted."),
    "Without effect": ("no-op", "Each of these flags is accepted and prints a notice with the reason."),
}


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _status(setting: Setting) -> str:
    flag = setting.flag
    return flag.status if not flag.note else f"{flag.status}: {flag.note}"


def _values(setting: Setting) -> str:
    if setting.flag.required:
        return "required"
    if setting.is_switch:
        return "off" if not setting.flag.off else "off (feature on)"
    return f"`{show(setting.default)}`" if setting.has_default else ""


def _meaning(setting: Setting) -> str:
    flag = setting.flag
    text = flag.help
    if flag.choices:
        text += " One of: " + ", ".join(f"`{show(choice)}`" for choice in flag.choices) + "."
    if flag.refused:
        text += " Rejected: " + ", ".join(f"`{value}`" for value in flag.refused) + "."
    return text


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield "| " + " | ".join(_cell(cell) for cell in row) + " |"


def _anchor(title: str) -> str:
    return title.lower().replace(",", "").replace(" ", "-")


def _page(title: str, subject: str, notes: Sequence[str], sections: Mapping[str, Iterable[str]]) -> str:
    lines = [f"# {title}", "", subject, "", *(f"- [{one}](#{_anchor(one)})" for one in sections), "", *notes]
    for one, text in sections.items():
        lines += ["", f"## {one}", "", *text]
    return "\n".join(lines) + "\n"


def _items(texts: Iterable[str]) -> Iterator[str]:
    return (f"- {text}" for text in texts)


def _section(section: str) -> Iterator[str]:
    rows = [
        (
            f"`{setting.spelling}`",
            ", ".join(f"`{alias}`" for alias in setting.flag.aliases),
            _values(setting),
            _meaning(setting),
            _status(setting),
        )
        for setting in all_settings()
        if setting.section == section
    ]
    yield from _table(("flag", "also", "default", "meaning", "status"), rows)


def flags_page() -> str:
    """Returns docs/flags.md: the settings by section, and links to the other two generated pages."""
    others = {
        "Retired spellings": ["[Flags of other programs](flags_of_others.md#retired-spellings) lists old spellings."],
        "Known by name": [
            "[Flags of other programs](flags_of_others.md) lists other programs' flags that are missing here."
        ],
        "Presets": ["[Presets](presets.md) lists the models that `--model` selects."],
    }
    meanings = _table(("status", "meaning"), _MEANINGS.items())
    subject = "This page lists the flags of `pretrain_gpt.py`: name, other spellings, default, meaning and status."
    sections = {section: _section(section) for section in SECTIONS}
    return _page("Flags", subject, _FLAGS, {"Rules": [*_items(_RULES), "", *meanings], **sections, **others})


# ---------------------------------------------------------------- flags of other programs


def _known(flag: CompatFlag) -> tuple[str, str, str]:
    accepted = " or ".join(flag.accepts) if flag.status == "no-op" else flag.neutral or ""
    return f"`{flag.spelling}`", f"`{accepted}`" if accepted else "", flag.note


def _with_status(status: Status, text: str) -> Iterator[str]:
    own = [
        (f"`{setting.spelling}`", "", setting.flag.note) for setting in all_settings() if setting.flag.status == status
    ]
    known = [_known(flag) for flag in compat_flags().values() if flag.status == status]
    column = "accepted value" if status == "no-op" else "neutral value"
    yield from (text, "")
    yield from _table(("flag", column, "meaning here" if status == "no-op" else "fix"), sorted([*own, *known]))


def _names_elsewhere() -> Iterator[str]:
    grouped: dict[str, list[str]] = {}
    for name, answer in answers().items():
        grouped.setdefault(answer, []).append(name)
    yield (
        "The first column has names of settings in other trainers, without leading dashes: `transformers`, accelerate, "
        "torchtitan, nanotron, GPT-NeoX, axolotl and LitGPT. The error for such a name gives the flag to use here."
    )
    yield ""
    rows = [(", ".join(names), f"`{answer}`" if answer[:2] == "--" else answer) for answer, names in grouped.items()]
    yield from _table(("names elsewhere", "here"), rows)


def others_page() -> str:
    """Returns the page of flags that are not settings (retired, rejected or without effect) and of other trainers'
    names."""
    retired = [(f"`{row.spelling}`", row.note) for row in retired_flags().values()]
    families = [(f"`{prefix}*`", note) for prefix, note in FAMILIES.items()]
    sections: dict[str, Iterable[str]] = {
        "Retired spellings": [
            "Each of these flags sets the settings that replaced it, and prints a notice.",
            "",
            *_table(("flag", "meaning here"), retired),
        ],
        **{title: _with_status(status, text) for title, (status, text) in _STATUSES.items()},
        "Families": ["Other flags with these prefixes are rejected.", "", *_table(("prefix", "answer"), families)],
        "Names elsewhere": _names_elsewhere(),
    }
    subject = (
        "This page lists flags of Megatron-LM and Megatron-DeepSpeed that are missing here, and other trainers' names."
    )
    return _page("Flags of other programs", subject, _OTHERS, sections)


# ---------------------------------------------------------------- presets


def _shared(presets: Mapping[str, Values]) -> dict[str, Any]:
    """Returns the settings, except the shape, that have the same value in all of these presets."""
    first, *rest = presets.values()
    return {
        name: value
        for name, value in first.items()
        if name not in _SHAPE and all(name in other and other[name] == value for other in rest)
    }


def _given(values: Mapping[str, Any]) -> list[str]:
    return [f"`{name}` {show(value)}" for name, value in values.items()]


def _shown(value: Any) -> str:
    """Text of a preset's value; empty if the preset does not set it."""
    return "" if value is None else f"{value:.0f}" if isinstance(value, float) else show(value)


def _presets(belongs: Callable[[Values], bool]) -> Iterator[str]:
    presets = {name: values for name, values in PRESETS.items() if belongs(values)}
    shared = _shared(presets)
    if shared:
        yield from ("All of these have:", "", *_items(_given(shared)), "")
    columns = [name for name in _SHAPE if any(name in values for values in presets.values())]
    others = {
        name: {key: value for key, value in values.items() if key not in _SHAPE and key not in shared}
        for name, values in presets.items()
    }
    rows = [
        (f"`{name}`", *(_shown(values.get(column)) for column in columns), ", ".join(_given(others[name])))
        for name, values in presets.items()
    ]
    yield from _table(("preset", *(_SHAPE[column] for column in columns), "also"), rows)


def presets_page() -> str:
    sections = {
        "GPT": _presets(lambda values: "normalization" not in values),
        "Llama, Qwen and Mistral": _presets(lambda values: "normalization" in values and "num_experts" not in values),
        "Mixtures of experts": _presets(lambda values: "num_experts" in values),
    }
    flags = {setting.name: setting.spelling for setting in all_settings()}
    columns = _table(("column", "flag"), ((title, f"`{flags[name]}`") for name, title in _SHAPE.items()))
    generator = "`python -m megatron.config.docs --presets > docs/presets.md` generates this page."
    notes = (*_PRESETS, *columns, "", generator)
    return _page("Presets", "This page lists the models that `--model NAME` selects.", notes, sections)


def names_with_status() -> str:
    """Returns every known spelling with its status, for tests/golden/flags.txt."""
    rows: list[tuple[str, str]] = [(spelling, s.flag.status) for s in all_settings() for spelling in s.spellings]
    rows += [(spelling, "retired") for spelling in retired_flags()]
    rows += [(flag.spelling, flag.status) for flag in compat_flags().values()]
    return "".join(f"{spelling} {status}\n" for spelling, status in sorted(rows))


PAGES: Mapping[str, tuple[str, Callable[[], str]]] = {
    "": ("docs/flags.md", flags_page),
    "--others": ("docs/flags_of_others.md", others_page),
    "--presets": ("docs/presets.md", presets_page),
    "--names": ("tests/golden/flags.txt", names_with_status),
}
"""Command-line argument -> the file to generate, and the function that returns its content."""


if __name__ == "__main__":
    print(PAGES["".join(sys.argv[1:])][1](), end="")
