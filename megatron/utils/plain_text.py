"""Recognises plain text where JSON lines are expected, and gives the command that converts it."""

import shlex
from pathlib import Path

_PEEK = 65536
_CODE = (
    'import itertools, json, sys; [print(json.dumps({"text": "".join(lines)})) for blank, lines in '
    "itertools.groupby(sys.stdin, str.isspace) if not blank]"
)


def is_plain_text(path: Path) -> bool:
    """True if a file begins with UTF-8 text that is not JSON."""
    try:
        with path.open("rb") as file:
            beginning = file.read(_PEEK)
        text = beginning.decode("utf-8", errors="strict" if len(beginning) < _PEEK else "ignore").lstrip()
    except (OSError, UnicodeDecodeError):
        return False
    return bool(text) and "\0" not in text and text[0] not in '{["'


def json_lines_command(path: str) -> tuple[str, str]:
    """Returns the command that converts plain text to JSON lines, and the file that it writes. Blank lines separate
    documents."""
    output = f"{path}.jsonl"
    return f"python -X utf8 -c {shlex.quote(_CODE)} < {shlex.quote(path)} > {shlex.quote(output)}", output


def conversion(path: str) -> str | None:
    """Returns the fix for an --input of plain text; None for other files, pipes and URLs."""
    if not Path(path).is_file() or not is_plain_text(Path(path)):
        return None
    command, output = json_lines_command(path)
    return f"convert the file: {command} ; then give --input {shlex.quote(output)}"
