"""The project's policies as functions from source text to violations, so that each can be tested with a planted one."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# DESIGN: imports point down, never to a sibling of the same level. errors.py and version.py are below everything.
LEVELS = {
    "commands": -2,
    **dict.fromkeys(["errors", "version"], -1),
    **dict.fromkeys(["layout", "pipeline_schedules", "tokenizer_types", "utils"], 0),
    **dict.fromkeys(["config", "ops", "state", "torch_files"], 1),
    **dict.fromkeys(["distributed", "model", "tokenizer", "data"], 2),
    **dict.fromkeys(
        ["preprocess", "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel", "data_parallel"],
        3,
    ),
    **dict.fromkeys(["parallelize", "optimizer", "checkpoint"], 4),
    "engine": 5,
    "training": 6,
    "inference": 7,
    "evaluation": 8,
    # Packages around the core: each imports the core, but the core imports none of them.
    **dict.fromkeys(["interop", "prove", "report"], 9),
    "compat": 10,
    "pretrain": 11,
    "cli": 12,
}
# Parts that other distributions have in the namespace `megatron`: NVIDIA's megatron-core, megatron-bridge and
# megatron-energon, and the rest of a Megatron-LM checkout.
PARTS_OF_OTHERS = {"core", "bridge", "energon", "legacy", "post_training", "rl"}
ABOVE_THE_PACKAGE = {"tools", "tests", "benchmarks", "examples", "pretrain_gpt"}
# What stands above the package, in its own order: each may import what comes before it.
ABOVE_IN_ORDER = ("benchmarks", "tools", "tests")
# The launcher's variables, which compiler builds the kernels, and whether the user says how threads wait.
ENVIRONMENT_READERS = ("megatron/distributed/launch.py", "csrc/build.py", "megatron/utils/waiting.py")
# A closed list: libraries that can only be configured by a variable of the process. The project reads none of them.
ENVIRONMENT_WRITERS = {
    "benchmarks/train_step.py": "ONEDNN_MAX_CPU_ISA",  # for the processes of the contenders
    "megatron/interop/hf/auto_tokenizer.py": "HF_HUB_OFFLINE",
    "megatron/utils/loading.py": "TORCH_CPP_LOG_LEVEL",
    "megatron/utils/pool.py": "TOKENIZERS_PARALLELISM",
    "megatron/distributed/rendezvous.py": "GLOO_SOCKET_IFNAME",
    "megatron/distributed/flight_recorder.py": "TORCH_FR_BUFFER_SIZE",
}
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
OBJECT_COLLECTIVES = re.compile(r"\w*(_object|_object_list|_object_to_tensor|_tensor_to_object)|rpc_(a?sync)|init_rpc")
YAML_LOADERS = {"load", "load_all", "unsafe_load", "unsafe_load_all", "full_load", "full_load_all"}


def repository_files(*suffixes: str, under: str = "") -> list[Path]:
    """Files of the checkout: tracked or untracked but not ignored by git; in a copy without git, all."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        hidden = re.compile(r"(^|/)(\.venv|\.git|build|quickstart|__pycache__|\.[a-z]+_cache)/")
        paths = [path for path in ROOT.rglob("*") if not hidden.search(path.relative_to(ROOT).as_posix())]
    chosen = (path for path in paths if path.is_file() and path.relative_to(ROOT).as_posix().startswith(under))
    return sorted(path for path in chosen if not suffixes or path.suffix in suffixes)


def shipped_python() -> list[Path]:
    """Python files that users run: the package, the tools, the entry points; not the tests."""
    return [path for path in repository_files(".py") if not path.relative_to(ROOT).as_posix().startswith("tests/")]


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """Returns the syntax nodes of a file. A file is parsed once for all rules."""
    return tuple(ast.walk(ast.parse(source)))


def dotted(node: ast.AST) -> str:
    """`torch.cuda.is_available` as text; '' for anything except a chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((item.value for item in call.keywords if item.arg == name), None)


def is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


# ---------------------------------------------------------------- imports


def imported_modules(nodes: Iterable[ast.AST], module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import, including those inside functions and under TYPE_CHECKING."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{name}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func).endswith("import_module"):
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            yield from ((node.lineno, name) for name in names)


def upward_imports(source: str, path: str) -> list[str]:
    """Imports of higher packages; `path` is megatron/<part>/... relative to the checkout."""
    parts = Path(path).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    module = ".".join(parts[:-1] if is_package else parts)
    own = parts[1] if len(parts) > 1 else ""
    if own not in LEVELS:
        return [f"{path}: megatron.{own} has no level in tests/policy/rules.py"]
    found = []
    for line, name in imported_modules(nodes_of(source), module, is_package):
        top, _, rest = name.partition(".")
        if top in ABOVE_THE_PACKAGE:
            found.append(f"{path}:{line}: the package imports {name}, which stands above it")
        if top != "megatron":
            continue
        other = rest.split(".")[0]
        if other not in LEVELS:
            found.append(f"{path}:{line}: imports {name}, which is no part with a level")
        elif other != own and LEVELS[other] >= LEVELS[own]:
            where = "a sibling" if LEVELS[other] == LEVELS[own] else "above it"
            found.append(f"{path}:{line}: megatron.{own} imports {name}, {where}")
    return found


def shadows_other_distributions(path: str) -> list[str]:
    """Files that would hide other distributions' packages in the namespace `megatron`, or be hidden by them."""
    parts = Path(path).with_suffix("").parts
    if parts[0] != "megatron" or not (parts[1] == "__init__" or parts[1] in PARTS_OF_OTHERS):
        return []
    return [f"{path}: megatron is a namespace package, in which {parts[1]} is not ours to have"]


def upward_imports_of_scripts(source: str, path: str) -> list[str]:
    """Tools may import benchmarks and the package, benchmarks the package; neither imports the tests."""
    own = Path(path).parts[0]
    above = ABOVE_IN_ORDER[ABOVE_IN_ORDER.index(own) + 1 :]
    names = imported_modules(nodes_of(source), ".".join(Path(path).with_suffix("").parts), is_package=False)
    return [f"{path}:{line}: {own} imports {name}, above it" for line, name in names if name.split(".")[0] in above]


def import_cycle(sources: Mapping[str, str]) -> list[str]:
    """Modules that import each other in a ring ([] without one), given {path: source}.

    Imports inside functions and under TYPE_CHECKING count as well. `from package import module` is an import of the
    module, not of the package.
    """
    modules = {}
    for path in sources:
        parts = Path(path).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        modules[".".join(parts[:-1] if is_package else parts)] = (path, is_package)
    graph: dict[str, set[str]] = {}
    for module, (path, is_package) in modules.items():
        imported = imported_modules(nodes_of(sources[path]), module, is_package)
        graph[module] = {known_module(name, modules) for _, name in imported} - {module, ""}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def known_module(name: str, modules: Mapping[str, object]) -> str:
    """Module that contains `name`; '' if none of these does."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def imports_of_nothing(source: str, path: str) -> list[str]:
    """Imports of project modules that do not exist. The type checker skips them, and a lazy one fails only when it
    runs."""
    parts = Path(path).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    found = imported_modules(nodes_of(source), ".".join(parts[:-1] if is_package else parts), is_package)
    ours = [(line, name) for line, name in found if name.split(".")[0] in {"megatron", "tests", "tools", "benchmarks"}]
    return [f"{path}:{line}: there is no module {name}" for line, name in ours if not _exists(name)]


def _exists(name: str) -> bool:
    """True for a module, or for a name that the module before the last dot may define."""

    def is_module(dotted_name: str) -> bool:
        place = ROOT.joinpath(*dotted_name.split("."))
        return place.is_dir() or place.with_suffix(".py").is_file()

    return is_module(name) or is_module(name.rpartition(".")[0])


# ---------------------------------------------------------------- what no file does


def global_statements(source: str, path: str) -> list[str]:
    return [f"{path}:{node.lineno}: global" for node in nodes_of(source) if isinstance(node, ast.Global)]


def environment_reads(source: str, path: str) -> list[str]:
    if path in ENVIRONMENT_READERS:
        return []
    found = []
    nodes = nodes_of(source)
    allowed = {
        id(environment)
        for node in nodes
        for environment, variable in variables_set(node)
        if isinstance(variable, ast.Constant) and variable.value == ENVIRONMENT_WRITERS.get(path)
    }
    for node in nodes:
        name = dotted(node) if isinstance(node, ast.Attribute) and id(node) not in allowed else ""
        if re.fullmatch(r"os\.(environ|environb|getenv|getenvb|putenv|unsetenv)", name):
            found.append(f"{path}:{node.lineno}: {name}")
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names} & {"environ", "environb", "getenv", "putenv"}
            found += [f"{path}:{node.lineno}: from os import {name}" for name in sorted(names)]
    return found


def variables_set(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Names set by `os.environ[name] = value` and by a bare `os.environ.setdefault(name, value)`, with `os.environ`."""
    for target in node.targets if isinstance(node, ast.Assign) else []:
        if isinstance(target, ast.Subscript):
            yield target.value, target.slice
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = node.value.func
        if isinstance(called, ast.Attribute) and called.attr == "setdefault":
            yield called.value, node.value.args[0]


def unsafe_loading(source: str, path: str) -> list[str]:
    """Calls that could run code found in a file."""
    found = []
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] in PICKLES]
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PICKLES:
            found.append((node.lineno, node.module))
        elif isinstance(node, ast.Call):
            found += [(node.lineno, what) for what in unsafe_call(node)]
    return [f"{path}:{line}: {what}" for line, what in found]


def pickles_between_ranks(source: str, path: str) -> list[str]:
    """Uses of torch's object collectives, which unpickle what arrives; `megatron.distributed.messages` sends JSON."""
    found = []
    for node in nodes_of(source):
        named = [(node.lineno, alias.name) for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.Attribute | ast.Name):
            named.append((node.lineno, dotted(node)))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):  # getattr(dist, "...")
            named.append((node.lineno, node.value))
        found += [(line, name) for line, name in named if OBJECT_COLLECTIVES.fullmatch(name.rpartition(".")[2])]
    return [f"{path}:{line}: {name}" for line, name in found]


def unsafe_call(call: ast.Call) -> Iterator[str]:
    name = dotted(call.func)
    last = name.rpartition(".")[2]
    if name in {"eval", "exec", "compile", "__import__"}:
        yield name
    if name in {"torch.load", "torch.serialization.load"} and not is_constant(keyword(call, "weights_only"), True):
        yield "torch.load without weights_only=True"
    if last in {"load", "memmap", "fromfile"} and name.startswith(("np.", "numpy.")):
        allow = keyword(call, "allow_pickle")
        if allow is not None and not is_constant(allow, False):
            yield "numpy load with allow_pickle"
    if name.startswith("yaml.") and last in YAML_LOADERS:
        yield f"{name} (yaml.safe_load is the safe one)"
    if keyword(call, "trust_remote_code") is not None and not is_constant(keyword(call, "trust_remote_code"), False):
        yield "trust_remote_code"
    if is_constant(keyword(call, "shell"), True):
        yield "a shell command"


def cuda_by_name(source: str, path: str) -> list[str]:
    """Uses of one vendor's device module outside utils/ and ops/; a plug-in accelerator is only a device name."""
    if path.startswith(("megatron/utils/", "megatron/ops/")):
        return []
    found = []
    for node in nodes_of(source):
        if isinstance(node, ast.Attribute) and dotted(node.value) == "torch" and node.attr == "cuda":
            found.append(f"{path}:{node.lineno}: torch.cuda")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            found.append(f"{path}:{node.lineno}: .cuda(")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.cuda"):
            found.append(f"{path}:{node.lineno}: from torch.cuda")
    return found


# ---------------------------------------------------------------- texts and sizes

MACHINE_PATH = re.compile(r"(?<![\w.:/$}*-])/(?:home|root|work|mnt|opt|Users|tmp)/[\w.-]+")
PAGE = re.compile(r"(?<![\w/.])docs/[\w/-]+\.md")
FOREIGN_PACKAGE = re.compile(r"""(pip install\b.*[\s'"]megatron(?![-\w./])|^name = ["']megatron["'])""")
LEFTOVER = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b")


def machine_paths(text: str, path: str) -> list[str]:
    """Absolute paths of the author's machine."""
    lines = enumerate(text.splitlines(), start=1)
    return [f"{path}:{number}: {found.group()}" for number, line in lines for found in MACHINE_PATH.finditer(line)]


def leftovers(text: str, path: str) -> list[str]:
    lines = enumerate(text.splitlines(), start=1)
    return [f"{path}:{number}: {line.strip()[:80]}" for number, line in lines if LEFTOVER.search(line)]


def missing_pages(text: str, path: str) -> list[str]:
    """References in messages, comments and pages to pages that do not exist."""
    lines = enumerate(text.splitlines(), start=1)
    named = ((number, found.group()) for number, line in lines for found in PAGE.finditer(line))
    return [f"{path}:{number}: {page} is not there" for number, page in named if not (ROOT / page).is_file()]


def foreign_packages(text: str, path: str) -> list[str]:
    """Installations of the public index's package megatron, which is another project."""
    lines = enumerate(text.splitlines(), start=1)
    return [f"{path}:{number}: {line.strip()[:80]}" for number, line in lines if FOREIGN_PACKAGE.search(line)]


def function_sizes(source: str, path: str) -> list[tuple[str, int]]:
    """(path::name, lines) of every function, without decorators."""
    functions = [n for n in nodes_of(source) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [(f"{path}::{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1) for node in functions]


def unexplained_skips(source: str, path: str) -> list[str]:
    """Skips without a reason, and reruns until a test passes."""
    nodes = nodes_of(source)
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    found = []
    for node in nodes:
        call = node if isinstance(node, ast.Call) else None
        name = dotted(call.func if call else node)
        if id(node) in called or not re.search(
            r"(^|\.)(mark\.(skip|skipif|xfail|flaky)|pytest\.(skip|xfail))$", f".{name}"
        ):
            continue
        reason = call is not None and (
            keyword(call, "reason") is not None or (bool(call.args) and "skipif" not in name)
        )
        if name.endswith("flaky") or (not reason and (call is not None or ".mark." in name)):
            found.append(f"{path}:{getattr(node, 'lineno', 0)}: {name} without a reason")
    return found
