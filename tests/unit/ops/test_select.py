from __future__ import annotations

import copy
import dataclasses

import pytest

from megatron.errors import ConfigError
from megatron.ops import OPS, activation, norm, resolve, rope, select
from megatron.ops.library import Library
from megatron.ops.operation import Operation
from megatron.ops.registry import OPERATIONS
from megatron.ops.select import left_to_compiler, slower_without_kernels

BUILT = Library()
NOT_BUILT = Library("not built: python setup.py build_ext --inplace")


def test_auto_without_kernels_takes_torch_functions_and_says_so() -> None:
    kernels = resolve("auto", "cpu", native=NOT_BUILT)
    assert kernels.rms_norm is norm.torch_rms_norm
    assert kernels.squared_relu is activation.squared_relu
    assert {choice.op for choice in kernels.choices} == set(OPS)
    lines = kernels.table().splitlines()
    assert lines[0].split() == ["op", "backend", "reason"]
    assert any(line.split()[:2] == ["rms_norm", "torch"] for line in lines)


def test_a_kernel_that_is_not_the_faster_one_says_what_it_is_taken_for() -> None:
    """benchmarks/RESULTS.md: the sum of squares takes 2 to 6 % longer than PyTorch's."""
    reasons = {choice.op: choice.reason for choice in resolve("auto", "cpu", native=BUILT).choices}
    assert "sums in double precision" in reasons["grad_norm"] and reasons["adamw"] == "csrc"


def test_the_start_of_a_run_names_in_one_line_what_is_not_native() -> None:
    line = resolve("auto,-rope", "cpu", native=BUILT).summary()
    assert line.startswith("kernels: native except ") and "rope (ref)" in line and "adamw" not in line
    assert "--log-kernels" in line and "\n" not in line
    without = resolve("auto", "cpu", native=NOT_BUILT).summary()
    assert without == "kernels: no native kernels; --log-kernels lists all, with reasons"


def test_the_first_line_of_a_run_without_kernels_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "library", lambda: Library("not built; build them: python csrc/build.py"))
    (line,) = slower_without_kernels("auto,-rope")
    assert line.startswith("native kernels are not built; build them: python csrc/build.py (")
    assert slower_without_kernels("ref") == []


def test_what_a_compiled_layer_does_by_formulas_is_known() -> None:
    assert left_to_compiler(resolve("ref", "cpu")) == []
    left = left_to_compiler(resolve("auto,-rope", "cpu", native=BUILT))
    assert "swiglu" in left and not {"rope", "linear_cross_entropy", "adamw"} & set(left)


def test_ref_and_exclusions() -> None:
    assert {choice.backend for choice in resolve("ref", "cpu").choices} == {"ref"}
    kernels = resolve("auto,-rms_norm, -gelu", "cpu", native=NOT_BUILT)
    assert kernels.rms_norm is norm.rms_norm and kernels.gelu is activation.gelu
    assert kernels.layer_norm is norm.torch_layer_norm
    assert "excluded by --kernels" in kernels.table()


@pytest.mark.parametrize("backend", ["unfused", "local"])
def test_attention_backend_that_is_explicit(backend: str) -> None:
    choice = next(c for c in resolve("auto", "cpu", attention=backend).choices if c.op == "attention")
    assert (choice.backend, choice.reason) == ("ref", f"--attention-backend {backend}")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fast", "'fast' is not one of auto, native, ref"),
        ("auto,rope", "only exclusions such as -rope"),
        ("auto,-ropes", "did you mean -rope"),
        ("auto,-xyz", "the operations are layer_norm, rms_norm, add_layer_norm"),
    ],
)
def test_refusals_are_one_line_with_the_way_out(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match="--kernels") as caught:
        resolve(spec, "cpu")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_choice_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolve("ref", "cpu").rope = rope.rope  # type: ignore[misc]


def test_a_copy_of_a_model_has_the_same_kernels() -> None:
    kernels = resolve("auto", "cpu")
    copied = copy.deepcopy(kernels)
    assert all(getattr(copied, op) is getattr(kernels, op) for op in ("rms_norm", "adamw", "grad_norm"))


def test_an_operation_without_a_declared_signature_is_an_attribute_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(OPERATIONS, "twice", Operation("twice", lambda x: 2 * x))
    kernels = copy.deepcopy(resolve("auto", "cpu"))
    assert kernels.twice(3) == 6 and kernels.choices[-1].op == "twice"
    with pytest.raises(AttributeError, match="there is no operation 'thrice'"):
        _ = kernels.thrice
