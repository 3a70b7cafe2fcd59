"""Reads a pickle as a description: plain values, and descriptions of all else.

Nothing that it names is imported or called. A name (`GLOBAL`) becomes a `Name`; an object that the pickle would make
becomes a `Made` with its arguments. This reads files of other programs that torch's weights-only loader rejects because
of their classes: `argparse.Namespace`, enumerations, the metadata of torch's distributed format. Memory grows only with
the length of the pickle: values are made once, and repetitions, depth and integers are bounded.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import IO, Any

from megatron.torch_files.pickle_instructions import Instruction, PickleRefused, in_bytes, in_stream

_MAX_REPEATED = 10_000_000  # parts of values that occur more than once
_MAX_DEPTH = 100
_MAX_INTEGER_BYTES = 64
_LONG_BITS = 64  # longer integers can all have the same hash
_MAX_COMPOUND_KEYS = 5000  # tuples of integers, too; a dict of those takes quadratic time


@dataclass(frozen=True)
class Name:
    """Name of a class, function or other object, which was not looked up."""

    text: str

    @property
    def last(self) -> str:
        return self.text.rpartition(".")[2]


@dataclass(eq=False, slots=True)
class Made:
    """Description of an object that was not made: its class, arguments, state and items."""

    kind: Name
    arguments: tuple[Any, ...] = ()
    state: Any = None
    items: dict[Any, Any] | list[Any] | None = None


@dataclass(eq=False, slots=True)
class Persistent:
    """Reference to data beside the pickle, such as torch's storages."""

    identity: Any


def container(value: Any, kind: type[dict[Any, Any]] | type[list[Any]]) -> Any:
    """Returns the dictionary or list that elements are added to; for a `Made`, its own items."""
    if not isinstance(value, Made):
        return value
    if value.items is None:
        value.items = kind()
    return value.items


def made(kind: Any, arguments: Any) -> Any:
    """Describes a call. A few kinds of plain content become plain values."""
    if not isinstance(arguments, tuple):
        raise PickleRefused("its pickle is malformed (a call without arguments)")
    if not isinstance(kind, Name):
        return Made(Name("(what another call gives)"), (kind, *arguments))
    if kind.text == "collections.OrderedDict" and not arguments:
        return {}
    if kind.text == "torch.Size" and len(arguments) == 1 and isinstance(arguments[0], tuple):
        return arguments[0]
    if kind.text == "_codecs.encode" and len(arguments) == 2 and isinstance(arguments[0], str):
        return arguments[0].encode("latin-1")  # how bytes are written by protocol 2
    if kind.text == "copyreg._reconstructor" and arguments and isinstance(arguments[0], Name):
        return Made(arguments[0])
    return Made(kind, arguments)


@dataclass(slots=True)
class _Cell:
    value: Any
    parts: int = 1  # number of values in it, nested ones included
    depth: int = 1
    finished: bool = False  # True once it was referred to again: a change could then make a cycle


def read_pickle(data: bytes) -> Any:
    return read_with_names(data)[0]


def read_with_names(data: bytes) -> tuple[Any, frozenset[str]]:
    """Returns the value of a pickle, and the names of all classes, functions and other objects in it."""
    interpreter = Interpreter()
    return follow(data, interpreter), frozenset(interpreter.names)


def read_next(stream: IO[bytes]) -> Any:
    """Returns the value of the pickle at the stream's position, and leaves the stream after it."""
    return _run(Interpreter(), in_stream(stream))


def follow(data: bytes, interpreter: "Interpreter") -> Any:
    return _run(interpreter, in_bytes(data))


def _run(interpreter: "Interpreter", instructions: Iterable[Instruction]) -> Any:
    try:
        return interpreter.run(instructions)
    except (PickleRefused, MemoryError):
        raise
    except Exception as error:  # pickletools raises many kinds
        text = f"{type(error).__name__}: {str(error)[:100]}"
        raise PickleRefused(f"its pickle is malformed ({text})") from error


@dataclass
class _Stack:
    cells: list[_Cell] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    compound_keys: int = 0

    def push(self, value: Any) -> None:
        self.cells.append(_Cell(value))

    def pop(self, count: int = 1) -> list[_Cell]:
        if not 0 <= count <= len(self.cells) - (self.marks[-1] if self.marks else 0):
            raise PickleRefused("its pickle is malformed (a value is missing)")
        popped = self.cells[len(self.cells) - count :]
        del self.cells[len(self.cells) - count :]
        return popped

    def pop_mark(self) -> list[_Cell]:
        mark = self.marks.pop()
        popped = self.cells[mark:]
        del self.cells[mark:]
        return popped

    def hold(self, value: Any, cells: list[_Cell]) -> None:
        self.cells.append(_held(_Cell(value), cells))

    def put(self, cells: list[_Cell]) -> Any:
        """Returns the value on top of the stack, after counting `cells` as its content."""
        top = self.cells[-1]
        if top.finished:
            raise PickleRefused("it has a value that contains itself, or that changes after its use")
        _held(top, cells)
        return top.value

    def mark(self, _: Any) -> None:
        self.marks.append(len(self.cells))

    def check_key(self, key: Any) -> None:
        """Rejects keys that are slow to hash, and keys of a kind of which many can have the same hash."""
        if isinstance(key, (tuple, frozenset)):
            self.compound_keys += 1
            if self.compound_keys > _MAX_COMPOUND_KEYS:
                raise PickleRefused(f"it has more than {_MAX_COMPOUND_KEYS} keys that are tuples or sets")
            for part in key:
                self.check_key(part)
        elif isinstance(key, int):
            if key.bit_length() > _LONG_BITS:
                raise PickleRefused("it has a key that is a very long integer")
        elif key is not None and not isinstance(key, (str, bytes, float, Name, Made)):
            raise PickleRefused(f"it has a key that is a {type(key).__name__}")


def _set_items(stack: _Stack, cells: list[_Cell]) -> None:
    if len(cells) % 2:
        raise PickleRefused("its pickle is malformed (a key without a value)")
    top = container(stack.put(cells), dict)
    if not isinstance(top, dict):
        raise PickleRefused("its pickle is malformed (items of something that is not a dictionary)")
    for key, value in zip(cells[::2], cells[1::2], strict=True):
        stack.check_key(key.value)
        top[key.value] = value.value


def _append_all(stack: _Stack, cells: list[_Cell]) -> None:
    top = container(stack.put(cells), list)
    if not isinstance(top, list):
        raise PickleRefused("its pickle is malformed (elements of something that is not a list)")
    top.extend(cell.value for cell in cells)


def _add_all(stack: _Stack, cells: list[_Cell]) -> None:
    top = stack.put(cells)
    if not isinstance(top, set):
        raise PickleRefused("its pickle is malformed (elements of something that is not a set)")
    for cell in cells:
        stack.check_key(cell.value)
        top.add(cell.value)


def _make_frozenset(stack: _Stack) -> None:
    cells = stack.pop_mark()
    for cell in cells:
        stack.check_key(cell.value)
    stack.hold(frozenset(cell.value for cell in cells), cells)


def _make_tuple(stack: _Stack, cells: list[_Cell]) -> None:
    stack.hold(tuple(cell.value for cell in cells), cells)


@dataclass
class Interpreter(_Stack):
    """Interprets instructions, with the stack, the memo and the names that occurred."""

    actions: "Mapping[str, Action]" = field(default_factory=lambda: _ACTIONS)
    allowed: Collection[str] | None = None
    """Names that a pickle may have; None: all."""
    max_repeated: int = _MAX_REPEATED
    max_long_integers: float = inf
    memo: dict[int, _Cell] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    repeated: int = 0
    long_integers: int = 0

    def run(self, instructions: Iterable[Instruction]) -> Any:
        for name, argument in instructions:
            act = self.actions.get(name)
            if act is None:
                raise PickleRefused(f"its pickle has the instruction {name[:40]}, which is not supported")
            act(self, argument)
        if len(self.cells) != 1 or self.marks:
            raise PickleRefused("its pickle is malformed (it does not end in one value)")
        return self.cells[0].value

    def name(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self.push_name(module, name)

    def stack_name(self, _: Any) -> None:
        module, name = (cell.value for cell in self.pop(2))
        if not isinstance(module, str) or not isinstance(name, str):
            raise PickleRefused("its pickle is malformed (a name that is not text)")
        self.push_name(module, name)

    def push_name(self, module: str, name: str) -> None:
        found = Name(f"{'builtins' if module == '__builtin__' else module}.{name}")
        if self.allowed is not None and found.text not in self.allowed:
            raise PickleRefused(
                f"its pickle refers to {found.text}, which is not allowed; save only tensors and plain values"
            )
        self.names.add(found.text)
        self.push(found)

    def push_integer(self, value: int) -> None:
        self.long_integers += value.bit_length() > _LONG_BITS
        if value.bit_length() > 8 * _MAX_INTEGER_BYTES or self.long_integers > self.max_long_integers:
            raise PickleRefused(f"it has an integer of over {_MAX_INTEGER_BYTES} bytes, or many of more than 8 bytes")
        self.push(value)

    def make(self, _: Any) -> None:
        kind, arguments = self.pop(2)
        name = kind.value.text if isinstance(kind.value, Name) else ""
        if name.endswith("Storage"):
            raise PickleRefused(f"its pickle creates a {name}, which torch.save never writes")
        if name == "builtins.set":
            self.hold(self._set_of(arguments.value), [kind, arguments])
        else:
            self.hold(made(kind.value, arguments.value), [kind, arguments])

    def _set_of(self, arguments: Any) -> set[Any]:
        """Makes a set from a list, as protocol 2 writes sets. Rejects a tensor, which would be split into elements."""
        if not isinstance(arguments, tuple) or len(arguments) != 1 or not isinstance(arguments[0], list):
            raise PickleRefused("its pickle creates a set from something that is not a list")
        for key in arguments[0]:
            self.check_key(key)
        return set(arguments[0])

    def make_with_keywords(self, _: Any) -> None:
        kind, arguments, keywords = self.pop(3)
        self.hold(made(kind.value, (*arguments.value, keywords.value)), [kind, arguments, keywords])

    def build(self, _: Any) -> None:
        cells = self.pop()
        top = self.put(cells)
        if isinstance(top, Made):
            top.state = cells[0].value
        elif not isinstance(top, dict):  # attributes beside the items of an OrderedDict have no meaning here
            raise PickleRefused("its pickle is malformed (a state for a plain value)")

    def memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.cells[-1]

    def store(self, index: int) -> None:
        self.memo[index] = self.cells[-1]

    def fetch(self, index: int) -> None:
        cell = self.memo[index]
        cell.finished = True
        self.repeated += cell.parts - 1
        if self.repeated > self.max_repeated:
            raise PickleRefused(f"values that occur more than once have over {self.max_repeated} parts in all")
        self.cells.append(cell)


Action = Callable[[Interpreter, Any], None]

OF_TORCH: dict[str, Action] = {
    **dict.fromkeys(("PROTO", "STOP"), lambda run, _: None),
    "NONE": lambda run, _: run.push(None),
    "NEWTRUE": lambda run, _: run.push(True),
    "NEWFALSE": lambda run, _: run.push(False),
    "EMPTY_TUPLE": lambda run, _: run.push(()),
    "EMPTY_LIST": lambda run, _: run.push([]),
    "EMPTY_DICT": lambda run, _: run.push({}),
    "EMPTY_SET": lambda run, _: run.push(set()),
    "TUPLE": lambda run, _: _make_tuple(run, run.pop_mark()),
    "TUPLE1": lambda run, _: _make_tuple(run, run.pop(1)),
    "TUPLE2": lambda run, _: _make_tuple(run, run.pop(2)),
    "TUPLE3": lambda run, _: _make_tuple(run, run.pop(3)),
    "APPEND": lambda run, _: _append_all(run, run.pop()),
    "APPENDS": lambda run, _: _append_all(run, run.pop_mark()),
    "SETITEM": lambda run, _: _set_items(run, run.pop(2)),
    "SETITEMS": lambda run, _: _set_items(run, run.pop_mark()),
    "ADDITEMS": lambda run, _: _add_all(run, run.pop_mark()),
    "BINPERSID": lambda run, _: _persistent(run),
    "GLOBAL": Interpreter.name,
    "REDUCE": Interpreter.make,
    "NEWOBJ": Interpreter.make,
    "BUILD": Interpreter.build,
    "MARK": Interpreter.mark,
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), Interpreter.store),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), Interpreter.fetch),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1"), Interpreter.push_integer),
    **dict.fromkeys(
        ("BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINSTRING", "SHORT_BINSTRING"), Interpreter.push
    ),
}
"""Actions for the instructions that torch writes, by name."""

_ACTIONS: dict[str, Action] = {
    **OF_TORCH,
    "FRAME": lambda run, _: None,
    "FROZENSET": lambda run, _: _make_frozenset(run),
    "STACK_GLOBAL": Interpreter.stack_name,
    "NEWOBJ_EX": Interpreter.make_with_keywords,
    "MEMOIZE": Interpreter.memoize,
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"), Interpreter.push),
}


def _persistent(run: Interpreter) -> None:
    cells = run.pop()
    run.hold(Persistent(cells[0].value), cells)


def _held(holder: _Cell, cells: list[_Cell]) -> _Cell:
    for cell in cells:
        holder.parts += cell.parts
        if cell.depth >= holder.depth:
            holder.depth = cell.depth + 1
    if holder.depth > _MAX_DEPTH:
        raise PickleRefused(f"its values are nested more than {_MAX_DEPTH} deep")
    return holder
