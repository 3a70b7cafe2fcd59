"""Tools under their names in Megatron-LM print one line with the command to use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.compat.renamed_tools import RENAMED, main

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    "name, flags, told",
    [
        (
            "tools/checkpoint_util.py",
            "--model-type GPT --loader megatron --saver megatron --load-dir a --save-dir b "
            "--target-tensor-parallel-size 2 --target-pipeline-parallel-size=4",
            "python tools/convert_checkpoint.py --to megatron --load a --save b --target-tensor-parallel-size 2 "
            "--target-pipeline-parallel-size 4",
        ),
        (
            "tools/checkpoint/convert.py",
            "--loader mcore --saver core --load-dir a --save-dir b",
            "convert_checkpoint.py --to megatron --megatron-names core --load a --save b",
        ),
        ("tools/checkpoint/convert.py", "--saver llama_hf --load-dir a", "--to hf --load a --save DIR"),
        ("tools/text_generation_cli.py", "localhost:5000", "python tools/generate.py --load DIR --prompt TEXT"),
        (
            "tools/run_text_generation_server.py",
            "--tensor-model-parallel-size 1 --load c",
            "tools/generate.py --load DIR",
        ),
        ("tools/report_theoretical_memory.py", "--num-layers 2", "python pretrain_gpt.py --num-layers 2 --dry-run"),
        (
            "tasks/main.py",
            "--task WIKITEXT103 --valid-data wiki.test.tokens --num-layers 2 --vocab-file v --merge-file m --load c "
            "--tensor-model-parallel-size 2 --micro-batch-size 8",
            "python tools/evaluate.py --detokenize wikitext --overlapping-eval 32 --data wiki.test.tokens --load c "
            "--tensor-model-parallel-size 2 --vocab-file v --merge-file m",
        ),
        (
            "tasks/main.py",
            "--task LAMBADA --valid-data lambada.jsonl --strict-lambada --load c",
            "python tools/evaluate.py --task lambada --strict-lambada --data lambada.jsonl --load c",
        ),
        ("tasks/main.py", "--task RACE --load c", "--task RACE: not supported"),
    ],
)
def test_the_new_command_is_told(name: str, flags: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(name, flags.split()) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


@pytest.mark.parametrize("name", RENAMED)
def test_each_is_there(name: str) -> None:
    done = subprocess.run([sys.executable, ROOT / name], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and f"{name}: this tool has another name here" in done.stderr
