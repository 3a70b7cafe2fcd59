"""Sentence splitting against NLTK's own splitter, for kept newlines with Megatron-LM's pattern."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import nltk
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nltk.tokenize import punkt as nltk_punkt

from megatron.errors import ConfigError, DataError, StorageError
from megatron.preprocess.punkt import PunktParameters, SentenceSplitter
from megatron.preprocess.sentences import learn, prepare_splitter

ROOT = Path(__file__).resolve().parents[3]
WORDS = [
    *["Hello", "mr", "Mr", "dr", "the", "The", "x", "X", "J", "i", "3", "3.14", "1,000", "e.g", "U.S", "u.s", "foo-mr"],
    *[
        "Smith",
        "été",
        "École",
        "ß",
        "_",
        "क",
        "हि",
        "漢字",
        "½",
        "²",
        "e\u0301",
        "--",
        "...",
        "..",
        "-",
        "etc..",
        "a.b.c",
    ],
]
MARKS = [*".?!,;:\"')(]}”“»«’@*", "...", "--", "!!", "?!", " .", ". . .", ".)", '."']
SPACES = [" ", " ", " ", "  ", "\n", "\n\n", "\t", "\xa0", "\u3000", "\x0b", "\x1c", "\x85", "\u2028", "\r\n", ""]
TYPES = sorted({word.lower() for word in WORDS} | {"##number##"})
TEXTS = st.lists(st.sampled_from(WORDS + MARKS + SPACES) | st.text(max_size=3), max_size=30).map("".join)
ENGLISH = [
    "Mr. Smith met Dr. Brown in Washington. They talked for hours! Did they agree? Nobody knows.",
    "It was e.g. cold, i.e. below zero. The Dr. came late. He left at 5 p.m. sharp. Then it rained etc. and so on.",
    'He said: "Come here." She did not. (Nobody asked her.) And J. Bach wrote no. 5 in the U.S. of course.',
]


class MegatronVars(nltk_punkt.PunktLanguageVars):
    """Megatron-LM's one change: the match includes the word before the mark and the white space after it."""

    _period_context_fmt = r"\S*%(SentEndChars)s\s*(?=(?P<after_tok>%(NonWord)s|(?P<next_tok>\S+)))"


def oracle(parameters: PunktParameters, keep: bool) -> nltk_punkt.PunktSentenceTokenizer:
    theirs = nltk_punkt.PunktParameters()
    theirs.abbrev_types, theirs.collocations = set(parameters.abbreviations), set(parameters.collocations)
    theirs.sent_starters = set(parameters.sentence_starters)
    theirs.ortho_context.update(parameters.contexts)
    return nltk_punkt.PunktSentenceTokenizer(theirs, lang_vars=MegatronVars() if keep else None)


def some_parameters(seed: int) -> PunktParameters:
    rng = random.Random(seed)
    return PunktParameters(
        frozenset(rng.sample(TYPES, 6)),
        frozenset((rng.choice(TYPES), rng.choice(TYPES)) for _ in range(8)),
        frozenset(rng.sample(TYPES, 4)),
        {word: rng.randrange(0, 128, 2) for word in rng.sample(TYPES, 20)},
    )


def corpus(seed: int = 0, size: int = 60) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(ENGLISH + WORDS, k=rng.randint(1, 30))) + "." for _ in range(size)]


def lost(text: str, pieces: list[str]) -> bool:
    return "".join("".join(pieces).split()) != "".join(text.split())


# ---------------------------------------------------------------- splitting


@pytest.mark.parametrize("keep", [False, True])
@given(text=TEXTS, seed=st.integers(0, 5))
@settings(max_examples=400, deadline=None)
def test_cuts_where_nltk_cuts(keep: bool, text: str, seed: int) -> None:
    parameters = some_parameters(seed)
    pieces = SentenceSplitter(parameters, keep_newlines=keep).split(text)
    assert pieces == [piece for piece in oracle(parameters, keep).tokenize(text) if not piece.isspace()]
    assert not lost(text, pieces)
    assert all(piece.strip() for piece in pieces)


@pytest.mark.parametrize("keep", [False, True])
def test_learned_parameters_cut_like_nltk_trained_on_the_same(keep: bool) -> None:
    texts = corpus()
    trainer = nltk_punkt.PunktTrainer()
    trainer.train("\n\n".join(texts))
    theirs = trainer.get_params()
    parameters, characters = learn(iter(texts))
    assert characters == sum(map(len, texts))
    assert parameters.abbreviations == theirs.abbrev_types
    assert parameters.collocations == theirs.collocations and parameters.sentence_starters == theirs.sent_starters
    assert parameters.contexts == {word: bits for word, bits in theirs.ortho_context.items() if bits}
    splitter, tokenizer = SentenceSplitter(parameters, keep_newlines=keep), oracle(parameters, keep)
    for text in [*texts, *corpus(seed=1)]:
        assert splitter.split(text) == tokenizer.tokenize(text)


def test_learns_the_abbreviations_of_a_text() -> None:
    parameters, _ = learn(iter(ENGLISH * 30))
    assert {"mr", "dr", "e.g"} <= parameters.abbreviations
    splitter = SentenceSplitter(parameters, keep_newlines=False)
    assert splitter.split("I saw Mr. Miller today. He was well.") == ["I saw Mr. Miller today.", "He was well."]


def test_white_space_between_sentences() -> None:
    text = ' One two.\n\n\tThree "four."  Five!\r\nSix \n'
    empty = PunktParameters(frozenset(), frozenset(), frozenset(), {})
    assert SentenceSplitter(empty, keep_newlines=False).split(text) == [" One two.", 'Three "four."', "Five!", "Six"]
    kept = SentenceSplitter(empty, keep_newlines=True).split(text)
    assert kept == [" One two.\n\n\t", 'Three "four."', "Five!\r\n", "Six"]
    assert "".join(kept).replace('"', '"  ').replace('"  four', '"four') == text.rstrip()


@pytest.mark.parametrize("text", ["", " ", "\n\n", "\x1c", "\u3000 \xa0"])
@pytest.mark.parametrize("keep", [False, True])
def test_blank_text_has_no_sentence(text: str, keep: bool) -> None:
    assert SentenceSplitter(some_parameters(0), keep_newlines=keep).split(text) == []


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("unit", ["a", ".", "a.", "!", '"', ". ", "a b. ", ' ".', "\n", "a.\n", "-", ".)"])
def test_long_texts_take_linear_time(unit: str, keep: bool) -> None:
    """Quadratic time would take many minutes."""
    text = unit * (400_000 // len(unit))
    pieces = SentenceSplitter(some_parameters(0), keep_newlines=keep).split(text)
    assert not lost(text, pieces)


def test_the_property_catches_a_splitter_that_drops_a_sentence() -> None:
    text = "One two. Three four. Five six."
    pieces = SentenceSplitter(some_parameters(0), keep_newlines=False).split(text)
    assert len(pieces) == 3 and not lost(text, pieces)
    assert lost(text, pieces[:1] + pieces[2:]) and lost(text, [pieces[1], pieces[0], pieces[2]])


def test_remembering_is_bounded_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.preprocess.punkt._MOST_REMEMBERED", 5)
    parameters, _ = learn(iter(corpus()))
    splitter = SentenceSplitter(parameters, keep_newlines=False)
    for text in corpus(seed=2):
        assert splitter.split(text) == oracle(parameters, False).tokenize(text)
    assert len(splitter._decided) <= 5


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_other_processes_split_equally(method: str) -> None:
    splitter = SentenceSplitter(some_parameters(3), keep_newlines=True, fingerprint="f")
    texts = corpus(size=5)
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.map(splitter.split, texts) == [splitter.split(text) for text in texts]
    again = pickle.loads(pickle.dumps(splitter))
    assert again.split(texts[0]) == splitter.split(texts[0]) and again.fingerprint == "f"


# ---------------------------------------------------------------- parameters


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Restricts NLTK to one empty folder."""
    folder = tmp_path / "nltk_data"
    folder.mkdir()
    monkeypatch.setattr(nltk.data, "path", [str(folder)])
    return folder


def trained(folder: Path, language: str = "english") -> Path:
    data = folder / "tokenizers" / "punkt_tab" / language
    data.mkdir(parents=True)
    (data / "abbrev_types.txt").write_text("zz\nmr\n")
    (data / "sent_starters.txt").write_text("the\n")
    (data / "collocations.tab").write_text("##number##\tmay\n")
    (data / "ortho_context.tab").write_text("the\t46\nsmith\t4\n")
    return data


def unasked() -> Iterator[str]:
    raise AssertionError("the input was read")
    yield ""


def prepare(
    path: Path,
    language: str = "english",
    sample: Callable[[], Iterator[str]] = lambda: iter(corpus()),
    said: list[str] | None = None,
    keep: bool = False,
) -> SentenceSplitter:
    say = (said if said is not None else []).append
    return prepare_splitter(language=language, keep_newlines=keep, parameters_file=path, sample=sample, say=say)


def test_trained_data_is_taken_kept_and_said(no_data: Path, tmp_path: Path) -> None:
    data, path, said = trained(no_data), tmp_path / "out.sentences.json", []
    first = prepare(path, sample=unasked, said=said)
    assert len(said) == 1 and "trained" in said[0] and str(data) in said[0] and str(path) in said[0]
    assert first.split("I met Zz. Smith. He left. We go on 5. May then.") == [
        "I met Zz. Smith.",
        "He left.",
        "We go on 5. May then.",
    ]
    content = json.loads(path.read_text())
    assert content["source"] == "trained" and content["contexts"] == {"smith": 4, "the": 46}
    assert str(tmp_path) not in path.read_text()


def test_a_node_without_the_trained_data_splits_like_the_one_that_has_it(no_data: Path, tmp_path: Path) -> None:
    data, path, said = trained(no_data), tmp_path / "out.sentences.json", []
    first = prepare(path, sample=unasked)
    for file in data.iterdir():
        file.unlink()
    data.rmdir()
    second = prepare(path, sample=unasked, said=said)
    assert second.fingerprint == first.fingerprint and "trained" in said[0]
    assert prepare(path, sample=unasked, keep=True).fingerprint != first.fingerprint


@pytest.mark.parametrize(
    "damage", [lambda d: (d / "abbrev_types.txt").unlink(), lambda d: (d / "collocations.tab").write_text("x\n")]
)
def test_damaged_trained_data_is_refused(no_data: Path, tmp_path: Path, damage: Callable[[Path], object]) -> None:
    damage(trained(no_data))
    with pytest.raises(DataError, match=r"--lang english: NLTK's data in .* cannot be read .*install punkt_tab"):
        prepare(tmp_path / "p.json", sample=unasked)
    assert not (tmp_path / "p.json").exists()


def test_a_damaged_archive_of_trained_data_is_refused(no_data: Path, tmp_path: Path) -> None:
    (no_data / "tokenizers").mkdir()
    (no_data / "tokenizers" / "punkt_tab.zip").write_bytes(b"no zip")
    with pytest.raises(DataError, match=r"--lang english: .*not a zip file.*install punkt_tab"):
        prepare(tmp_path / "p.json", sample=unasked)


def test_pickled_data_of_older_nltk_is_not_read(no_data: Path, tmp_path: Path) -> None:
    old = no_data / "tokenizers" / "punkt"
    old.mkdir(parents=True)
    (old / "english.pickle").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    said: list[str] = []
    prepare(tmp_path / "p.json", said=said)
    assert "learn" in said[0]


def test_learned_once_and_said(no_data: Path, tmp_path: Path) -> None:
    path, said = tmp_path / "new" / "p.json", []
    first = prepare(path, language="klingon", said=said)
    assert "no punkt_tab data for klingon" in said[0] and str(path) in said[1] and "learned from" in said[1]
    again = prepare(path, language="klingon", sample=unasked, said=said)
    assert str(path) in said[2] and "learned" in said[2] and again.fingerprint == first.fingerprint
    assert [file.name for file in path.parent.iterdir()] == ["p.json"]


def test_an_empty_sample_learns_nothing(no_data: Path, tmp_path: Path) -> None:
    splitter = prepare(tmp_path / "p.json", sample=lambda: iter(["", " "]))
    assert splitter.split("One two. Three four.") == ["One two.", "Three four."]


def test_the_sample_is_bounded() -> None:
    def endless() -> Iterator[str]:
        while True:
            yield "Mr. Smith went home. "

    assert learn(endless(), most=1000)[1] == 1000


def test_learned_bytes_depend_on_the_texts_only(tmp_path: Path) -> None:
    code = (
        "import sys; from megatron.preprocess.sentences import _encode, learn\n"
        "sys.stdout.buffer.write(_encode(learn(iter(sys.stdin.read().split('\\0')))[0], 'x', 'learned'))"
    )
    texts = "\0".join([*corpus(), "etc.. etc. etc... etc u.s.. u.s. u.s a.. a... b-etc. b-etc.. \ud7ff"]).encode()
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            input=texts,
            capture_output=True,
            check=True,
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed, "PYTHONUTF8": "1"},
        ).stdout
        for seed in ("0", "1", "77")
    ]
    assert outputs[0] and outputs[0] == outputs[1] == outputs[2]


# ---------------------------------------------------------------- the file


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b"\xff\xfe",
        b'{"checksum": 3}',
        b"[" * 100_000,
        lambda raw: raw[:-40],
        lambda raw: raw.replace(b'"mr"', b'"ms"', 1),
        lambda raw: raw.replace(b"learned", b"trained", 1),
    ],
)
def test_damaged_parameters_are_refused(
    no_data: Path, tmp_path: Path, content: bytes | Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "p.json"
    prepare(path)
    path.write_bytes(content if isinstance(content, bytes) else content(path.read_bytes()))
    with pytest.raises(DataError, match=r"p\.json: damaged, .*delete it"):
        prepare(path, sample=unasked)


def test_parameters_of_another_language_are_refused(no_data: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    prepare(path)
    with pytest.raises(ConfigError, match=r"--lang german: .*p\.json is for english; give --lang english, or delete"):
        prepare(path, language="german", sample=unasked)


@pytest.mark.parametrize("language", ["", "../english", "a/b", "english.pickle", "a b"])
def test_a_name_that_is_no_language(language: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--lang .*such as english"):
        prepare(tmp_path / "p.json", language=language, sample=unasked)


def test_without_nltk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "nltk.data", None)
    with pytest.raises(ConfigError, match=r"--split-sentences: needs NLTK .*pip install .*the extra `data`"):
        prepare(tmp_path / "p.json", sample=unasked)


def test_nltk_is_imported_only_to_find_or_to_learn() -> None:
    code = "import sys, megatron.preprocess.sentences; assert not {'nltk', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_place_that_cannot_be_written(no_data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"p\.json: cannot be written"):
        prepare(tmp_path / "file" / "p.json")


def test_without_hard_links(no_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert prepare(tmp_path / "p.json").split("One two. Three four.") == ["One two.", "Three four."]
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["p.json"]


def test_who_comes_second_uses_what_the_first_wrote(no_data: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.json"

    def overtaken() -> Iterator[str]:
        prepare(path)  # another partition, with another sample, is done while this one still learns
        yield "Something else entirely, w/o. anything in common."

    assert prepare(path, sample=overtaken).fingerprint == prepare(path, sample=unasked).fingerprint


def prepare_in_a_process(path: str, seed: int, results: object) -> None:
    nltk.data.path[:] = []
    splitter = prepare(Path(path), sample=lambda: iter(corpus(seed)))
    results.put(splitter.fingerprint)  # type: ignore[attr-defined]


def test_partitions_that_start_at_once_agree(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    path = tmp_path / "p.json"
    processes = [context.Process(target=prepare_in_a_process, args=(str(path), i, results)) for i in range(4)]
    for process in processes:
        process.start()
    fingerprints = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert len(fingerprints) == 1 and [file.name for file in tmp_path.iterdir()] == ["p.json"]
