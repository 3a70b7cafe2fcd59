"""Prose that has to be read twice becomes rarer and never more frequent; each measure sees a planted case."""

import pytest

from tests.policy.prose import Text, accepted, all_texts, counts, faults, page_texts, python_texts


def test_no_measure_rises_and_what_fell_stays_accepted() -> None:
    texts = list(all_texts())
    assert {text.kind for text in texts} == {"docstring", "help", "message", "page", "cell"}
    found, limits = counts(texts), accepted()
    risen = {name for name in found if found[name] > limits.get(name, 0)}
    places = [f"{fault} {text}" for text in texts for fault in faults(text) if f"{fault} {text.kind}" in risen]
    assert not risen, "\n".join([f"more than accepted: {sorted(risen)}; all places:", *places])
    assert found == limits, "fewer places than accepted: keep it so with python -m tests.policy.prose --write"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("What the rank stores.", ["fragment"]),
        ("Offset of the first element.", []),
        ("In-place sum.", []),
        ("Returns the sum. The rank is told its share.", ["idiom"]),
        ("Returns the sum; there is no tokenizer.", []),
        ("Returns " + "a long tail of words " * 7 + "at last.", ["long"]),
        ("Returns `" + "code in backticks is left out as it stands " * 5 + "`.", []),
        ("Returns " + "one list. And " * 20 + "that is all.", []),
        ("Returns a sum.\n\n            " + "python tool.py --flag # whoever " * 9 + "\n", []),
    ],
)
def test_a_docstring_is_measured(text: str, expected: list[str]) -> None:
    (found,) = python_texts(f'def f():\n    """{text}"""\n', "megatron/x.py", messages=True)
    assert (found.kind, list(faults(found))) == ("docstring", expected)


def test_what_a_program_says_is_collected() -> None:
    source = '''
class Section:
    lr: float = flag(0.0, "How fast the model learns.")
    size = 1
    """How many there are."""

parser.add_argument("--x", help="If the run has it.")
raise ValueError(f"{name}: {count} ranks are " "of one mind" f" here {name}")
KEY = "a few words"
'''
    found = list(python_texts(source, "megatron/x.py", messages=True))
    assert [(text.kind, text.line) for text in found] == [("help", 3), ("docstring", 5), ("help", 7), ("message", 8)]
    assert found[3].text == "X: X ranks are of one mind here X"
    assert [list(faults(text)) for text in found[:3]] == [["fragment"]] * 3
    assert [text.kind for text in python_texts(source, "tests/x.py", messages=False)] == ["docstring"]


def test_a_page_gives_its_paragraphs_items_and_cells() -> None:
    page = "# Title\n\nA line\ngoes on.\n\n- an item\n  of two lines\n- another\n\n"
    page += "```bash\nls\n```\n| a | 3 |\n|---|---|\n"
    assert list(page_texts(page, "docs/x.md")) == [
        Text("docs/x.md", 3, "page", "A line goes on."),
        Text("docs/x.md", 6, "page", "an item of two lines"),
        Text("docs/x.md", 8, "page", "another"),
        Text("docs/x.md", 13, "cell", "a"),
    ]
