"""Lines to documents: the fast parser changes nothing, and every bad line has its reason."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.preprocess.input.documents import TOO_LONG, BadLine, LineError, parse_line, parse_lines

KEYS = ["text", "meta.text"]


def by_hand(block: bytes, keys: list[str]) -> tuple[list[Any], int, list[BadLine]]:
    """The oracle: the standard library alone, line by line."""
    documents, blank, bad = [], 0, []
    lines = block.split(b"\n")
    for number, line in enumerate(lines if lines[-1] else lines[:-1]):
        try:
            texts = parse_line(line, keys)
        except LineError as error:
            bad.append(BadLine(number, error.kind, error.detail))
            continue
        if texts is None:
            blank += 1
        else:
            documents.append((number, texts))
    return documents, blank, bad


def compare(block: bytes, keys: list[str], loads: Callable[[bytes], Any] = orjson.loads) -> None:
    batch = parse_lines(block, keys, 0, loads)
    assert (batch.documents, batch.blank, batch.bad) == by_hand(block, keys)


# ---------------------------------------------------------------- what a line may be

TRICKY_LINES = [
    b'{"text": ' + b"1" * 10**5 + b"}",
    b'{"text": "a", "n": ' + b"1" * 10**5 + b"}",
    b'{"text": "a", "n": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
    *(b'{"text": "a", "n": ' + b"[" * n + b"]" * n + b"}" for n in (300, 399, 401, 900, 1000, 1020, 1023, 1024, 1030)),
    b'{"n": [' + b"{}," * 500 + b'{}], "text": "a"}',
    b'{"text": "a", "text": "b"}',
    b'{"text": "a", "te\\u0078t": "b"}',
    b'{"text": "\\ud83d\\ude00"}',
    b'{"text": "\\ud83d"}',
    b'{"text": "\\ude00\\ud83d"}',
    b'{"text": "a", "other": "\\ud800"}',
    b'{"text": ["ok", "\\udfff"]}',
    b'{"text": "\xed\xa0\x80"}',
    b'{"text": "\xff"}',
    b'\xef\xbb\xbf{"text": "a"}',
    b'{"text": NaN}',
    b'{"text": "a", "n": [NaN, Infinity, -Infinity, 1e999, -0, 1E5, 0.1]}',
    b'{"text": "a", "n": 01}',
    b'{"text": "a", "n": 1.}',
    b'{"text": "a", "n": +1}',
    b'{"text": "a\tb"}',
    b'{"text": "a\\u0000b\\/\\b\\f\x7f"}',
    b'{"text": "\\x41"}',
    b'{"text": "a"} \x00',
    b'\x00{"text": "a"}',
    '\u00a0{"text": "a"}\u2028'.encode(),
    b'\x0c{"text": "a"}\x1c',
    b'{"text": "a"}\r',
    b'{"text": "a",}',
    b"{'text': 'a'}",
    b'{"text": "a"}{"text": "b"}',
    b'{"text": "a"',
    b"{",
    b"[",
    b"",
    b" \t\r",
    "\u3000".encode(),
    b"null",
    b'"text"',
    b'["text"]',
    b"3",
    b"{}",
    b'{"text": null}',
    b'{"text": true}',
    b'{"text": 18446744073709551616}',
    b'{"text": {}}',
    b'{"text": []}',
    b'{"text": ["a", "b"]}',
    b'{"text": ["a", ["b"]]}',
    b'{"text": ["a", null]}',
    b'{"text": ""}',
    b'{"text": "a", "meta": {"text": "b"}}',
    b'{"text": "a", "meta": {"text": ["b", "c"]}}',
    b'{"text": "a", "meta.text": "flat", "meta": {"text": "nested"}}',
    b'{"text": "a", "meta.text": null, "meta": {"text": "nested"}}',
    b'{"text": "a", "meta": null}',
    b'{"text": "a", "meta": ["text"]}',
    b'{"text": "a", "meta": "text"}',
    b'{"text": "a", "meta": {"txt": "b"}}',
    TOO_LONG,
]


@pytest.mark.parametrize("keys", [["text"], ["meta.text"], KEYS], ids=str)
def test_the_fast_parser_is_never_noticed_on_tricky_lines(keys: list[str]) -> None:
    for line in TRICKY_LINES:
        compare(line + b"\n", keys)
    compare(b"\n".join(TRICKY_LINES), keys)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
records = st.fixed_dictionaries(
    {}, optional={"text": json_values | st.text(), "meta": json_values, "meta.text": json_values}
)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.tuples(records, st.booleans(), st.randoms(use_true_random=False)), max_size=4),
    st.sampled_from([b"\n", b"\r\n", b"\n\n", b" \n"]),
    st.sampled_from([["text"], ["meta.text"], KEYS]),
)
def test_the_fast_parser_is_never_noticed_on_broken_lines(
    drawn: list[tuple[dict[str, Any], bool, random.Random]], ending: bytes, keys: list[str]
) -> None:
    """Valid lines with a few bytes changed, inserted or removed: most are broken, some are not."""
    block = b""
    for record, ascii_only, chance in drawn:
        line = bytearray(json.dumps(record, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass"))
        for _ in range(chance.choice([0, 0, 1, 2])):
            place = chance.randrange(len(line) + 1)
            line[place : place + chance.randrange(2)] = chance.choice(
                [
                    b"\\",
                    b'"',
                    b"{",
                    b"}",
                    b"[",
                    b",",
                    b":",
                    b"\xc3",
                    b"\x00",
                    b"\\ud83d",
                    b"\\u",
                    b"1",
                    b"e",
                    b"-",
                    b".",
                ]
            )
        block += bytes(line) + ending
    compare(block, keys)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40), st.text(alphabet='{}[]",:\\u0dDeE+-.t1 \n', max_size=40))
@example(b"", '{"t":"\\ud0d0"}')
def test_the_fast_parser_is_never_noticed_on_garbage(noise: bytes, text: str) -> None:
    for block in (noise, text.encode(), b'{"t": "' + noise + b'"}', b'{"t": ' + text.encode() + b"}"):
        compare(block, ["t"])


def test_a_parser_that_differs_would_be_seen() -> None:
    with pytest.raises(AssertionError):  # the first of two equal keys instead of the last
        compare(b'{"text": "a", "text": "b"}', ["text"], lambda line: json.loads(line, object_pairs_hook=first_wins))
    with pytest.raises(AssertionError):  # accepts what is not JSON
        compare(b'{"text": "a",}', ["text"], lambda line: orjson.loads(line.replace(b",}", b"}")))
    with pytest.raises(AssertionError):  # another text
        compare(b'{"text": "a"}', ["text"], lambda line: orjson.loads(line.replace(b"a", b"A")))


def first_wins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return dict(reversed(pairs))


def test_texts_are_those_of_the_standard_library() -> None:
    """The oracle is json.loads, not the project's slow path."""
    random_texts = random.Random(5)
    texts = [
        "".join(chr(random_texts.choice([65, 233, 0x4E2D, 0x1F600, 10, 34, 92, 0])) for _ in range(50))
        for _ in range(99)
    ]
    lines = [json.dumps({"text": text, "n": [i]}, ensure_ascii=bool(i % 2)).encode() for i, text in enumerate(texts)]
    batch = parse_lines(b"\n".join(lines) + b"\n", ["text"], 10)
    assert batch.documents == [(10 + i, [[json.loads(line)["text"]]]) for i, line in enumerate(lines)]
    assert (batch.first_line, batch.lines, batch.size) == (10, 99, sum(map(len, lines)) + 99)


# ---------------------------------------------------------------- reasons

REASONS = [
    (b"{", "not JSON", "only {: not one object per line; convert the file with jq -c ."),
    (b'{"text": }', "not JSON", "Expecting value: line 1 column 10 (char 9)"),
    (b"[" * 10**5, "not JSON", "nested too deeply"),
    (b'"a"', "not a JSON object", "each line must be one object, with the text under a key"),
    (b'{"a": 1, "b": 2}', "key missing", "no 'text' among the keys: 'a', 'b'"),
    (b"{}", "key missing", "no 'text' among the keys: none"),
    (b'{"text": 3}', "not text", "'text' holds a number"),
    (b'{"text": null}', "not text", "'text' holds null"),
    (b'{"text": [[]]}', "not text", "'text' holds a list in a list"),
    (b'{"text": {}}', "not text", "'text' holds an object"),
    (b'{"text": false}', "not text", "'text' holds true or false"),
    (b'{"text": "ab\\ud800"}', "lone surrogate", "'text' holds U+D800 at character 2, half of a surrogate pair"),
    (b'{"text": "\xff"}', "not UTF-8", "byte 11 of the line: invalid start byte"),
    (TOO_LONG, "line too long", "more than 1 GiB; the file is damaged, or not JSON lines"),
]


@pytest.mark.parametrize("line, kind, detail", REASONS)
def test_a_bad_line_has_its_reason(line: bytes, kind: str, detail: str) -> None:
    assert parse_lines(line, ["text"]).bad == [BadLine(0, kind, detail)]


@pytest.mark.parametrize(
    "line, detail",
    [
        (b'{"a": {"c": 1}}', "no 'a.b' among the keys of 'a': 'c'"),
        (b'{"a": 3}', "no 'a.b': 'a' is not an object"),
        (b'{"b": 3}', "no 'a.b' among the keys: 'b'"),
    ],
)
def test_where_a_path_ends_is_said(line: bytes, detail: str) -> None:
    assert parse_lines(line, ["a.b"]).bad == [BadLine(0, "key missing", detail)]


def test_a_key_that_stands_there_wins_over_a_path() -> None:
    line = b'{"a.b": "flat", "a": {"b": "nested"}}'
    assert parse_lines(line, ["a.b"]).documents == [(0, [["flat"]])]
    assert parse_lines(b'{"a": {"b": ["x", "y"]}}', ["a.b"]).documents == [(0, [["x", "y"]])]
