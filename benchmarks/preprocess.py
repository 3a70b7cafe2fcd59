"""Compares our encoder and preprocessing tool with `tokenizers`, and with parsing and writing alone.

    python benchmarks/preprocess.py                       # everything, a few minutes
    python benchmarks/preprocess.py --part encoder --rounds 7 --json result.json

There are two corpora, with one vocabulary learned from both: the standard library's code, and English-like text. Its
words are drawn by their frequency in the library's docstrings, and every thirtieth is invented. The encoder part runs
each contender in a fresh process on one core, with cold caches. They take turns, and ratios are medians over rounds.
The tool part runs tools/preprocess_data.py on a corpus and on several copies of it: the difference is the steady state,
without start-up.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.tokenizer import TokenizerSettings, build_tokenizer
from megatron.tokenizer.export import bpe_file_texts, write_files
from megatron.tokenizer.train import train_bpe

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 32768
BATCH = 1 << 20
CORPORA = ("code", "english")
BASE = "encode_batch_fast"
ENCODERS = ("ours", "ours --encoder exact", BASE, "gigatoken, no guard")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


# ---------------------------------------------------------------- corpora


def code_texts() -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "code.jsonl"
        tool = ROOT / "tools" / "make_stdlib_corpus.py"
        subprocess.run(
            [sys.executable, str(tool), "--output", str(path), "--seed", "1"], check=True, capture_output=True
        )
        with path.open(encoding="utf-8") as file:
            return [json.loads(line)["content"] for line in file]


def english_texts(megabytes: float) -> list[str]:
    words = _docstring_words()
    names, weights = list(words), list(words.values())
    chance = random.Random(1)
    texts, size = [], 0
    while size < megabytes * 1e6:
        text = "\n\n".join(_paragraph(chance, names, weights) for _ in range(chance.randint(2, 12)))
        texts.append(text)
        size += len(text)
    return texts


def _docstring_words() -> Counter[str]:
    words: Counter[str] = Counter()
    for text in code_texts():
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                words.update(re.findall(r"[A-Za-z][a-z']+", ast.get_docstring(node) or ""))
    return words


def _paragraph(chance: random.Random, names: list[str], weights: list[int]) -> str:
    sentences = []
    for _ in range(chance.randint(2, 8)):
        words = chance.choices(names, weights, k=chance.randint(5, 25))
        for i in range(len(words)):
            if chance.random() < 1 / 30:
                words[i] = (chance.choice(names)[:4] + chance.choice(names)[-4:]).lower()
            elif chance.random() < 1 / 15:
                words[i] += chance.choice((",", ",", ";", " (see above)", " \u2014", "\u2019s"))
        sentences.append(" ".join(words).capitalize() + chance.choice((".", ".", ".", "?", "!")))
    return " ".join(sentences)


def write_corpora(folder: Path, megabytes: float) -> None:
    texts = {"code": code_texts(), "english": english_texts(megabytes)}
    for name, lines in texts.items():
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in lines)
    sample = [text for lines in texts.values() for text in lines[::4]]
    write_files(folder, bpe_file_texts(train_bpe(sample, VOCABULARY)))


def read_texts(folder: Path, corpus: str) -> list[str]:
    with (folder / f"{corpus}.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


# ---------------------------------------------------------------- the encoder, in a fresh process


def encoder_of(name: str, folder: Path) -> Callable[[list[str]], Any]:
    files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    if name == "ours":
        return build_tokenizer(TokenizerSettings(**files, encoder="fast")).encode_batch
    exact = build_tokenizer(TokenizerSettings(**files, encoder="exact"))
    if name == "ours --encoder exact":
        return exact.encode_batch
    exact.save_pretrained(folder / "tokenizer")
    path = folder / "tokenizer" / "tokenizer.json"
    description = json.loads(path.read_text(encoding="utf-8")) | {"added_tokens": []}
    if name == BASE:
        from tokenizers import Tokenizer

        rust = Tokenizer.from_str(json.dumps(description))
        return lambda texts: rust.encode_batch_fast(texts, add_special_tokens=False)
    from gigatoken import Tokenizer as GigaTokenizer

    giga = GigaTokenizer.from_json(json.dumps(description))
    return lambda texts: [giga.encode(text) for text in texts]


def batches(texts: list[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def measure_encoder(name: str, folder: Path, corpus: str, core: int, clock: str) -> float:
    """Megabytes of text per second, measured in a fresh process."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    texts = read_texts(folder, corpus)
    size = sum(len(text.encode("utf-8")) for text in texts)
    given = list(batches(texts))
    encode, now = encoder_of(name, folder), CLOCKS[clock]
    start = now()
    for batch in given:
        encode(batch)
    return size / 1e6 / (now() - start)


def fresh(*arguments: str, threads: bool = False) -> float:
    # tokenizers has no API for its number of threads, and reads this variable.
    command = ["env", f"TOKENIZERS_PARALLELISM={str(threads).lower()}", sys.executable, __file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def encoder_part(folder: Path, rounds: int, core: int, clock: str) -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = {}
    for corpus in CORPORA:
        rates: dict[str, list[float]] = {name: [] for name in ENCODERS}
        for _ in range(rounds):
            for name in ENCODERS:
                options = ("--corpus", corpus, "--work", str(folder), "--core", str(core), "--clock", clock)
                rates[name].append(fresh("--one", name, *options))
        title = f"encoder, {corpus}, one core"
        results[title] = {name: statistics.median(values) for name, values in rates.items()}
        ratios = [ours / base for ours, base in zip(rates["ours"], rates[BASE], strict=True)]
        results[title]["ours / " + BASE] = statistics.median(ratios)
        exact = [ours / base for ours, base in zip(rates[ENCODERS[1]], rates[BASE], strict=True)]
        results[title][ENCODERS[1] + " / " + BASE] = statistics.median(exact)
        show(title, results[title])
    return results


# ---------------------------------------------------------------- the whole tool


def measure_threads(folder: Path, corpus: str) -> float:
    """Megabytes per second of encode_batch_fast on all available cores."""
    texts = read_texts(folder, corpus)
    size = sum(len(text.encode("utf-8")) for text in texts)
    encode = encoder_of(BASE, folder)
    start = time.perf_counter()
    for batch in batches(texts):
        encode(batch)
    return size / 1e6 / (time.perf_counter() - start)


def tool_seconds(folder: Path, corpus: Path, workers: int, encoder: str) -> float:
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", str(corpus), "--overwrite"]
    command += ["--output-prefix", str(folder / "out"), "--workers", str(workers), "--encoder", encoder]
    command += ["--append-eod", "--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt")]
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def measure_tool(folder: Path, corpus: str, *, workers: int, times: int, encoder: str) -> float:
    """Megabytes per second in the steady state: the time of `times` copies of the corpus minus that of one."""
    once, often = folder / f"{corpus}.jsonl", folder / f"{corpus}-{times}.jsonl"
    if not often.exists():
        often.write_bytes(once.read_bytes() * times)
    size = sum(len(text.encode("utf-8")) for text in read_texts(folder, corpus)) * (times - 1)
    first = tool_seconds(folder, once, workers, encoder)
    return size / 1e6 / (tool_seconds(folder, often, workers, encoder) - first)


def measure_limit(folder: Path, corpus: str) -> float:
    """Megabytes per second of only parsing the JSON and writing as many bytes as the tokens, on one core."""
    import orjson

    path = folder / f"{corpus}.jsonl"
    size = sum(len(text.encode("utf-8")) for text in read_texts(folder, corpus))
    start = time.perf_counter()
    with path.open("rb") as lines, (folder / "limit.bin").open("wb") as out:
        for line in lines:
            text = orjson.loads(line)["text"]
            out.write(b"\0" * (len(text) // 2))  # a token of two bytes is about four bytes of text
    return size / 1e6 / (time.perf_counter() - start)


def tool_part(folder: Path, rounds: int, workers: int, times: int) -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = {}
    for corpus in CORPORA:
        rates: dict[str, list[float]] = {}
        for _ in range(rounds):
            fast = measure_tool(folder, corpus, workers=workers, times=times, encoder="auto")
            exact = measure_tool(folder, corpus, workers=workers, times=2, encoder="exact")
            threads = fresh("--threads", "--corpus", corpus, "--work", str(folder), threads=True)
            limit = fresh("--limit", "--corpus", corpus, "--work", str(folder))
            rows = {"ours": fast, "ours --encoder exact": exact, BASE + " with threads": threads}
            rows |= {"JSON and writing alone, one core": limit, "ours / " + BASE: fast / threads}
            rows |= {"ours --encoder exact / " + BASE: exact / threads, "limit / ours": limit * workers / fast}
            for name, value in rows.items():
                rates.setdefault(name, []).append(value)
        title = f"whole tool, {corpus}, {workers} workers, steady state"
        results[title] = {name: statistics.median(values) for name, values in rates.items()}
        show(title, results[title])
    return results


# ---------------------------------------------------------------- output


def show(title: str, values: dict[str, float]) -> None:
    """Prints a table in the format of benchmarks/RESULTS.md."""
    print(f"\n| {title} | MB/s or ratio |\n|---|---|")
    for name, value in values.items():
        number = f"{value:.2f}x" if " / " in name else f"{value:.1f}"
        print(f"| {name} | {number} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("encoder", "tool", "all"), default="all")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender; medians are shown (5)")
    parser.add_argument("--megabytes", type=float, default=25.0, help="size of the English-like text (25)")
    parser.add_argument("--workers", type=int, default=2, help="workers of the tool (2)")
    parser.add_argument("--times", type=int, default=12, help="copies of the corpus for the steady state (12)")
    parser.add_argument("--core", type=int, default=0, help="core that the encoders run on (0)")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="clock of the encoders; cpu on busy machines")
    parser.add_argument("--work", type=Path, help="folder that keeps the corpora for the next run")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--corpus", choices=CORPORA, default="code", help=argparse.SUPPRESS)
    parser.add_argument("--one", choices=ENCODERS, help=argparse.SUPPRESS)
    parser.add_argument("--threads", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--limit", action="store_true", help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.one:
        print(measure_encoder(settings.one, settings.work, settings.corpus, settings.core, settings.clock))
    elif settings.threads:
        print(measure_threads(settings.work, settings.corpus))
    elif settings.limit:
        print(measure_limit(settings.work, settings.corpus))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            compare(settings, settings.work or Path(temporary))


def compare(settings: argparse.Namespace, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "merges.txt").exists():
        write_corpora(folder, settings.megabytes)
    results: dict[str, dict[str, float]] = {}
    if settings.part in ("encoder", "all"):
        results |= encoder_part(folder, settings.rounds, settings.core, settings.clock)
    if settings.part in ("tool", "all"):
        results |= tool_part(folder, max(1, settings.rounds // 2), settings.workers, settings.times)
    if settings.json:
        settings.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
