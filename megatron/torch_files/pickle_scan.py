"""Scans the pickle of a `.pt` file without executing it, and rejects what no checkpoint needs.

Although `torch.load(weights_only=True)` calls no foreign code, a hostile pickle can exhaust memory or run forever. It
can ask for `bytearray(10**10)`, for values that contain themselves, or for the same list 2**60 times; code that walks
or hashes these never ends. Such a file is rejected before torch reads it.
"""

from collections.abc import Collection

from megatron.torch_files.pickle_reader import OF_TORCH, Interpreter, follow

_DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16"),
    *("float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_STORAGES = (
    *("Bool", "Byte", "Char", "Short", "Int", "Long", "Half", "BFloat16", "Float", "Double", "ComplexFloat"),
    "ComplexDouble",
)
PLAIN = frozenset(
    {
        "collections.OrderedDict",
        "torch.Size",
        "torch.device",
        "torch.nn.parameter.Parameter",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        "torch.storage.UntypedStorage",
        "builtins.set",
        *(f"torch.{name}" for name in _DTYPES),
        *(f"torch.{name}Storage" for name in _STORAGES),
    }
)
"""The names that a file of tensors and plain values uses."""

_MAX_REPEATED = 1_000_000  # parts of values that occur more than once, such as the betas of all parameter groups
_MAX_LONG_INTEGERS = 1000  # of more than 8 bytes: all can have one hash, and a table of them takes quadratic time


def scan(data: bytes, allowed: Collection[str]) -> None:
    """Raises PickleRefused unless the pickle consists of plain values, PLAIN names and the `allowed` names."""
    follow(
        data,
        Interpreter(
            actions=OF_TORCH,
            allowed=PLAIN.union(allowed),
            max_repeated=_MAX_REPEATED,
            max_long_integers=_MAX_LONG_INTEGERS,
        ),
    )
