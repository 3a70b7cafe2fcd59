"""The programs of the articles on DeepSpeed, FairScale and DDP: corrected in examples/, and as published.

As published means with the articles' mistakes, and with only the import line changed. Each mistake either prints one
line that says what to write, or is harmless here.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.errors import ConfigError
from tests.helpers.runs import REPOSITORY, launch

EXAMPLES = REPOSITORY / "examples"


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]


def run_here(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.parametrize(
    ("name", "more"), [("zero_any_model.py", ["--stage", "2"]), ("sharded_optimizer.py", [])], ids=["zero", "sharded"]
)
def test_one_process_and_two_lose_the_same(
    name: str, more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(name, ["--steps", "6"], monkeypatch)
    alone = losses(capsys.readouterr().out)
    done = launch([*more, "--steps", "6"], ranks=2, script=EXAMPLES / name)
    assert done.returncode == 0, done.stderr
    assert len(alone) == 6 and alone[-1] < alone[0]
    assert losses(done.stdout) == pytest.approx(alone, abs=2e-5)


def test_data_parallel_in_a_group_of_mp_spawn_and_under_torchrun() -> None:
    """Without torchrun the program starts its two processes with mp.spawn."""
    spawned = launch(["--epochs", "2"], script=EXAMPLES / "ddp_any_model.py")
    torchrun = launch(["--epochs", "2"], ranks=2, script=EXAMPLES / "ddp_any_model.py")
    assert spawned.returncode == torchrun.returncode == 0, spawned.stderr + torchrun.stderr
    found = losses(spawned.stdout)
    assert found == losses(torchrun.stdout) and len(found) == 2 and found[1] < found[0] / 2


def test_the_commands_of_the_docstrings_are_those_that_are_run() -> None:
    for name in ("zero_any_model.py", "ddp_any_model.py", "sharded_optimizer.py"):
        text = (EXAMPLES / name).read_text(encoding="utf-8")
        assert f"    python examples/{name}" in text
        assert re.search(rf"    torchrun --standalone --nproc_per_node 2 examples/{name}", text)


# as written

MODEL = """
import torch
from torch import nn
from torch.optim import AdamW

class SimpleModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(10, 10)
    def forward(self, x):
        return self.linear(x)

model = SimpleModel()
optimizer = AdamW(model.parameters(), lr=0.001)
"""

ZERO = f"""{MODEL}
from megatron.compat import initialize

config = {{
    "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4,
    "optimizer": {{"type": "AdamW", "params": {{"lr": 0.001}}}},
    "zero_optimization": {{
        "stage": STAGE,
        "offload_optimizer": {{"device": "cpu", "pin_memory": True}},
        "offload_param": {{"device": "cpu", "pin_memory": True}},
    }},
    "fp16": {{"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 32, "hysteresis": 2,
             "min_loss_scale": 1}},
}}
engine, optimizer, _, _ = initialize(
    model=model, optimizer=optimizer, model_parameters=model.parameters(), config_params=config
)
for step in range(10):
    inputs, labels = torch.randn(4, 10), torch.randn(4, 10)   # fp32, and never moved
    loss = nn.functional.mse_loss(engine(inputs), labels)
    engine.backward(loss)
    engine.step()
"""

STAGES = (0, 1, 2, 3)


def run_text(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(compile(text, "article.py", "exec"), found)
    return found


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the article's labels stay on the CPU, its outputs do not")
@pytest.mark.parametrize("stage", STAGES)
def test_the_program_on_zero(stage: int, capsys: pytest.CaptureFixture[str]) -> None:
    engine = run_text(ZERO.replace("STAGE", str(stage)))["engine"]
    said = capsys.readouterr().out
    assert engine.micro_steps == 10 and engine.global_steps == 2, "four micro-batches make an update"
    assert "train_batch_size 16 = 4 samples x 4 accumulation steps x 1 rank" in said
    assert "optimizer.type AdamW: no effect, because optimizer= is given and is used" in said
    idle = "zero_optimization.offload_param.device cpu: has no effect without stage 3 of ZeRO"
    assert (idle in said) == (stage < 3) and ("offload_param: no effect on a CPU" in said) == (stage == 3)
    assert "offload_optimizer: no effect on a CPU" in said
    assert "begins at 2^32; about 17 updates are skipped until it is 2^16" in said and "3 updates in a row" not in said
    assert engine.skipped_steps == 2 and said.count("a gradient overflows at the loss scale") == 2, "2^32 is too much"


def test_three_skipped_updates_in_a_row_have_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The article's program continues; the line counts the halvings that follow."""
    engine = run_text(ZERO.replace("STAGE", "0").replace("range(10)", "range(100)"))["engine"]
    said = capsys.readouterr().out
    line = "3 updates in a row were skipped: the loss scale is 2^30; about 14 more halvings are"
    assert said.count("updates in a row") == said.count(line) == 1
    assert 'to begin there, set "initial_scale_power": 16 in fp16' in said
    assert said.index("step 3 is skipped") < said.index(line) < said.index("step 4 is skipped")
    assert engine.global_steps == 25 and 2.0**10 < engine.cur_scale < 2.0**20, "near 2^16, where the line says"


def test_its_json_file(tmp_path: Path) -> None:
    """The JSON's scheduler lacks the one parameter without a default."""
    file = tmp_path / "ds_config.json"
    file.write_text(
        """{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4,
 "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
 "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
 "zero_optimization": {"stage": 2,
   "offload_optimizer": {"device": "cpu", "pin_memory": true},
   "offload_param": {"device": "cpu", "pin_memory": true}},
 "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 32, "hysteresis": 2,
          "min_loss_scale": 1},
 "gradient_clipping": 1.0, "steps_per_print": 10}"""
    )
    call = f"{MODEL}\nfrom megatron.compat import initialize\nengine = initialize(model=model, config={str(file)!r})[0]"
    with pytest.raises(
        ConfigError, match=r'needs total_num_steps, .* add "total_num_steps" to scheduler.params'
    ) as error:
        run_text(call)
    assert str(file) in str(error.value) and "\\n" not in str(error.value)
    file.write_text(file.read_text().replace('"warmup_num_steps"', '"total_num_steps": 2000, "warmup_num_steps"'))
    assert run_text(call)["engine"].get_lr() == [0.0]


FAIRSCALE = f"{MODEL}\nfrom megatron.compat import OSS, ShardedDataParallel as ShardedDDP\n"
MISTAKES = {
    "sharded before OSS": ("model = ShardedDDP(model, optimizer)", "AdamW is not an OSS; make one first"),
    "an optimizer instance": ("OSS(optimizer, local_rank=0)", r"give the parameters, and the optimizer's class"),
    "an instance for a class": ("OSS(model.parameters(), optim=optimizer)", r"optim is an instance \(AdamW\)"),
    "no process group": ("OSS(model.parameters(), optim=AdamW, lr=0.001)", "call torch.distributed.init_process_group"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_program_on_fairscale(name: str) -> None:
    line, said = MISTAKES[name]
    with pytest.raises(ConfigError, match=said) as error:
        run_text(FAIRSCALE + line)
    assert "\n" not in str(error.value)


def test_a_mistake_in_a_program_of_ones_own_is_one_line(tmp_path: Path) -> None:
    """FairScale's wrappers in the wrong order: the error shows the program's line and no traceback."""
    program = tmp_path / "article.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(REPOSITORY)!r})\n{FAIRSCALE}{MISTAKES['sharded before OSS'][0]}"
    )
    done = launch([], script=program)
    number = len(program.read_text().splitlines())
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(
        f"error: article.py:{number}: ShardedDataParallel: AdamW is not an OSS; make one first"
    )
