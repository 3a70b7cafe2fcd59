"""Untrusted files, given to the tools that read them: a result, or one line on stderr and an exit code."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from megatron.cli.draw_pipeline import main as draw_pipeline
from megatron.cli.inspect_dataset import main as inspect_dataset
from megatron.cli.merge_datasets import main as merge_datasets
from megatron.cli.plot_loss import main as plot_loss
from megatron.cli.results_table import main as results_table
from megatron.cli.verify_checkpoint import main as verify_checkpoint
from megatron.errors import CheckpointError, DataError
from tests.helpers.megatron_lm import Layout, with_moments, write
from tests.helpers.mutations import only_our_errors, texts
from tests.unit.data.test_merge import some_documents
from tests.unit.data.test_merge import write as write_dataset
from tests.unit.interop.megatron_lm.test_step import GPT2, make
from tests.unit.interop.megatron_lm.test_write import convert

COUNT = 100
REFUSED = {1, 2, 3, 4, DataError.exit_code, CheckpointError.exit_code}  # an exception would end the test

Tool = Callable[[list[str]], int]
Printed = pytest.CaptureFixture[str]


def user_of(tool: Tool, argv: Sequence[object], printed: Printed, codes: set[int]) -> Callable[[object], None]:
    """Runs the tool and collects its exit code; the output of a rejection must be short and without a traceback."""

    def use(_given: object) -> None:
        code = tool([str(word) for word in argv])
        said = printed.readouterr()
        codes.add(code)
        assert code in REFUSED | {0}, code
        assert code == 0 or said.err or said.out
        assert all(len(line) < 3000 for line in said.err.split("\n")) and "Traceback" not in said.err

    return use


def written(path: Path, contents: Iterator[str] | Iterator[bytes]) -> Iterator[str | bytes]:
    """Yields each content once it is in the file."""
    for content in contents:
        path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
        yield content


def lines_with_one_strange(lines: Sequence[object], count: int, seed: int) -> Iterator[str]:
    """JSON lines, one of which is a mutation or not JSON."""
    choose = random.Random(seed)
    whole = [json.dumps(line) for line in lines]
    for place in range(len(lines)):
        for text in texts(lines[place], count, choose.randrange(2**32)):
            yield "\n".join([*whole[:place], text, *whole[place + 1 :]])


def damaged(content: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Bytes with some changed, missing, doubled or replaced by an integer's extremes."""
    choose = random.Random(seed)
    yield from (b"", content[:1], content[:-1], content + b"\0", content * 2)
    for _ in range(count):
        place = choose.randrange(len(content)) if choose.random() < 0.5 else choose.randrange(min(64, len(content)))
        end = place + choose.choice((1, 2, 4, 8))
        odd = choose.choice((b"\xff" * 8, b"\0" * 8, b"\x7f" + b"\xff" * 7, choose.randbytes(8), b""))
        yield content[:place] + odd[: end - place] + content[end:]


def metrics(splits: Sequence[str] = ("train", "train", "valid")) -> list[dict[str, object]]:
    return [
        {"iteration": number, "split": split, "lm_loss": 2.5, "samples_per_second": 3.0, "lm_loss_ppl": 12.0}
        for number, split in enumerate(splits, start=1)
    ]


def test_metrics_of_plot_loss(tmp_path: Path, capsys: Printed) -> None:
    path, codes = tmp_path / "metrics.jsonl", set[int]()
    use = user_of(plot_loss, ["--metrics-jsonl", path], capsys, codes)
    only_our_errors(use, written(path, lines_with_one_strange(metrics(), COUNT, 1)))
    assert codes == {0, 2}


def test_logs_of_plot_loss(tmp_path: Path, capsys: Printed) -> None:
    log = b" iteration        1/     100 | learning rate: 1.0E-4 | lm loss: 2.5E+00 |\n" * 2
    path, codes = tmp_path / "a.log", set[int]()
    use = user_of(plot_loss, ["--log", path], capsys, codes)
    only_our_errors(use, written(path, damaged(log, 3 * COUNT, 2)))
    huge = log.replace(b"        1/", b"9" * 5000 + b"/"), log.replace(b"2.5E+00", b"1.5.5"), log.replace(b"E+", b"E+9")
    only_our_errors(use, written(path, iter(huge)))
    assert codes == {0, 2}


def test_runs_and_published_rows_of_results_table(tmp_path: Path, capsys: Printed) -> None:
    run, published, codes = tmp_path / "run.jsonl", tmp_path / "published.json", set[int]()
    run.write_text("\n".join(map(json.dumps, metrics())))
    rows = {"source": "them", "rows": [{"size": "1B", "devices": "8", "samples_per_second": 3.0, "perplexity": 2.0}]}
    published.write_text(json.dumps(rows))
    use = user_of(results_table, ["--run", "1B", "8", run, "--published", published], capsys, codes)
    use(None)
    only_our_errors(use, written(published, texts(rows, 2 * COUNT, 3)))
    published.write_text(json.dumps(rows))
    only_our_errors(use, written(run, lines_with_one_strange(metrics(), COUNT, 4)))
    assert codes == {0, 2}


def test_traces_of_draw_pipeline(tmp_path: Path, capsys: Printed) -> None:
    codes = set[int]()
    for rank in range(2):
        passes = [["F", 0, m, m + rank, m + rank + 1.0] for m in range(2)] + [["B", 0, 0, 5.0, 6.0]]
        content = {"place": rank, "ranks": 2, "micro_batches": 2, "chunks": 1, "steps": [passes, passes]}
        (tmp_path / f"rank{rank:05d}.json").write_text(json.dumps(content))
    use = user_of(draw_pipeline, ["--trace", tmp_path, "--output", tmp_path / "p.png"], capsys, codes)
    use(None)
    only_our_errors(use, written(tmp_path / "rank00001.json", texts(content, 3 * COUNT, 5)))
    (tmp_path / "rank00001.json").write_text(json.dumps(content))
    only_our_errors(use, written(tmp_path / "rank00000.json", texts({**content, "place": 0}, 3 * COUNT, 6)))
    assert codes == {0, DataError.exit_code}


@pytest.mark.parametrize("impl", ["mmap", "lazy"])
@pytest.mark.parametrize("suffix", ["idx", "bin", "meta.json"])
def test_datasets_of_inspect_and_merge(tmp_path: Path, capsys: Printed, impl: str, suffix: str) -> None:
    one = write_dataset(tmp_path / "one", some_documents(1, 5), impl=impl, extra={"append_eod": False})
    two = write_dataset(tmp_path / "two", some_documents(2, 5), impl=impl, extra={"append_eod": False})
    file, codes = Path(f"{one}.{suffix}"), set[int]()
    intact = file.read_bytes()
    inspect = user_of(
        inspect_dataset, [one, "--verify", "--document", "0", "4", "--histogram", "--json"], capsys, codes
    )
    merge = user_of(merge_datasets, ["--input", one, two, "--output-prefix", tmp_path / "merged"], capsys, codes)

    def use(given: object) -> None:
        inspect(given)
        merge(given)
        for path in tmp_path.glob("merged*"):
            path.unlink()

    use(None)
    changes = texts(json.loads(intact), COUNT, 7) if suffix == "meta.json" else damaged(intact, COUNT, 8)
    only_our_errors(use, written(file, changes))
    assert 0 in codes and len(codes) > 1


def test_checkpoints_of_verify(tmp_path: Path, capsys: Printed) -> None:
    write(tmp_path / "theirs", with_moments(make(GPT2)), Layout(tp=1, optimizer="fp32"))
    convert(tmp_path / "theirs", tmp_path / "native", "native", "--true-vocab-size", "300")
    step, codes = tmp_path / "native/iter_0000500", set[int]()
    use = user_of(verify_checkpoint, [tmp_path / "native", "--deep"], capsys, codes)
    use(None)
    kept = shutil.copytree(tmp_path / "native", tmp_path / "kept")
    for path in sorted(each for each in kept.rglob("*") if each.is_file()):
        file, intact = tmp_path / "native" / path.relative_to(kept), path.read_bytes()
        if file.suffix == ".json":
            only_our_errors(use, written(file, texts(json.loads(intact), COUNT, 9)))
        only_our_errors(use, written(file, damaged(intact, 20, 10)))
        file.write_bytes(intact)
    assert codes >= {0, 1, 4}
    codes.clear()
    use = user_of(verify_checkpoint, ["--compare", step, kept / step.name], capsys, codes)
    manifest = step / "manifest.json"
    only_our_errors(use, written(manifest, texts(json.loads(manifest.read_bytes()), COUNT, 11)))
    assert codes == {CheckpointError.exit_code}


def test_published_rows_that_cannot_be_read_are_told_once(tmp_path: Path, capsys: Printed) -> None:
    run = tmp_path / "run.jsonl"
    run.write_text("\n".join(map(json.dumps, metrics())))
    assert results_table(["--run", "1B", "8", str(run), "--published", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count(str(tmp_path)) == 1 and "Is a directory" in said
