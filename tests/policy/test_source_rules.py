"""Every rule holds in the tree, and fails on a planted violation."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.policy import rules
from tests.policy.measure import Source, defined_twice, in_spine, most_members, sources

Rule = Callable[[str, str], list[str]]


@pytest.fixture(autouse=True, scope="module")
def _parsed_files() -> Iterator[None]:
    """Keeps the files' nodes for the tests of this file only: they take much memory."""
    yield
    rules.nodes_of.cache_clear()


def tree_violations(rule: Rule, files: list[Path]) -> list[str]:
    assert files, "the rule was given no files: it would pass by doing nothing"
    found = []
    for path in files:
        found += rule(path.read_text(encoding="utf-8"), path.relative_to(rules.ROOT).as_posix())
    return found


def package() -> list[Path]:
    return rules.repository_files(".py", under="megatron/")


def scripts() -> list[Path]:
    return [*rules.repository_files(".py", under="tools/"), *rules.repository_files(".py", under="benchmarks/")]


def all_tests() -> list[Path]:
    return rules.repository_files(".py", under="tests/")


def texts() -> list[Path]:
    suffixes = (".py", ".sh", ".md", ".toml", ".txt", ".yaml", ".yml", ".c", ".cpp", ".cu", ".h", ".cfg")
    return rules.repository_files(*suffixes)


HOLDS: list[tuple[Rule, Callable[[], list[Path]]]] = [
    (rules.upward_imports, package),
    (rules.upward_imports_of_scripts, scripts),
    (rules.imports_of_nothing, lambda: rules.repository_files(".py")),
    (rules.global_statements, rules.shipped_python),
    (rules.environment_reads, rules.shipped_python),
    (rules.unsafe_loading, rules.shipped_python),
    (rules.pickles_between_ranks, rules.shipped_python),
    (rules.cuda_by_name, package),
    (rules.machine_paths, lambda: [path for path in texts() if "policy" not in path.parts]),
    (rules.leftovers, lambda: [path for path in texts() if "policy" not in path.parts]),
    (rules.missing_pages, lambda: [path for path in texts() if "policy" not in path.parts]),
    (rules.foreign_packages, lambda: [path for path in texts() if "policy" not in path.parts]),
    (rules.unexplained_skips, all_tests),
]


@pytest.mark.parametrize(("rule", "files"), HOLDS, ids=[rule.__name__ for rule, _ in HOLDS])
def test_the_tree_keeps_the_rule(rule: Rule, files: Callable[[], list[Path]]) -> None:
    found = tree_violations(rule, files())
    assert not found, "\n".join(found)


PLANTED: list[tuple[Rule, str, str]] = [
    (rules.upward_imports, "megatron/model/gpt.py", "from megatron.engine import Engine"),
    (rules.upward_imports, "megatron/model/gpt.py", "from megatron import data"),
    (rules.upward_imports, "megatron/model/gpt.py", "from ..tokenizer import build_tokenizer"),
    (rules.upward_imports, "megatron/model/gpt.py", "def lazily():\n    import megatron.checkpoint.save"),
    (rules.upward_imports, "megatron/model/gpt.py", "import importlib\nimportlib.import_module('megatron.training')"),
    (rules.upward_imports, "megatron/ops/__init__.py", "from ..config import run"),
    (rules.upward_imports, "megatron/utils/logging.py", "import tools.generate"),
    (
        rules.upward_imports,
        "megatron/training/settings.py",
        "def f():\n    from megatron.interop.hf import open_folder",
    ),
    (rules.upward_imports, "megatron/optimizer/optimizer.py", "from megatron.compat.client_update import ClientUpdate"),
    (rules.upward_imports, "megatron/inference/run.py", "if TYPE_CHECKING:\n    import megatron.cli.generate"),
    (rules.upward_imports, "megatron/engine/assembly.py", "import_module('megatron.pretrain')"),
    (rules.upward_imports, "megatron/report/results.py", "from megatron.prove.order import waits"),
    (rules.upward_imports, "megatron/newcomer/part.py", "x = 1"),
    (rules.upward_imports_of_scripts, "tools/a.py", "from tests.helpers import distributed"),
    (rules.upward_imports_of_scripts, "benchmarks/a.py", "def lazily():\n    import tests.helpers"),
    (rules.upward_imports_of_scripts, "benchmarks/a.py", "from tools.generate import main"),
    (rules.imports_of_nothing, "megatron/model/gpt.py", "def lazily():\n    from megatron.model.gone import GPT"),
    (rules.imports_of_nothing, "megatron/model/gpt.py", "from .gone import GPT"),
    (rules.imports_of_nothing, "tests/a.py", "import megatron.gone.module"),
    (rules.global_statements, "megatron/a.py", "x = 1\ndef f():\n    global x\n    x = 2"),
    (rules.environment_reads, "megatron/model/gpt.py", "import os\nfast = os.environ['FAST']"),
    (rules.environment_reads, "tools/generate.py", "import os\nfast = os.getenv('FAST')"),
    (rules.environment_reads, "megatron/model/gpt.py", "from os import environ"),
    (rules.environment_reads, "megatron/model/gpt.py", "import os\nos.environ['TOKENIZERS_PARALLELISM'] = 'false'"),
    (rules.environment_reads, "megatron/utils/pool.py", "import os\nfast = os.environ['TOKENIZERS_PARALLELISM']"),
    (rules.environment_reads, "megatron/distributed/rendezvous.py", "import os\nos.environ.setdefault('FAST', '1')"),
    (
        rules.environment_reads,
        "megatron/distributed/rendezvous.py",
        "import os\nx = os.environ.setdefault('GLOO_SOCKET_IFNAME', '')",
    ),
    (rules.unsafe_loading, "megatron/a.py", "import pickle"),
    (rules.unsafe_loading, "megatron/a.py", "from multiprocessing import x\nfrom pickle import loads"),
    (rules.unsafe_loading, "megatron/a.py", "torch.load(path)"),
    (rules.unsafe_loading, "megatron/a.py", "torch.load(path, weights_only=False)"),
    (rules.unsafe_loading, "megatron/a.py", "torch.load(path, weights_only=trusted)"),
    (rules.unsafe_loading, "megatron/a.py", "np.load(path, allow_pickle=True)"),
    (rules.unsafe_loading, "megatron/a.py", "yaml.load(text, Loader=yaml.Loader)"),
    (rules.unsafe_loading, "megatron/a.py", "eval(text)"),
    (rules.unsafe_loading, "megatron/a.py", "exec(text)"),
    (rules.unsafe_loading, "megatron/a.py", "AutoModel.from_pretrained(path, trust_remote_code=True)"),
    (rules.unsafe_loading, "megatron/a.py", "subprocess.run(text, shell=True)"),
    (rules.pickles_between_ranks, "megatron/a.py", "dist.all_gather_object(found, value, group)"),
    (rules.pickles_between_ranks, "tools/a.py", "torch.distributed.broadcast_object_list(box, 0)"),
    (rules.pickles_between_ranks, "megatron/a.py", "from torch.distributed import gather_object as collect"),
    (rules.pickles_between_ranks, "megatron/a.py", "send = getattr(dist, 'send_object_list')"),
    (rules.cuda_by_name, "megatron/model/gpt.py", "x = y.cuda()"),
    (rules.cuda_by_name, "megatron/model/gpt.py", "torch.cuda.synchronize()"),
    (rules.cuda_by_name, "megatron/model/gpt.py", "from torch.cuda import amp"),
    (rules.machine_paths, "README.md", "see /home/somebody/notes"),
    (rules.leftovers, "megatron/a.py", "# " + "TO" + "DO: finish this"),
    (rules.missing_pages, "megatron/a.py", "say('no-op: it is always there (docs/gone.md)')"),
    (rules.foreign_packages, "README.md", "pip install 'megatron[data]'"),
    (rules.foreign_packages, "pyproject.toml", 'name = "megatron"'),
    (rules.unexplained_skips, "tests/a.py", "@pytest.mark.skip\ndef test_a(): ..."),
    (rules.unexplained_skips, "tests/a.py", "@pytest.mark.skipif(True)\ndef test_a(): ..."),
    (rules.unexplained_skips, "tests/a.py", "@pytest.mark.flaky(reruns=3)\ndef test_a(): ..."),
    (rules.unexplained_skips, "tests/a.py", "def test_a():\n    pytest.skip()"),
]


@pytest.mark.parametrize(("rule", "path", "source"), PLANTED)
def test_the_rule_finds_a_planted_violation(rule: Rule, path: str, source: str) -> None:
    assert rule(source, path)


ALLOWED: list[tuple[Rule, str, str]] = [
    (rules.upward_imports, "megatron/model/gpt.py", "from megatron.ops import Kernels\nfrom .block import Block"),
    (rules.upward_imports, "megatron/layout.py", "from megatron.errors import ConfigError"),
    (rules.upward_imports_of_scripts, "tools/a.py", "import megatron\nfrom benchmarks import gpu_peers"),
    (
        rules.upward_imports_of_scripts,
        "benchmarks/a.py",
        "from benchmarks.parts.turns import Turn\nimport megatron.data",
    ),
    (rules.environment_reads, rules.ENVIRONMENT_READERS[0], "import os\nrank = os.environ['RANK']"),
    (
        rules.environment_reads,
        "megatron/utils/pool.py",
        "import os\nos.environ['TOKENIZERS_PARALLELISM'] = 'false'",
    ),
    (
        rules.environment_reads,
        "megatron/distributed/rendezvous.py",
        "import os\nos.environ.setdefault('GLOO_SOCKET_IFNAME', '')",
    ),
    (rules.unsafe_loading, "megatron/a.py", "torch.load(path, weights_only=True)\nyaml.safe_load(text)\nmodel.eval()"),
    (rules.cuda_by_name, "megatron/utils/device.py", "torch.cuda.memory_allocated()"),
    (rules.unexplained_skips, "tests/a.py", "@pytest.mark.skipif(True, reason='no GPU')\ndef test_a(): ..."),
    (rules.unexplained_skips, "tests/a.py", "def test_a():\n    pytest.skip('no GPU')"),
    (rules.machine_paths, "README.md", "files in /usr/local/lib, https://example.org/data/x, ./data/x, run/data/x"),
]


@pytest.mark.parametrize(("rule", "path", "source"), ALLOWED)
def test_the_rule_lets_good_code_pass(rule: Rule, path: str, source: str) -> None:
    assert rule(source, path) == []


def test_megatron_is_a_namespace_that_others_have_parts_of() -> None:
    found = [
        line for path in package() for line in rules.shadows_other_distributions(str(path.relative_to(rules.ROOT)))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "path", ["megatron/__init__.py", "megatron/core/a.py", "megatron/bridge/__init__.py", "megatron/rl.py"]
)
def test_a_part_that_hides_another_distribution_is_found(path: str) -> None:
    assert rules.shadows_other_distributions(path)
    assert rules.shadows_other_distributions("megatron/model/core.py") == []


def test_no_modules_import_each_other() -> None:
    paths = [*package(), *scripts()]
    assert (
        rules.import_cycle({path.relative_to(rules.ROOT).as_posix(): path.read_text("utf-8") for path in paths}) == []
    )


CYCLES = {
    "top level": {"megatron/a.py": "import megatron.b", "megatron/b.py": "from megatron.a import name"},
    "inside a function": {
        "megatron/a.py": "from megatron import b",
        "megatron/b.py": "def f():\n    from megatron.c import x",
        "megatron/c.py": "from . import a",
    },
    "for types": {
        "megatron/a/__init__.py": "from megatron.a.b import B",
        "megatron/a/b.py": "if TYPE_CHECKING:\n    from megatron.a import C",
    },
}


@pytest.mark.parametrize("sources", CYCLES.values(), ids=CYCLES)
def test_a_planted_cycle_is_found(sources: dict[str, str]) -> None:
    assert set(rules.import_cycle(sources)) >= {"megatron.a"}


def test_a_package_that_offers_its_modules_is_no_cycle() -> None:
    sources = {
        "megatron/a/__init__.py": "from megatron.a.b import B",
        "megatron/a/b.py": "from megatron.a import c",
        "megatron/a/c.py": "import os",
    }
    assert rules.import_cycle(sources) == []


# At most ten names that two modules may define, each with its reason.
SHARED_NAMES = {
    "read": "always read with its module: manifest.read, share.read",
    "encode": "always read with its module: manifest.encode, share.encode",
    "decode": "always read with its module: manifest.decode, share.decode",
}


def test_no_name_stands_for_two_things() -> None:
    assert len(SHARED_NAMES) <= 10
    twice = defined_twice(sources(rules.ROOT))
    assert set(twice) == set(SHARED_NAMES), "\n".join(f"{name}: {where}" for name, where in twice.items())


def test_a_second_definition_is_found() -> None:
    texts = {
        "a.py": "class Row: ...\ndef main(): ...\ndef _f(): ...",
        "b.py": "def Row(): ...\ndef main(): ...\ndef _f(): ...",
    }
    assert defined_twice([Source(path, text, ast.parse(text)) for path, text in texts.items()]) == {
        "Row": ["a.py", "b.py"]
    }


LONGEST_FILE, LONGEST_FUNCTION = 400, 60
# Closed lists: nothing is added; whoever shortens one takes it out.
LONG_FILES = {"csrc/build.py"}  # one program that imports nothing of ours
LONG_FUNCTIONS: set[str] = set()


def test_files_and_functions_stay_small() -> None:
    files, functions = {}, {}
    for path in rules.shipped_python():
        name, source = path.relative_to(rules.ROOT).as_posix(), path.read_text(encoding="utf-8")
        files[name] = len(source.splitlines())
        functions |= dict(rules.function_sizes(source, name))
    long_files = {name for name, lines in files.items() if lines > LONGEST_FILE}
    long_functions = {name for name, lines in functions.items() if lines > LONGEST_FUNCTION}
    assert long_files == LONG_FILES
    assert long_functions == LONG_FUNCTIONS


def test_a_long_function_is_seen() -> None:
    source = "class A:\n    def f(self):\n" + "        x = 1\n" * LONGEST_FUNCTION
    assert rules.function_sizes(source, "a.py") == [("a.py::f", LONGEST_FUNCTION + 1)]


def test_no_class_of_the_spine_has_many_members() -> None:
    assert most_members([source for source in sources(rules.ROOT) if in_spine(source)]) <= (15, "z")
    planted = "class A:\n" + "".join(f"    f{number}: int\n" for number in range(16)) + "    def _g(self): ..."
    assert most_members([Source("a.py", planted, ast.parse(planted))]) == (16, "a.py:A")


def test_every_test_folder_mirrors_a_part() -> None:
    folders = {path.relative_to(rules.ROOT).parts[2] for path in rules.repository_files(".py", under="tests/unit/")}
    parts = {name for name in folders if not name.endswith(".py")}
    assert parts <= set(rules.LEVELS) | {"tools", "benchmarks"}, f"tests/unit mirrors megatron/: {parts}"


def test_shell_scripts_stop_at_the_first_failure() -> None:
    scripts = [*rules.repository_files(".sh"), *rules.repository_files(".sbatch"), rules.ROOT / ".ci" / "run"]
    sourced = {"examples/setup.sh", "examples/launch.sh", "examples/slurm/train.sh"}
    sourced |= {"examples/gpt2_8p/test/recipe.sh"}
    for path in scripts:
        name = path.relative_to(rules.ROOT).as_posix()
        if name not in sourced:
            assert "set -euo pipefail" in path.read_text(encoding="utf-8"), f"{name} does not say set -euo pipefail"


def test_the_rules_parse_what_they_are_given() -> None:
    with pytest.raises(SyntaxError):
        ast.parse("def f(:")  # a file that does not parse fails the run; it is not passed over
