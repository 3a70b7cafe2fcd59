"""Fill in the middle: the reordered pieces give the original text, and frequencies match the rates."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from megatron.config import DataConfig
from megatron.data.fim import FillInTheMiddle, FIMDataset, cut_at
from megatron.data.loader import build_loader
from megatron.data.sampler import BlockShape, single_batches
from megatron.errors import ConfigError, DataError
from megatron.tokenizer.gpt2 import GPT2BPETokenizer
from tests.unit.tokenizer.support import SAMPLES, write_small_bpe

SPECIAL = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<|endoftext|>", "<file>")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> GPT2BPETokenizer:
    folder = tmp_path_factory.mktemp("bpe")
    write_small_bpe(folder)
    vocab = json.loads((folder / "vocab.json").read_text())
    for name in SPECIAL:
        vocab.setdefault(name, len(vocab))
    (folder / "vocab.json").write_text(json.dumps(vocab))
    return GPT2BPETokenizer(folder / "vocab.json", folder / "merges.txt")


@pytest.fixture(scope="module")
def ids(tokenizer: GPT2BPETokenizer) -> dict[str, int]:
    return {name: tokenizer.token_id(name) or 0 for name in SPECIAL}


class Rows:
    """A dataset of given samples."""

    def __init__(self, rows: Iterable[Iterable[int]]) -> None:
        self.rows = [np.array(list(row), dtype=np.int64) for row in rows]
        self.seq_length = len(self.rows[0]) - 1

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.rows[index]

    def locate(self, index: int, token: int) -> str:
        return f"row {index}, token {token}"


def rule(ids: dict[str, int], **changed: object) -> FillInTheMiddle:
    settings = {
        "rate": 1.0,
        "spm_rate": 0.5,
        "prefix": ids["<fim_prefix>"],
        "middle": ids["<fim_middle>"],
        "suffix": ids["<fim_suffix>"],
        "eod": ids["<|endoftext|>"],
    }
    return FillInTheMiddle(**(settings | changed))  # type: ignore[arg-type]


def dataset(
    rows: Iterable[Iterable[int]], fim: FillInTheMiddle, tokenizer: GPT2BPETokenizer, **where: int
) -> FIMDataset:
    return FIMDataset(Rows(rows), fim, tokenizer, **({"seed": 1, "split": 0} | where))


def put_back(tokens: np.ndarray, fim: FillInTheMiddle) -> tuple[str, np.ndarray]:
    """Inverse of a rearranged document: (form, original document). Shares no code with the package."""
    text = tokens.tolist()
    if fim.prefix not in text:
        return "none", tokens
    assert text[0] == fim.prefix and [text.count(mark) for mark in (fim.prefix, fim.suffix, fim.middle)] == [1, 1, 1]
    suffix, middle = text.index(fim.suffix), text.index(fim.middle)
    assert suffix < middle
    if suffix == 1:  # the prefix follows the middle mark in this form
        return "spm", np.array(text[middle + 1 :] + text[2:middle])
    return "psm", np.array(text[1:suffix] + text[middle + 1 :] + text[suffix + 1 : middle])


TEXTS = [text for text in SAMPLES if 4 < len(text) < 4000]


def row_of(tokens: list[int], filling: int) -> list[int]:
    """Adds room behind the document for the marks and for the extra tokens of a cut one."""
    return [*tokens, *[filling] * 40]


def test_put_back_in_order_it_is_the_text(tokenizer: GPT2BPETokenizer, ids: dict[str, int]) -> None:
    """Documents in many scripts; cuts at any character, within tokens too, but never within a character."""
    fim, forms, cut_tokens = rule(ids), set(), 0
    for seed, text in enumerate(TEXTS):
        tokens = tokenizer.tokenize(text)
        rows = dataset([row_of(tokens, fim.eod)] * 20, fim, tokenizer, seed=seed)
        for index in range(20):
            sample = rows[index]
            assert len(sample) == len(tokens) + 40
            form, document = put_back(next(cut_at(sample, fim.eod))[0], fim)
            forms.add(form)
            assert tokenizer.detokenize(document.tolist()) == tokenizer.detokenize(tokens)
            assert "\ufffd" not in tokenizer.detokenize(document.tolist()) or "\ufffd" in text
            cut_tokens += len(document) != len(tokens)
            for mark in (fim.prefix, fim.suffix, fim.middle):
                for piece, _ in cut_at(next(cut_at(sample, fim.eod))[0], mark):
                    decoded = tokenizer.detokenize([i for i in piece.tolist() if i < min(ids.values())])
                    assert "\ufffd" not in decoded or "\ufffd" in text  # every piece is whole characters
    assert forms == {"psm", "spm"} and cut_tokens > 50


def test_a_wrong_order_is_seen(tokenizer: GPT2BPETokenizer, ids: dict[str, int]) -> None:
    """Planted bug: middle and suffix swapped."""
    fim = rule(ids)
    swapped = rule(ids, middle=fim.suffix, suffix=fim.middle)
    tokens = tokenizer.tokenize("def middle(first, second):\n    return first + second\n")
    rows = dataset([row_of(tokens, fim.eod)] * 20, swapped, tokenizer)
    wrong = 0
    for index in range(20):
        try:
            _, document = put_back(next(cut_at(rows[index], fim.eod))[0], fim)
            wrong += tokenizer.detokenize(document.tolist()) != tokenizer.detokenize(tokens)
        except AssertionError:
            wrong += 1
    assert wrong > 15


@pytest.mark.parametrize(("rate", "spm_rate"), [(0.5, 0.5), (0.1, 0.9), (0.9, 0.0), (1.0, 1.0), (0.0, 0.5)])
def test_rates(tokenizer: GPT2BPETokenizer, ids: dict[str, int], rate: float, spm_rate: float) -> None:
    count, fim = 2000, rule(ids, rate=rate, spm_rate=spm_rate)
    text = "some words of text"
    rows = dataset([row_of(tokenizer.tokenize(text), fim.eod)] * count, fim, tokenizer)
    forms = [put_back(next(cut_at(rows[index], fim.eod))[0], fim)[0] for index in range(count)]
    done = count - forms.count("none")

    def near(seen: int, of: int, share: float) -> bool:
        return abs(seen - of * share) <= 4.5 * (of * share * (1 - share)) ** 0.5  # one false alarm in 100 000

    empty = 1 - (len(text) / (len(text) + 1)) ** 2  # without a prefix both forms are the same
    assert near(done, count, rate) and near(forms.count("spm"), done, spm_rate + (1 - spm_rate) * empty)
    assert not near(done, count, rate + 0.2 if rate < 0.8 else rate - 0.2)  # the test tells rates apart


def test_cuts_are_even_over_the_characters(tokenizer: GPT2BPETokenizer, ids: dict[str, int]) -> None:
    text, count, fim = "abcdefgh ijklmn", 4000, rule(ids, spm_rate=0.0)
    rows = dataset([row_of(tokenizer.tokenize(text), fim.eod)] * count, fim, tokenizer)
    lengths = []
    for index in range(count):
        pieces = list(cut_at(next(cut_at(rows[index], fim.eod))[0], fim.suffix))
        lengths.append(len(tokenizer.detokenize(pieces[0][0][1:].tolist())))
    n = len(text) + 1
    expected = np.array([count * (2 * (n - k) - 1) / n**2 for k in range(n)])  # the smaller of two even draws
    seen = np.bincount(lengths, minlength=n)
    assert (abs(seen - expected) <= 5 * np.sqrt(expected) + 1).all()


def test_documents_are_rearranged_by_themselves(tokenizer: GPT2BPETokenizer, ids: dict[str, int]) -> None:
    fim = rule(ids)
    texts = ["first document", "", "second one", "third"]
    tokens = [token for text in texts for token in [*tokenizer.tokenize(text), fim.eod]]
    sample = dataset([row_of(tokens, tokenizer.tokenize("x")[0])], fim, tokenizer)[0]
    documents = [piece for piece, _ in cut_at(sample, fim.eod)]
    assert [tokenizer.detokenize(put_back(piece, fim)[1].tolist()) for piece in documents[:4]] == texts


def test_the_end_of_a_sample_gives_way(tokenizer: GPT2BPETokenizer, ids: dict[str, int]) -> None:
    tokens = tokenizer.tokenize("a text that fills its sample to the end, and no room is left")
    fim = rule(ids, spm_rate=0.0)
    full, cut = dataset([row_of(tokens, fim.eod)], fim, tokenizer)[0], dataset([tokens], fim, tokenizer)[0]
    assert len(cut) == len(tokens) and cut.tolist() == full[: len(tokens)].tolist()


def test_depends_on_seed_split_and_number_alone(tokenizer: GPT2BPETokenizer, ids: dict[str, int]) -> None:
    fim, tokens = rule(ids), tokenizer.tokenize("the same text in every sample, cut here and there")
    rows = [row_of(tokens, fim.eod)] * 12
    first = [sample.tolist() for sample in map(dataset(rows, fim, tokenizer).__getitem__, range(12))]
    fresh = dataset(rows, fim, tokenizer)
    assert [fresh[index].tolist() for index in reversed(range(12))] == first[::-1]  # in any order, asked anew
    assert len({tuple(sample) for sample in first}) > 8
    for where in ({"seed": 2}, {"split": 1}):
        assert [dataset(rows, fim, tokenizer, **where)[i].tolist() for i in range(12)] != first

    def batches(workers: int, consumed: int, ranks: int) -> dict[int, list[int]]:
        seen: dict[int, list[int]] = {}
        for rank in range(ranks):
            samples = single_batches(len(rows), consumed, BlockShape(micro_batch_size=2, dp_rank=rank, dp_size=ranks))
            loader = build_loader(dataset(rows, fim, tokenizer), samples, num_workers=workers)
            for batch in loader:
                seen.update(zip(batch["sample_ids"].tolist(), batch["tokens"].tolist()))
            loader.close()
        return seen

    expected = {index: sample[:-1] for index, sample in enumerate(first)}
    assert batches(0, 0, 1) == batches(2, 0, 1) == batches(1, 0, 2) == expected
    assert batches(1, 4, 2) == {index: sample for index, sample in expected.items() if index >= 4}


def test_fragments(tokenizer: GPT2BPETokenizer, ids: dict[str, int]) -> None:
    """Rearranges each fragment between split tokens by its own rate; split tokens stay in place."""
    mark = ids["<file>"]
    fim = rule(ids, fragment=mark, fragment_rate=0.5)
    texts = ["one file", "two files", "", "the last file"]
    tokens = [token for text in texts for token in [*tokenizer.tokenize(text), mark]][:-1]
    forms = []
    rows = dataset([row_of(tokens, fim.eod)] * 300, fim, tokenizer)
    for index in range(300):
        fragments = [piece for piece, _ in cut_at(next(cut_at(rows[index], fim.eod))[0], mark)]
        back = [put_back(piece, fim) for piece in fragments]
        assert [tokenizer.detokenize(document.tolist()) for _, document in back] == texts
        forms += [form for form, document in back if len(document)]
    assert 0.42 < 1 - forms.count("none") / len(forms) < 0.58
    untouched = dataset([row_of(tokens, fim.eod)], rule(ids, rate=0.0, fragment=mark, fragment_rate=1.0), tokenizer)
    assert untouched[0].tolist() == row_of(tokens, fim.eod)


def test_what_begins_with_the_exception_is_left(tokenizer: GPT2BPETokenizer, ids: dict[str, int]) -> None:
    fim = rule(ids, no_prefix="<issue> é")
    for text, left in (("<issue> été", True), ("<issue> e", False), ("an <issue> é", False)):
        row = row_of(tokenizer.tokenize(text), fim.eod)
        assert (dataset([row], fim, tokenizer)[0].tolist() == row) is left


def test_special_tokens_of_the_data_are_never_spelled_out(tokenizer: GPT2BPETokenizer, ids: dict[str, int]) -> None:
    """A token that no text encodes to moves as a whole, even if the cut falls into it."""
    fim, special = rule(ids), ids["<file>"]
    rows = dataset([row_of([special] * 6, fim.eod)] * 50, fim, tokenizer)
    for index in range(50):
        assert rows[index].tolist().count(special) == 6


def test_an_id_outside_of_the_vocabulary_is_refused_by_its_place(
    tokenizer: GPT2BPETokenizer, ids: dict[str, int]
) -> None:
    row = row_of(tokenizer.tokenize("text"), ids["<|endoftext|>"])
    row[3] = tokenizer.vocab_size
    loader = build_loader(dataset([row], rule(ids), tokenizer), iter([[0]]), vocab_size=tokenizer.vocab_size)
    with pytest.raises(DataError, match=r"row 0, token 3 .*is not in the vocabulary"):
        next(loader)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fim_prefix_token": "<PRE>"}, "--fim-prefix-token <PRE>: the tokenizer's vocabulary"),
        ({"fim_eod_token": "</s>"}, "--fim-eod-token </s>: the tokenizer's vocabulary"),
        ({"fim_split_sample": "<repo>", "fim_fragment_rate": 0.5}, "--fim-split-sample <repo>: the tokenizer"),
        ({"fim_middle_token": "<fim_suffix>"}, "name the same token"),
    ],
)
def test_refusals(tokenizer: GPT2BPETokenizer, settings: dict[str, object], message: str) -> None:
    config = DataConfig(seq_length=8, fim_data=True, **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        FillInTheMiddle.of(config, tokenizer)
    with pytest.raises(ConfigError, match="--fim-data: needs a text tokenizer, but this run has none"):
        FillInTheMiddle.of(config, None)


def test_settings_become_the_rule(tokenizer: GPT2BPETokenizer, ids: dict[str, int], tmp_path: Path) -> None:
    config = DataConfig(
        seq_length=8, fim_data=True, fim_rate=0.3, fim_spm_rate=0.7, fim_split_sample="<file>", fim_fragment_rate=0.2
    )
    expected = rule(ids, rate=0.3, spm_rate=0.7, fragment=ids["<file>"], fragment_rate=0.2)
    assert FillInTheMiddle.of(config, tokenizer) == expected
