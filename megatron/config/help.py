"""The help of the training command: a first screen, and every setting by section or by a word."""

from pathlib import Path

from megatron.config.flag import Setting
from megatron.config.megatron_lm_flags import compat_flags, retired_flags
from megatron.config.presets import PRESETS
from megatron.config.run import SECTIONS, all_settings
from megatron.config.values import show
from megatron.utils.help import Help, HelpEntry, more

_FIRST = """\
Trains a GPT or a Llama-style model; flags are spelled as in Megatron-LM.
This command runs without changes, on a CPU too:

  {command} \\
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 \\
    --max-position-embeddings 128 --micro-batch-size 4 --train-iters 20 \\
    --lr 1e-3 --mock-data --vocab-size 1024 --eval-iters 0

Flags that every run needs:
  --num-layers, --hidden-size, --num-attention-heads
                            the shape; or --model NAME, such as {preset}
  --seq-length N, --max-position-embeddings N
                            tokens of a sample; positions of the model
  --micro-batch-size N, --global-batch-size N
                            samples per rank and pass; samples per step
  --train-iters N, --lr X   steps; the peak learning rate
  --data-path PREFIX        output of preprocess_data.py; or --mock-data
  --vocab-file, --merge-file; or --tokenizer-type, --tokenizer-model
  --save DIR, --load DIR    checkpoints; use one folder for both to resume
  --bf16                    bfloat16 instead of float32
  --tensor-model-parallel-size N, --pipeline-model-parallel-size N
                            ranks that split each layer; pipeline stages
  --dry-run                 checks everything and prints the plan

"""
_SWITCHES = """\
A switch that a preset or a file turned on is turned off with --switch=false."""


def train_help(program: str) -> Help:
    """Returns the help. `program`: the script that was started, as in sys.argv[0]."""
    name = Path(program).name
    is_script = name.endswith(".py") and name != "train.py"
    short = name if is_script else "megatron-train"
    command = f"torchrun --nproc_per_node 2 {name if is_script else '-m megatron.cli.train'}"
    first = _FIRST.format(command=command, preset=next(iter(PRESETS))) + more(short, SECTIONS)
    return Help(first, (*map(_entry, all_settings()), *_known_by_name()), _SWITCHES)


def _entry(setting: Setting) -> HelpEntry:
    flag, marks = setting.flag, list[str]()
    if flag.status in ("later", "never"):
        marks = [f"[not supported{' yet' if flag.status == 'later' else ''}: {flag.note}]"]
    elif flag.status == "no-op":
        marks = [f"[no-op: {flag.note}]"]
    elif flag.required:
        marks = ["[required]"]
    elif setting.has_default:
        marks = [f"[default: {show(setting.default)}]"]
    values = "{" + ",".join(map(str, flag.choices)) + "}" if flag.choices else setting.base.__name__.upper()
    more_values = " ..." if flag.nargs == "+" else ""
    value = "" if setting.is_switch else values + more_values
    return HelpEntry(setting.section, setting.spellings, value, " ".join([flag.help, *marks]))


def _known_by_name() -> list[HelpEntry]:
    """Returns help entries for Megatron's flags that are not settings of this package."""
    rows = [HelpEntry("retired", (flag.spelling,), "", flag.note) for flag in retired_flags().values()]
    for name, flag in sorted(compat_flags().items()):
        status = {"later": "not supported yet", "never": "not supported"}.get(flag.status, flag.status)
        rows.append(HelpEntry("known by name", (name,), "", f"[{status}: {flag.note}]"))
    return rows
