"""The first screen of a command and its searchable help: --help, --help WORD, --help SECTION, --help-all."""

import difflib
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.errors import ConfigError

WIDTH = 80
_INDENT = " " * 24


@dataclass(frozen=True)
class HelpEntry:
    """One flag as help prints it."""

    section: str
    spellings: tuple[str, ...]
    value: str
    """Placeholder for the value, such as "N" or "{a,b}"; empty for a switch."""
    text: str


@dataclass(frozen=True)
class Help:
    first_screen: str
    entries: tuple[HelpEntry, ...]
    last_line: str = ""
    """Line that is printed after a list of flags."""

    def answer(self, argv: Sequence[str]) -> str | None:
        """Returns the text that `argv` asks for; None if `argv` has no help flag."""
        for place, word in enumerate(argv):
            name, _, topic = word.partition("=")
            if name == "--help-all":
                return self._sections(self.entries)
            if name in ("-h", "--help"):
                after = argv[place + 1] if place + 1 < len(argv) else "-"
                topic = topic or ("" if after.startswith("-") else after)  # another flag of the command is no topic
                return self._about(topic.lstrip("-")) if topic else self.first_screen
        return None

    def _about(self, topic: str) -> str:
        """Returns the help of a section, or of the flags whose name or text contains `topic`."""
        word = topic.lower().replace("_", "-")
        found = [entry for entry in self.entries if entry.section.lower() == word]
        found = found or [entry for entry in self.entries if any(word in name for name in entry.spellings)]
        named = {entry.spellings for entry in found}
        if not any(entry.section.lower() == word for entry in found):
            found += [e for e in self.entries if e.spellings not in named and topic.lower() in e.text.lower()]
        if not found:
            near = difflib.get_close_matches(word, self._words(), n=1, cutoff=0.6)
            hint = f"; did you mean --help {near[0]}?" if near else "; --help-all prints every flag"
            raise ConfigError(f"--help {topic}: no flag and no section has this word{hint}")
        return self._sections(found)

    def _words(self) -> list[str]:
        names = [part for entry in self.entries for name in entry.spellings for part in name.strip("-").split("-")]
        return list(dict.fromkeys([*(entry.section for entry in self.entries), *filter(str.isalpha, names)]))

    def _sections(self, entries: Iterable[HelpEntry]) -> str:
        by_section: dict[str, list[str]] = {}
        for entry in entries:
            by_section.setdefault(entry.section, []).extend(_lines(entry))
        parts = ["\n".join([f"{section}:", *lines]) for section, lines in by_section.items()]
        return "\n\n".join([*parts, *([self.last_line] if self.last_line else [])])


def _lines(entry: HelpEntry) -> list[str]:
    head = ", ".join(entry.spellings) + (f" {entry.value}" if entry.value else "")
    heads = textwrap.wrap(head, WIDTH, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
    text = textwrap.wrap(entry.text, WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False)
    if text and len(heads) == 1 and len(heads[0]) < len(_INDENT) - 1:
        return [heads[0] + text[0][len(heads[0]) :], *text[1:]]
    return [*heads, *text]


def more(command: str, sections: Iterable[str]) -> str:
    """The end of a first screen: how to see the other flags."""
    listed = textwrap.wrap(", ".join(sections), WIDTH - 4, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(
        [
            "More:",
            f"  {command} --help WORD      flags whose name or text has WORD",
            f"  {command} --help SECTION   the flags of one section:",
            *listed,
            f"  {command} --help-all       every flag",
        ]
    )
