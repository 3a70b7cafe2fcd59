"""The guard of the fast encoder: each of its four checks stops a planted wrong engine."""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import random
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.errors import ConfigError, DataError
from megatron.tokenizer import EncoderDifference, TokenizerSettings, build_tokenizer
from megatron.tokenizer.base import Ids
from megatron.tokenizer.fast import engine as fast_engine
from megatron.tokenizer.fast import guard
from megatron.tokenizer.fast.engine import FastEngine
from megatron.tokenizer.fast.fallback_texts import FallbackTexts
from megatron.tokenizer.fast.guard import GuardedEncoder
from megatron.tokenizer.fast.words import split_at_words
from megatron.tokenizer.gpt2 import GPT2BPETokenizer
from tests.unit.tokenizer.support import NASTY, SAMPLES, write_small_bpe

YOUNG = "\ua7d2"  # a letter since Unicode 17, so only in one of the two tables
WORDS = ["alpha", "beta", "gamma", "delta", "hello", "world", "Größe", "東京", "naïve", "x1", "return", "(y):\n   "]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_small_bpe(tmp_path_factory.mktemp("bpe"))


@pytest.fixture(scope="module")
def exact(files: tuple[Path, Path]) -> GPT2BPETokenizer:
    return GPT2BPETokenizer(*files)


def fast_tokenizer(files: tuple[Path, Path]) -> GPT2BPETokenizer:
    return GPT2BPETokenizer(*files, encoder="fast")


def prose(seed: int, words: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


class Wrong(FastEngine):
    """An engine with a wrong last id for texts with the bad word."""

    def __init__(self, exact: GPT2BPETokenizer, bad: str) -> None:
        self._exact, self._bad = exact, bad

    def encode(self, data: bytes) -> Ids:
        text = data.decode()
        parts = [np.array(self._exact.tokenize(part), dtype=np.int32) for part in split_at_words(text, 1)]
        for part, ids in zip(split_at_words(text, 1), parts, strict=True):
            if self._bad in part:
                ids[-1] += 1
        return np.concatenate([np.zeros(0, dtype=np.int32), *parts])


def guarded(exact: GPT2BPETokenizer, engine: FastEngine) -> GuardedEncoder:
    return GuardedEncoder(engine, lambda text: np.array(exact.tokenize(text), dtype=np.int32), FallbackTexts())


# ---------------------------------------------------------------- the sample


def test_a_wrong_engine_is_caught_by_the_sample(exact: GPT2BPETokenizer) -> None:
    encoder = guarded(exact, Wrong(exact, "naïve"))
    with pytest.raises(EncoderDifference) as error:
        encoder.encode_batch(["fine, all of it", *(prose(seed, 4000) for seed in range(3))])
    assert error.value.index in (1, 2, 3) and "naïve" in error.value.excerpt and len(error.value.excerpt) < 300
    assert "--encoder exact" in str(error.value) and isinstance(error.value, DataError)


def test_a_wrong_engine_is_caught_in_a_text_without_spaces(exact: GPT2BPETokenizer) -> None:
    encoder = guarded(exact, Wrong(exact, "京"))
    with pytest.raises(EncoderDifference):
        encoder.encode_batch(["東京は" * 10_000])


def test_a_right_engine_raises_no_alarm(exact: GPT2BPETokenizer) -> None:
    encoder = guarded(exact, Wrong(exact, "no such word"))
    texts = ["", "a", *NASTY, prose(1, 30_000), "東京は" * 10_000, "x" * 30_000, " " * 30_000, "a\n" * 10_000]
    got = encoder.encode_batch(texts)
    assert [ids.tolist() for ids in got] == [exact.tokenize(text) for text in texts]


def test_the_first_texts_are_all_compared(exact: GPT2BPETokenizer) -> None:
    with pytest.raises(EncoderDifference) as error:
        guarded(exact, Wrong(exact, "bug")).encode_batch([*SAMPLES, "bug"])
    assert error.value.index == len(SAMPLES) and error.value.excerpt == "bug"


def sampled(texts: list[str], batch: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pieces that are compared when the texts come in batches of this size."""
    monkeypatch.setattr(guard, "LONGEST_UNSAMPLED", 1 << 60)
    monkeypatch.setattr(guard, "WARM_UP", 0)
    pieces: list[str] = []

    class Silent(FastEngine):
        def __init__(self) -> None:
            pass

        def encode(self, data: bytes) -> Ids:
            return np.zeros(1, dtype=np.int32)

    def compared(text: str) -> Ids:
        pieces.append(text)
        return np.zeros(1, dtype=np.int32)

    encoder = GuardedEncoder(Silent(), compared, FallbackTexts())
    for start in range(0, len(texts), batch):
        encoder.encode_batch(texts[start : start + batch])
    return pieces


@pytest.mark.parametrize("size", [30, 3000, 300_000, 5_000_000])
def test_the_sample_is_a_small_share_of_texts_of_any_length(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = prose(0, size // 6)
    count = 60_000_000 // size if size > 1000 else 100_000
    pieces = sampled([f"{number} {text}" for number in range(count)], 100, monkeypatch)
    share = sum(map(len, pieces)) / (count * len(text))
    assert 0.001 < share < 0.004


def test_any_cut_into_batches_compares_the_same_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [prose(seed, 3000) for seed in range(400)]
    assert sampled(texts, 7, monkeypatch) == sampled(texts, 100, monkeypatch) != []


def test_some_text_is_compared_however_the_choice_falls(
    exact: GPT2BPETokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "LONGEST_UNSAMPLED", 1000)
    monkeypatch.setattr(guard, "WARM_UP", 0)
    encoder = guarded(exact, Wrong(exact, "bug"))
    encoder.encode_batch(["fine"])
    with pytest.raises(EncoderDifference):
        encoder.encode_batch([f"short text {number} bug" for number in range(60)])


@pytest.mark.parametrize("repeated", [True, False])
def test_the_ids_of_a_long_text_are_searched_once(
    exact: GPT2BPETokenizer, monkeypatch: pytest.MonkeyPatch, repeated: bool
) -> None:
    """Repeated searches would make the work quadratic in the document's length."""
    searched = 0
    find = guard.find_ids

    def counted(part: Ids, whole: Ids, start: int = 0) -> int | None:
        nonlocal searched
        found = find(part, whole, start)
        searched += (len(whole) if found is None else found + len(part)) - start
        return found

    monkeypatch.setattr(guard, "find_ids", counted)
    monkeypatch.setattr(guard, "STRETCH", 4 * guard.PIECE)
    text = prose(1, 100) + " "
    text = text * 2000 if repeated else prose(1, 200_000)
    (ids,) = guarded(exact, Wrong(exact, "no such word")).encode_batch([text])
    assert ids.tolist() == exact.tokenize(text)
    pieces = len(text) // (4 * guard.PIECE) + 1
    assert 0 < searched <= len(ids) + pieces * 2 * guard.PIECE


def test_a_wrong_piece_late_in_a_long_text_is_caught(exact: GPT2BPETokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "STRETCH", guard.PIECE)
    with pytest.raises(EncoderDifference):
        guarded(exact, Wrong(exact, "bug")).encode_batch([prose(1, 20_000) + " bug" * 4000 + prose(2, 20_000)])


@pytest.mark.parametrize("searched", [1, 3, 1 << 18])
def test_where_ids_are_found(monkeypatch: pytest.MonkeyPatch, searched: int) -> None:
    monkeypatch.setattr(guard, "SEARCHED", searched)
    whole = np.array([0, 1, 1 << 8, 1 << 16, 7, 8, 1, 256, 7], dtype=np.int32)
    for start in range(len(whole)):
        for stop in range(start + 1, len(whole) + 1):
            part = whole[start:stop]
            first = next(i for i in range(len(whole)) if np.array_equal(whole[i : i + len(part)], part))
            assert guard.find_ids(part, whole) == first and guard.find_ids(part, whole, start) == start
    assert guard.find_ids(np.array([1, 7], dtype=np.int32), whole) is None
    assert guard.find_ids(np.array([1], dtype=np.int32), whole, 7) is None
    assert guard.find_ids(np.arange(99, dtype=np.int32), whole) is None


def test_the_alarm_can_be_sent_to_another_process() -> None:
    alarm = pickle.loads(pickle.dumps(EncoderDifference(3, "an excerpt")))
    assert (alarm.index, alarm.excerpt) == (3, "an excerpt")


# ---------------------------------------------------------------- the battery, fallback texts, panics


def test_an_engine_that_is_wrong_on_this_vocabulary_is_not_used(
    files: tuple[Path, Path], exact: GPT2BPETokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FastEngine, "encode", Wrong(exact, "camelCase").encode)
    with pytest.raises(
        ConfigError, match=r"--encoder fast: .* its ids differ .* on this vocabulary, as for 'camelCase"
    ):
        fast_tokenizer(files)
    with caplog.at_level(logging.WARNING):
        assert GPT2BPETokenizer(*files, encoder="auto").engine == "exact"
        assert GPT2BPETokenizer(*files, encoder="auto", announce=False).engine == "exact"
    assert len(caplog.records) == 1 and "its ids differ from the exact ones" in caplog.text


def test_young_characters_take_the_exact_encoder(files: tuple[Path, Path], exact: GPT2BPETokenizer) -> None:
    tokenizer = fast_tokenizer(files)
    texts = [f"a{YOUNG}b", "plain", f"{prose(1, 5000)} x{YOUNG}y {prose(2, 5000)}", YOUNG * 5000, "é\u0378é"]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids.tolist() == exact.tokenize(text)


def test_the_library_really_differs_on_young_characters(files: tuple[Path, Path], exact: GPT2BPETokenizer) -> None:
    """A failure means that the two libraries share a Unicode table, and the check may be relaxed."""
    guarded_encoder = fast_tokenizer(files)._fast
    assert guarded_encoder is not None
    text = f"{YOUNG}'t {YOUNG}'re {YOUNG}'ll {YOUNG}'ve"  # after a letter a contraction is a separate word
    assert guarded_encoder._engine.encode(text.encode()).tolist() != exact.tokenize(text)


def test_only_the_doubtful_part_of_a_long_text_is_encoded_slowly(exact: GPT2BPETokenizer) -> None:
    asked: list[str] = []

    def slow(text: str) -> Ids:
        asked.append(text)
        return np.array(exact.tokenize(text), dtype=np.int32)

    encoder = GuardedEncoder(Wrong(exact, "no such word"), slow, FallbackTexts())
    text = f"{prose(1, 20_000)} x{YOUNG}y {prose(2, 20_000)}"
    assert encoder.encode_batch([text])[0].tolist() == exact.tokenize(text)
    assert sum(map(len, asked)) < len(text) / 10


def falling_back(texts: list[str], **options: Any) -> set[int]:
    return FallbackTexts(**options).find(texts, [text.encode() for text in texts])


def test_what_is_doubtful() -> None:
    assert falling_back(["ascii", "naïve 東京 🙂 \ue000", "\u0378", "", f"x{YOUNG}"]) == {2, 4}
    assert falling_back(["e\u0301 \u1ac2"]) == set() and falling_back(["e\u0301", "e\u1ac2"], composes=True) == {1}
    assert falling_back(["x<a>y", "<b>"], plain_tokens=("<a>",)) == {0}
    assert falling_back(["\u0295"], cased=True) == {0} and falling_back(["\u0295"]) == set()
    # However a long text is cut for the search, no character is split.
    for shift in range(4):
        text = "x" * shift + "東" * 700_000
        assert falling_back([text, text + YOUNG, YOUNG + text]) == {1, 2}


def panicking(word: bytes, encode: Callable[[bytes], Ids]) -> Callable[[bytes], Ids]:
    panic = type("PanicException", (BaseException,), {})

    def instead(data: bytes) -> Ids:
        if word in data:
            raise panic("index out of bounds")
        return encode(data)

    return instead


def test_a_panic_of_the_library_is_taken_by_the_exact_encoder(
    files: tuple[Path, Path], exact: GPT2BPETokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = fast_tokenizer(files)
    assert tokenizer._fast is not None
    engine = tokenizer._fast._engine
    assert isinstance(engine, FastEngine)
    engine._encode = panicking(b"boom", engine._encode)
    texts = ["fine", "boom", "fine again", f"boom {YOUNG} {prose(1, 2000)}"]
    with caplog.at_level(logging.WARNING):
        assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == [exact.tokenize(text) for text in texts]
    assert "gigatoken failed on a text (index out of bounds)" in caplog.text


def test_other_interruptions_are_not_swallowed(files: tuple[Path, Path]) -> None:
    tokenizer = fast_tokenizer(files)
    assert tokenizer._fast is not None

    def interrupted(data: bytes) -> Ids:
        raise KeyboardInterrupt

    tokenizer._fast._engine._encode = interrupted  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode_batch(["a"])


@pytest.mark.parametrize("text", ["a\ud800", "\udfff", "é\ud800"])
def test_a_lone_surrogate_is_refused(files: tuple[Path, Path], text: str) -> None:
    with pytest.raises(DataError, match="lone surrogate"):
        fast_tokenizer(files).encode_batch(["fine", text])


# ---------------------------------------------------------------- the engine


LONG = {
    "one word": "hello" * 250_000,
    "spaces": " " * 1_200_000,
    "digits": "7" * 1_200_000,
    "marks": "e" + "\u0301" * 1_000_000,
    "ideographs": "東京" * 500_000,
    "lines": "a b\r\n" * 100_000,
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG.keys())
def test_long_texts_of_any_kind(files: tuple[Path, Path], exact: GPT2BPETokenizer, text: str) -> None:
    assert np.array_equal(fast_tokenizer(files).encode_batch([text])[0], exact.encode_batch([text])[0])


def test_memory_is_bounded_by_making_the_engine_anew(
    files: tuple[Path, Path], exact: GPT2BPETokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []
    grown = iter(range(0, 1 << 60, fast_engine.CACHE_BYTES // 2))
    build = FastEngine._build
    monkeypatch.setattr(fast_engine, "resident_bytes", lambda: next(grown))
    tokenizer = fast_tokenizer(files)
    monkeypatch.setattr(fast_engine, "CHECK_BYTES", 1000)
    monkeypatch.setattr(FastEngine, "_build", lambda self: (built.append(1), build(self))[1])
    texts = [prose(seed, 500) for seed in range(30)]
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == [exact.tokenize(text) for text in texts]
    # Rebuilding never helps here, so it happens less and less often.
    assert 2 <= len(built) <= 5


@pytest.mark.parametrize("words", [WORDS, ["alpha", "beta", "(y):\n   "]])
def test_memory_beside_a_text_and_its_ids_does_not_grow_with_the_text(
    files: tuple[Path, Path], words: list[str]
) -> None:
    tokenizer = fast_tokenizer(files)
    paragraph = " ".join(random.Random(1).choices(words, k=2000))
    for size in (4_000_000, 16_000_000):
        text = paragraph * (size // len(paragraph))
        tracemalloc.start()
        (ids,) = tokenizer.encode_batch([text])
        beside = tracemalloc.get_traced_memory()[1] - ids.nbytes * 9 / 8  # a buffer that grows has room to spare
        tracemalloc.stop()
        assert beside < 24 * guard.PART, size


def test_a_long_text_is_encoded_part_by_part(
    files: tuple[Path, Path], exact: GPT2BPETokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "PART", 100)
    monkeypatch.setattr(guard, "STRETCH", 4 * guard.PIECE)
    random.seed(3)
    texts = [prose(1, 30_000), f"{prose(2, 9000)} x{YOUNG}y's {prose(3, 9000)}", "東京は" * 3000, " " * 5000, *NASTY]
    texts += [f"{YOUNG}'t" * 5000]  # no words to cut at, and the engine alone differs
    texts += ["".join(random.choices(["a ", "\n", "'re", " ", f"{YOUNG}'t", "7", "é\u0301", "\u3000"], k=5000))]
    for text, ids in zip(texts, fast_tokenizer(files).encode_batch(texts), strict=True):
        assert np.array_equal(ids, exact.tokenize(text))
    with pytest.raises(DataError, match=r"lone surrogate \(U\+D800 at character 200\)"):
        fast_tokenizer(files).encode_batch(["ab  " * 50 + "\ud800"])


def test_a_wrong_part_of_a_long_text_is_caught(exact: GPT2BPETokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "PART", 2000)
    monkeypatch.setattr(guard, "STRETCH", guard.PIECE)
    with pytest.raises(EncoderDifference):
        guarded(exact, Wrong(exact, "bug")).encode_batch([f"x{YOUNG}y {prose(1, 20_000)}{' bug' * 4000}"])


def test_without_a_process_size_it_is_made_anew_after_so_much_text(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = fast_tokenizer(files)
    assert tokenizer._fast is not None and isinstance(tokenizer._fast._engine, FastEngine)
    first = tokenizer._fast._engine._library
    monkeypatch.setattr(fast_engine, "resident_bytes", lambda: 0)
    monkeypatch.setattr(fast_engine, "CHECK_BYTES", 1000)
    monkeypatch.setattr(fast_engine, "REBUILD_BYTES", 5000)
    tokenizer.encode_batch([prose(1, 300) for _ in range(10)])
    assert tokenizer._fast._engine._library is not first


def test_a_forked_process_encodes_as_its_parent(files: tuple[Path, Path]) -> None:
    tokenizer = fast_tokenizer(files)
    texts = [prose(1, 200_000), *SAMPLES]
    expected = [ids.tolist() for ids in tokenizer.encode_batch(texts)]
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send([ids.tolist() for ids in tokenizer.encode_batch(texts)]))
    child.start()
    assert receiver.poll(60) and receiver.recv() == expected
    child.join()


# ---------------------------------------------------------------- choosing it


def test_the_settings_choose(files: tuple[Path, Path]) -> None:
    names = {"vocab_file": str(files[0]), "merge_file": str(files[1])}
    engines = {
        choice: build_tokenizer(TokenizerSettings(**names, encoder=choice)).engine  # type: ignore[arg-type]
        for choice in ("auto", "fast", "exact")
    }
    assert engines == {"auto": "fast, guarded", "fast": "fast, guarded", "exact": "exact"}


def test_without_gigatoken_one_line_says_what_it_would_gain(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    with caplog.at_level(logging.WARNING):
        assert GPT2BPETokenizer(*files, encoder="auto").engine == "exact"
    assert len(caplog.records) == 1
    assert "pip install gigatoken, about 40 times faster" in caplog.text and "\n" not in caplog.records[0].getMessage()
    with pytest.raises(ConfigError, match="--encoder fast: GPT2BPETokenizer: the package gigatoken is not installed"):
        GPT2BPETokenizer(*files, encoder="fast")


def test_a_library_that_cannot_open_the_vocabulary_is_not_used(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(text: str) -> object:
        raise ValueError("no such thing\nand more")

    import gigatoken

    monkeypatch.setattr(gigatoken.Tokenizer, "from_json", refuse)
    with pytest.raises(ConfigError, match=r"gigatoken cannot open this tokenizer \(no such thing\); give"):
        fast_tokenizer(files)


def test_a_panic_at_the_start_is_a_reason_not_to_use_it(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(self: FastEngine, data: bytes) -> Ids:
        raise fast_engine.EnginePanicError

    monkeypatch.setattr(FastEngine, "encode", panic)
    with pytest.raises(ConfigError, match="gigatoken failed on one of the test texts"):
        fast_tokenizer(files)
