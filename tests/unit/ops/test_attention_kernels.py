"""Attention of csrc/ on a CPU beyond the common comparison: selection, dropout, rejections, planted bugs."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, ones
from torch.utils.checkpoint import checkpoint

from megatron.errors import ConfigError
from megatron.ops import attention, resolve
from megatron.ops.blocked_attention import blocked_attention
from megatron.ops.fused_qkv import split_qkv
from megatron.ops.proof import Call, Draw, Proof
from megatron.ops.proof.rounding import Near, U, constant, log, near, shares
from megatron.ops.softmax import causal_mask
from tests.helpers.declared import Refused
from tests.helpers.fresh import in_fresh_process
from tests.helpers.kernels import backend, kernel
from tests.helpers.planted import Mistake

CAUSAL = {"mask": None, "causal": True, "scale": 0.4}

PLAIN: dict[str, Any] = {"mask": None, "causal": True, "scale": 1.0}
REFUSED: Refused = {
    "attention": [
        (
            (ones(2, 3, 5), *[ones(1, 2, 3, 5)] * 2, PLAIN),
            "queries float32 (2, 3, 5), keys float32 (1, 2, 3, 5): the kernel needs [b",
        ),
        (
            (*[ones(1, 2, 3, 5)] * 2, ones(1, 2, 3, 6), PLAIN),
            "values float32 (1, 2, 3, 6): the kernel needs values in ",
        ),
        (
            (ones(1, 4, 3, 5), *[ones(1, 3, 3, 5)] * 2, PLAIN),
            "the kernel needs keys [batch, a divisor of heads, keys, width]",
        ),
        (
            (ones(1, 2, 3, 5).bfloat16(), *[ones(1, 2, 3, 5)] * 2, PLAIN),
            "queries bfloat16 (1, 2, 3, 5), keys float32 (1, 2, 3, 5), values float32 (1, 2, 3, 5): the kernel needs",
        ),
        ((*[ones(1, 2, 3, 5)] * 3, PLAIN | {"mask": ones(3, 3)}), "a mask float32 (3, 3) for scores (1, 2, 3, 3): "),
        (
            (*[ones(1, 2, 3, 5, dtype=torch.float64)] * 3, PLAIN),
            "float64 (1, 2, 3, 5): the kernel needs float32, bfloat16",
        ),
    ],
}

# batch, heads, groups, queries, keys, width
SHAPES = (
    (1, 1, 1, 1, 1, 1),
    (2, 2, 1, 5, 5, 7),
    (1, 4, 2, 64, 64, 80),
    (2, 3, 3, 65, 65, 33),
    (1, 6, 2, 130, 130, 64),
    (1, 2, 2, 20, 150, 16),
    (2, 1, 1, 300, 300, 128),
    (1, 2, 1, 17, 90, 96),
)
SCALE = 0.3


def proof_oracle(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    return attention.attention(query, key, value, mask=mask, causal=causal, scale=SCALE)


def proof_kernel(ops: Any) -> Callable[..., Tensor]:
    native = kernel("attention", ops)

    def call(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        return native(query, key, value, mask=mask, causal=causal, scale=SCALE)

    return call


def proof_calls(draw: Draw) -> Iterator[Call]:
    for shape in SHAPES:
        batch, heads, groups, queries, keys, width = shape
        three = draw(batch, heads, queries, width), draw(batch, groups, keys, width), draw(batch, groups, keys, width)
        yield Call(f"{shape} causal", (*three, None, True))
        yield Call(f"{shape} full", (*three, None, False))
        for sizes in ((1, 1), (batch, 1), (1, heads), (batch, heads)):
            mask = (draw.integers(2, *sizes, queries, keys) == 0) | (torch.arange(keys) == 0)
            yield Call(f"{shape}, mask of {sizes}", (*three, mask, sizes[0] == 1))
    yield from other_layouts(draw)
    yield Call("no batch", (draw(0, 2, 5, 8), draw(0, 2, 5, 8), draw(0, 2, 5, 8), None, True))
    large = draw(1, 1, 70, 32, spread=4.0), draw(1, 1, 70, 32, spread=4.0), draw(1, 1, 70, 32)
    yield Call("one key has all the weight", (*large, None, True), grads=())
    # Where a score were rounded in one pass and not in the other, weights would be far from right.
    for power in (6, 9):
        one = torch.zeros(1, 1, 40, 32, dtype=draw.dtype)
        one[..., 0] = 10.0 ** (power / 2) * torch.linspace(1.0, 1.7, 40)
        yield Call(f"scores of 1e{power}", (one, one, draw(1, 1, 40, 32), None, True), grads=(2,))


def other_layouts(draw: Draw) -> Iterator[Call]:
    fused = draw(2, 70, 3, 3, 16)
    yield Call("thirds", (*(third.transpose(1, 2) for third in fused.unbind(3)), None, True))
    across = draw(2, 3, 16, 40).transpose(2, 3)
    yield Call("numbers not side by side", (across, across, across, None, True))
    apart = torch.arange(90).div(30, rounding_mode="floor")
    documents = (apart[:, None] == apart)[None, None]
    three = draw(2, 2, 90, 24), draw(2, 2, 90, 24), draw(2, 2, 90, 24)
    yield Call("documents", (*three, documents, True))
    yield Call("documents, mask by columns", (*three, documents.transpose(2, 3), True))
    yield Call("a value of the mask for all queries", (*three, (torch.arange(90) < 71)[None], False))
    for name, special in (("inf", torch.inf), ("nan", torch.nan)):
        query = three[0].clone()
        query[:, :, 3::13, 5] = special
        yield Call(f"{name} in some queries", (query, *three[1:], None, True), grads=())
    hidden = torch.ones(90, 90, dtype=torch.bool)
    hidden[40] = False
    yield Call("a query that sees nothing", (*three, hidden, True), grads=())


def proof_bounds(args: Sequence[Any], upstreams: Sequence[Tensor]) -> tuple[list[Near], dict[int, Near]]:
    """Weights and the gradients of scores are rounded before bf16 instructions multiply them. The mean gradient of a
    row comes from the rounded output, as in every flash attention."""
    query, *key_and_value, mask, causal = args
    dtype, short = query.dtype, query.dtype.itemsize == 2
    repeat = query.shape[1] // key_and_value[0].shape[1] if key_and_value[0].shape[1] else 1
    key, value = (near(one.repeat_interleave(repeat, 1)) for one in key_and_value)
    factor = dtype if dtype == torch.bfloat16 else torch.float32
    scores = near(query) @ across(key) * constant(SCALE) * constant(1.0)  # log2(e), too
    hidden = torch.zeros(scores.value.shape, dtype=torch.bool) if mask is None else ~mask.expand(scores.value.shape)
    hidden = hidden | ~causal_mask(*scores.value.shape[-2:], query.device) if causal else hidden
    kept, total, peak = shares(
        Near(scores.value.masked_fill(hidden, -torch.inf), scores.error.masked_fill(hidden, 0.0)), short
    )
    summed = kept.stored(factor) @ value
    rescaled = (kept.value @ value.value.abs()) * (total.error / total.value)
    out = Near(summed.value, summed.error + rescaled) / total
    # Of a sum of 1 the logarithm is 0, and what the forward pass has kept is the largest score.
    log_sum = torch.where(
        total.value == 1, 0.0, log(total).error + 4 * U * (peak.value.abs() + total.value.log().abs())
    )
    weights = kept / total
    weights = Near(weights.value, weights.error + weights.value * log_sum)
    grad = near(upstreams[0])
    mean = (grad * out.stored(dtype)).sum(-1)
    slopes = (weights * (grad @ across(value) - mean) * constant(SCALE)).stored(factor)
    own = [across(slopes) @ query, across(weights.stored(factor)) @ grad]
    of_key, of_value = (one.map(lambda tensor: tensor.unflatten(1, (-1, repeat))).sum(2)[:, :, 0] for one in own)
    return [out], {0: slopes @ key, 1: of_key, 2: of_value}


def across(matrix: Near) -> Near:
    return matrix.map(lambda tensor: tensor.transpose(-1, -2))


CPU_PROOFS = {
    "attention": Proof(
        name="attention",
        folder="attention",
        kernel=proof_kernel,
        oracle=proof_oracle,
        calls=proof_calls,
        bounds=proof_bounds,
    )
}


def native() -> Callable[..., Tensor]:
    return kernel("attention", backend("cpu").ops)


def three(seq: int, heads: int = 4, groups: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(seq)
    return [torch.randn(2, n, seq, 8).to(dtype).requires_grad_() for n in (heads, groups, groups)]


def test_auto_takes_it_and_leaves_generation_and_fp64_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = native()(*three(70), **CAUSAL)
    kernels, others = resolve("auto", "cpu", warn=lambda text: None), []
    assert torch.equal(kernels.attention(*three(70), **CAUSAL), expected)
    choice = next(choice for choice in kernels.choices if choice.op == "attention")
    assert choice.backend == "native" and "PyTorch's attention for generation" in choice.reason

    def spy(query: Tensor, *args: Any, **named: Any) -> Tensor:
        others.append(tuple(query.shape))
        return query

    monkeypatch.setattr(attention, "blocked_attention", spy)
    kernels = resolve("auto", "cpu", warn=lambda text: None)
    kernels.attention(torch.zeros(1, 2, 1, 8), *[torch.zeros(1, 2, 50, 8)] * 2, **CAUSAL)
    kernels.attention(*[torch.zeros(1, 2, 20, 8, dtype=torch.float64)] * 3, **CAUSAL)
    assert others == [(1, 2, 1, 8), (1, 2, 20, 8)]
    resolve("native", "cpu").attention(torch.zeros(1, 2, 1, 8), *[torch.zeros(1, 2, 50, 8)] * 2, **CAUSAL)
    assert len(others) == 2  # who insists gets the kernel


def test_values_of_another_width_are_left_to_others() -> None:
    said: list[str] = []
    query, key, value = torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 6)
    out = resolve("auto", "cpu", warn=said.append).attention(query, key, value, **CAUSAL)
    torch.testing.assert_close(out, attention.attention(query, key, value, **CAUSAL))
    assert len(said) == 1 and "the kernel needs values in the shape of the keys" in said[0]
    with pytest.raises(ConfigError, match="--kernels native: attention does not support queries"):
        resolve("native", "cpu").attention(query, key, value, **CAUSAL)


def test_cuda_has_no_such_kernel() -> None:
    choices = {choice.op: choice for choice in resolve("auto", "cuda").choices}
    assert choices["attention"].backend == "torch" and "scaled_dot_product_attention" in choices["attention"].reason


def test_gradients_of_a_fused_projection_are_thirds_of_its_gradient() -> None:
    """The result needs no copy: the split passes on the tensor that attention wrote."""
    attention, qkv = native(), torch.randn(2, 70, 3, 3, 8, requires_grad=True)
    query, key, value = (part.transpose(1, 2) for part in split_qkv(qkv))
    grads = torch.autograd.grad(attention(query, key, value, **CAUSAL).sum(), (query, key, value), retain_graph=True)
    assert len({grad.untyped_storage().data_ptr() for grad in grads}) == 1
    (of_qkv,) = torch.autograd.grad(attention(query, key, value, **CAUSAL).sum(), qkv)
    assert torch.equal(of_qkv, torch.stack([grad.transpose(1, 2) for grad in grads], dim=3))


def kept_keys(attention: Callable[..., Tensor], seq: int, dropout_p: float) -> Tensor:
    """[batch, heads, queries, keys]: weights after dropout, times the number of keys; all scores are equal."""
    query = torch.zeros(2, 3, seq, seq)
    value = torch.eye(seq).expand(2, 3, seq, seq)
    return attention(query, query, value, mask=None, causal=False, scale=1.0, dropout_p=dropout_p) * seq


@pytest.mark.parametrize("dropout_p", [0.1, 0.5])
def test_dropout_drops_that_share_and_scales_the_rest(dropout_p: float) -> None:
    torch.manual_seed(1)
    weights = kept_keys(native(), 200, dropout_p)
    kept = weights != 0
    torch.testing.assert_close(weights[kept], torch.full_like(weights[kept], 1.0 / (1.0 - dropout_p)))
    deviation = (dropout_p * (1.0 - dropout_p)) ** 0.5
    assert abs(kept.double().mean() - (1.0 - dropout_p)) < 5 * deviation / kept.numel() ** 0.5
    for dim in (0, 1, 2, 3):  # heads, queries and keys are independent of their neighbours
        one, next_one = kept.narrow(dim, 0, kept.shape[dim] - 1), kept.narrow(dim, 1, kept.shape[dim] - 1)
        pair = (one.double() - one.double().mean()) * (next_one.double() - next_one.double().mean())
        assert abs(pair.mean()) < 5 * deviation**2 / pair.numel() ** 0.5


def test_everything_may_be_dropped() -> None:
    tensors = three(20)
    out = native()(*tensors, **CAUSAL, dropout_p=1.0)
    grads = torch.autograd.grad(out.sum(), tensors)
    assert not out.any() and not any(grad.any() for grad in grads)


def test_the_generator_decides_what_is_dropped() -> None:
    attention, runs = native(), []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        runs.append(kept_keys(attention, 70, 0.3))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


def test_a_recomputed_layer_drops_the_same_again() -> None:
    attention, results = native(), []
    for wrap in (lambda f, *args: f(*args), partial(checkpoint, use_reentrant=False)):
        torch.manual_seed(7)
        tensors = three(70)
        out = wrap(partial(attention, **CAUSAL, dropout_p=0.3), *tensors)
        torch.manual_seed(99)  # what comes between must not matter
        results.append([out, *torch.autograd.grad(out.sum(), tensors)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_drops_what_forward_dropped(dtype: torch.dtype) -> None:
    """Compares with the formula. With the unit matrix as values, the output shows which weights were dropped."""
    attention, seq = native(), 70
    query, key = (torch.randn(1, 2, seq, seq).div(3).to(dtype).requires_grad_() for _ in range(2))
    unit = torch.eye(seq).to(dtype).expand(1, 2, seq, seq)
    torch.manual_seed(5)
    dropped = attention(query, key, unit, **CAUSAL, dropout_p=0.25) != 0
    value = torch.randn(1, 2, seq, seq).to(dtype).requires_grad_()
    torch.manual_seed(5)
    out = attention(query, key, value, **CAUSAL, dropout_p=0.25)
    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, (query, key, value), upstream)
    exact = [t.detach().double().requires_grad_() for t in (query, key, value)]
    weights = torch.softmax(
        (exact[0] @ exact[1].transpose(2, 3) * 0.4).masked_fill(~causal_mask(seq, seq, query.device), -torch.inf),
        -1,
    )
    want = (weights * dropped / 0.75) @ exact[2]
    wanted = torch.autograd.grad(want, exact, upstream.double())
    limit = {torch.float32: 3e-6, torch.bfloat16: 1e-2}[dtype]
    for got, right in zip((out, *grads), (want, *wanted), strict=True):
        assert (got.double() - right).norm() < limit * right.norm()


def test_threads_and_runs_change_no_bit() -> None:
    def run(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        tensors = three(200, dtype=torch.bfloat16)
        out = native()(*tensors, **CAUSAL)
        return [out, *torch.autograd.grad(out.sum(), tensors)]

    before = torch.get_num_threads()
    try:
        runs = [run(threads) for threads in (1, 2, 1)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for others in runs[1:] for one, other in zip(runs[0], others, strict=True))


def _without_memory(batch: int) -> str:
    attention, keys = native(), 20_000_000
    torch.set_num_threads(2)
    key = torch.zeros(batch, 1, 1, 16).expand(batch, 1, keys, 16)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))
    try:
        attention(torch.zeros(batch, 1, 1, 16), key, key, mask=None, causal=True, scale=1.0)
    except (MemoryError, RuntimeError) as error:
        return str(error) or type(error).__name__
    return "nothing was refused"


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
@pytest.mark.parametrize("batch", [1, 2])
def test_a_lack_of_memory_is_an_error_in_threads_too(batch: int) -> None:
    """An exception cannot leave a loop of several threads; without the error, the result would be unwritten memory."""
    assert re.search("alloc|Memory", in_fresh_process(_without_memory, batch))


def test_long_sequences_keep_no_scores() -> None:
    """Memory for the backward pass grows with the sequence, not with its square."""
    kept = {}
    for seq in (256, 512):
        tensors, sizes = three(seq), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: s.append(t.numel()) or t, lambda t: t):
            native()(*tensors, **CAUSAL)
        kept[seq] = sum(sizes)
    assert kept[512] == 2 * kept[256]


def test_what_does_not_fit_is_refused() -> None:
    ops, x = backend("cpu").ops, torch.randn(2, 5, 4, 8)  # [batch, positions, heads, width]
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    seed, first = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 5, dtype=torch.int64)
    for arguments, message in (
        ((x, x[:, :, :3], x, None, None, 0, 1.0, 0.0, None), "multiple of the key's heads"),
        ((x, x, x[:, :4], None, None, 0, 1.0, 0.0, None), "not of one type and"),
        ((x, x, x.bfloat16(), None, None, 0, 1.0, 0.0, None), "not of one type and"),
        ((x.double(), x.double(), x.double(), None, None, 0, 1.0, 0.0, None), "only float32, bfloat16 and float16"),
        ((x.transpose(1, 3), x, x, None, None, 0, 1.0, 0.0, None), "multiple of the key's heads|must be contiguous"),
        ((x, x, x, mask.float(), None, 0, 1.0, 0.0, None), "4 dimensions of bool"),
        ((x, x, x, mask[..., :4], None, 0, 1.0, 0.0, None), "4 dimensions of bool"),
        ((x, x, x, mask.expand(1, 3, 5, 5), None, 0, 1.0, 0.0, None), "does not fit dimension 1"),
        ((x, x, x, None, first.int(), 0, 1.0, 0.0, None), r"first keys are not int64 \[batch or 1, queries\]"),
        ((x, x, x, None, first[:, :4], 0, 1.0, 0.0, None), "first keys are not int64"),
        ((x, x, x, None, first.expand(3, 5), 0, 1.0, 0.0, None), "first keys are not int64"),
        ((x, x, x, None, None, 0, 1.0, 0.5, None), "dropout needs a seed"),
        ((x, x, x, None, None, 0, 1.0, 0.5, seed.float()), "dropout needs a seed"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.attention_forward(*arguments)
    out, log_sum_exp = ops.attention_forward(x, x, x, None, None, 0, 1.0, 0.0, None)
    for rest, message in (
        ((x, out, log_sum_exp[:1], None, None, 0, 1.0, 0.0, None, False), "a float for every row"),
        ((x, out[:, :4], log_sum_exp, None, None, 0, 1.0, 0.0, None, False), "not of one type and"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.attention_backward(x, x, x, *rest)
    with pytest.raises(RuntimeError, match="only equal shapes can be thirds"):
        ops.attention_backward(x, x, x[:, :, :2], x[:, :, :2], out, log_sum_exp, None, None, 0, 1.0, 0.0, None, True)


def test_it_is_the_function_of_the_other_ways() -> None:
    """Equals attention in blocks of torch's products and the plain formula, in one dtype."""
    tensors = three(130)
    ours = native()(*tensors, **CAUSAL)
    for other in (blocked_attention, attention.attention):
        torch.testing.assert_close(ours, other(*tensors, **CAUSAL), rtol=1e-5, atol=2e-6)


FORWARD, BACKWARD, BLOCKS, PRODUCT = (
    f"attention/{name}" for name in ("cpu_forward.cpp", "cpu_backward.cpp", "blocks.h", "product.h")
)
MISTAKES = {
    "one key too many": (BLOCKS, "row + diagonal + 1 - first_key", "row + diagonal + 2 - first_key"),
    "one key too few": (BLOCKS, "row + diagonal + 1 - first_key", "row + diagonal - first_key"),
    "a query left out of a key": (BLOCKS, "first_key + key - diagonal", "first_key + key + 4 - diagonal"),
    "the mask's first key": (
        BLOCKS,
        "i = hidden; i < seen && allowed",
        "i = hidden + 1; i < seen && allowed",
    ),
    "what came before not put right": (FORWARD, "sum_[row] = sum_[row] * factor;", ""),
    "the peak of this block alone": (FORWARD, "most = peak_[row]", "most = -INFINITY"),
    "gradient not scaled": (BACKWARD, "weight * grad * scale", "weight * grad"),
    "mean gradient forgotten": (BACKWARD, "* kept - mean", "* kept"),
    "keys of the first block": (BACKWARD, "{keys_ + units<Math>(pair.first_key) * columns_,", "{keys_ + 0,"),
    "gradients of keys not from zero": (BACKWARD, "std::fill(grad_keys_ + 0, grad_keys_ + whole, 0.0f);", ""),
    "heads of a group forget each other": (FORWARD, "group * of_group; head", "group * of_group + of_group / 2; head"),
    "a column of the product": (PRODUCT, "if (v < registers) tile", "if (v < 0) tile"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_planted_bugs_are_seen(tmp_path: Path, name: str) -> None:
    Mistake(*MISTAKES[name], "attention", on_cpu=True).must_be_seen(tmp_path)
