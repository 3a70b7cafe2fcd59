"""The emulator itself: it computes what a GPU does, poisons what a GPU leaves undefined, and names what would hang.

Planted bugs in copies of our kernels (a wrong constant, an index off by one, a missing barrier, an unaligned pack) must
fail the comparison that the real kernels pass.
"""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import pytest
import torch

from tests.helpers.kernels import ORDERS, builder
from tests.helpers.planted import UNOPTIMISED, Mistake, headers_ahead, planted_checkout
from tests.policy.rules import ROOT

HEADERS = """
#include "csrc/common/launch.h"
#include "csrc/common/reduce.h"
#include "csrc/common/vec.h"
namespace {
"""


def program(folder: Path, kernel: str, grid: str, block: str, root: Path = ROOT) -> ctypes.CDLL:
    """run(x, out, n) launches `kernel` and returns the fault, or nothing."""
    source = folder / "kernel.cpp"
    source.write_text(f"""{HEADERS}{kernel}}}
extern "C" const char* run(const float* x, float* out, int n) {{
  static std::string said;
  said.clear();
  try {{
    MK_LAUNCH(planted, dim3({grid}), dim3({block}), nullptr)(x, out, n);
  }} catch (const std::exception& error) {{
    said = error.what();
  }}
  return said.c_str();
}}
""")
    path = folder / "kernel.so"
    command = (*builder().emulated_command(builder().compiler()), *UNOPTIMISED)
    here = ("-fvisibility=default", f"-I{root}", "-shared", str(source), "-o", str(path))
    builder().run((*command, *headers_ahead(command), *here))
    library = ctypes.CDLL(str(path))
    library.run.restype = ctypes.c_char_p
    library.run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    return library


def launch(library: ctypes.CDLL, x: torch.Tensor, outputs: int, order: int = 0) -> tuple[torch.Tensor, str]:
    out = torch.full((outputs,), math.nan)
    library.mk_emulator_order(order)
    return out, library.run(x.data_ptr(), out.data_ptr(), len(x)).decode()


SUM = """
__global__ void planted(const float* x, float* out, int n) {
  float mine = 0.0f;
  for (int i = threadIdx.x; i < n; i += blockDim.x) mine += x[i];
  const float total = mk::reduce_block<mk::Sum, 128>(mine);
  const float squares = mk::reduce_block<mk::Sum, 128>(mine * mine);
  const float largest = mk::reduce_block<mk::Max, 128>(mine);
  if (threadIdx.x == 0) out[blockIdx.x] = blockIdx.x == 0 ? total : (blockIdx.x == 1 ? squares : largest);
}
"""


def expected(x: torch.Tensor) -> torch.Tensor:
    of_threads = torch.cat((x, torch.zeros(24))).view(8, 128).double().sum(0)
    return torch.stack((of_threads.sum(), of_threads.square().sum(), of_threads.max())).float()


def test_block_reductions_in_every_order(tmp_path: Path) -> None:
    library = program(tmp_path, SUM, "3", "128")
    x = torch.randn(1000)
    results = [launch(library, x, 3, order) for order in ORDERS.values()]
    assert {said for _, said in results} == {""}
    assert all(torch.equal(out, results[0][0]) for out, _ in results)
    torch.testing.assert_close(results[0][0], expected(x))


WARP = """
__global__ void planted(const float* x, float* out, int n) {
  const int lane = threadIdx.x;
  out[lane] = __shfl_down_sync(~0u, x[lane], 1);
  out[32 + lane] = __shfl_up_sync(~0u, x[lane], 1);
  out[64 + lane] = __shfl_sync(~0u, x[lane], 5);
  out[96 + lane] = float(__popc(__ballot_sync(~0u, x[lane] > 0.0f)));
  out[128 + lane] = float(__any_sync(~0u, lane == 7)) + 2.0f * float(__all_sync(~0u, lane < 32));
  if (lane < 16) out[160 + lane] = __shfl_xor_sync(0xffffu, x[lane], 8);
  if (lane == 0) out[176] = 0.0f;
  __syncthreads();
  atomicAdd(&out[176], __ldg(&x[lane]) * 0.0f + 1.0f);
}
"""


def test_warp_functions(tmp_path: Path) -> None:
    x = torch.randn(32)
    library = program(tmp_path, WARP, "1", "32")
    for order in ORDERS.values():
        out, said = launch(library, x, 177, order)
        assert said == ""
        assert torch.equal(out[:32], torch.cat((x[1:], x[31:])))
        assert torch.equal(out[32:64], torch.cat((x[:1], x[:31])))
        assert torch.equal(out[64:96], x[5].expand(32))
        assert torch.equal(out[96:128], (x > 0).sum().float().expand(32))
        assert torch.equal(out[128:160], torch.full((32,), 3.0))
        assert torch.equal(out[160:176], torch.cat((x[8:16], x[:8])))
        assert out[176] == 32


def test_what_a_lane_that_has_ended_offers_is_poison(tmp_path: Path) -> None:
    kernel = """
__global__ void planted(const float* x, float* out, int n) {
  if (threadIdx.x >= 20) return;
  out[threadIdx.x] = __shfl_xor_sync(~0u, x[threadIdx.x], 16);
}
"""
    out, said = launch(program(tmp_path, kernel, "1", "32"), torch.ones(32), 20)
    assert said == "" and torch.equal(out.isnan(), (torch.arange(20) >= 4) & (torch.arange(20) < 16))


def test_shared_memory_starts_as_nan_in_every_block(tmp_path: Path) -> None:
    kernel = """
__global__ void planted(const float* x, float* out, int n) {
  MK_SHARED(float, kept, 4);
  if (threadIdx.x < 3) kept[threadIdx.x] = 1.0f;
  __syncthreads();
  out[blockIdx.x * 4 + threadIdx.x] = kept[threadIdx.x];
}
"""
    out, _ = launch(program(tmp_path, kernel, "3", "4"), torch.ones(1), 12)
    assert torch.equal(out.view(3, 4).isnan(), torch.tensor([False, False, False, True]).expand(3, 4))


def test_a_deadlock_names_the_kernel_and_the_next_launch_works(tmp_path: Path) -> None:
    kernel = """
__global__ void planted(const float* x, float* out, int n) {
  if (n == 1 && threadIdx.x < 32) __syncthreads();
  if (n == 1 && threadIdx.x == 50) __syncthreads();  // its warp waits for it in the shuffle
  if (n == 1 && threadIdx.x >= 32) __shfl_xor_sync(~0u, 1.0f, 1);
  out[threadIdx.x] = 1.0f;
}
"""
    library = program(tmp_path, kernel, "1", "64")
    _, said = launch(library, torch.ones(1), 64)
    assert said.startswith("planted: deadlock in block (0, 0, 0): of 64 threads") and "31 for their warp" in said
    out, said = launch(library, torch.ones(2), 64)
    assert said == "" and torch.equal(out, torch.ones(64))


UNDEFINED = {
    "a read of what another warp writes": "race of threads",
    "a read of what another lane writes, after a shuffle": "race of threads",
    "a write over what others read": "race of threads",
    "two writes": "race of threads",
    "a number beyond the end": "access to kept[64], beyond its end",
    "a barrier that some threads never come to": "a barrier of the block after some of its threads have ended",
    "barriers of two branches": "threads of a block meet at different barriers",
    "a lane that its mask leaves out": "is not in its own mask",
    "nothing: a barrier of the block between": "",
    "nothing: a barrier of the warp between": "",
}
DOES = """
__global__ void planted(const float* x, float* out, int n) {
  MK_SHARED(float, kept, 64);
  const int thread = threadIdx.x, lane = thread % 32;
  float seen = 0.0f;
  if (n != 5) kept[thread] = 1.0f;
  if (n == 1) seen = kept[63 - thread];
  if (n == 2) __shfl_xor_sync(~0u, seen, 1);
  if (n == 2) seen = kept[thread ^ 1];
  if (n == 3) {
    __syncthreads();
    seen = kept[(thread + 1) % 64];
    kept[thread] = 2.0f;
  }
  if (n == 4) kept[thread ^ 32] = 1.0f;
  if (n == 5) kept[thread + 1] = 1.0f;
  if (n == 6 && thread >= 32) return;
  if (n == 7 && thread < 32)
    __syncthreads();
  else
    __syncthreads();  // in every other case of all threads
  if (n == 8 && lane > 0) __shfl_xor_sync(0xfffffffcu, seen, 0);
  if (n == 9) seen = kept[63 - thread];
  if (n == 10) {
    kept[thread] = 3.0f;
    __syncwarp();
    seen = kept[thread ^ 1];
  }
  out[thread] = seen;
}
"""


def test_what_a_gpu_leaves_undefined_is_a_fault_in_every_order(tmp_path: Path) -> None:
    """The fault is reported whether or not the order of the fibers makes a result wrong."""
    library = program(tmp_path, DOES, "1", "64")
    for case, (what, fault) in enumerate(UNDEFINED.items(), start=1):
        for order in ORDERS.values():
            _, said = launch(library, torch.ones(case), 64, order)
            assert (fault in said and said.startswith("planted: ")) if fault else said == "", (what, said)


def test_a_grid_that_a_gpu_refuses(tmp_path: Path) -> None:
    _, said = launch(program(tmp_path, SUM, "1, 70000", "128"), torch.ones(4), 1)
    assert said == "planted: a GPU rejects this grid or block"


INSTRUCTIONS = """
__global__ void planted(const float* x, float* out, int n) {
  const int i = threadIdx.x;
  out[i] = mk::gpu::exp2_approx(x[i]);
  out[n + i] = mk::gpu::reciprocal_approx(x[i]);
  out[2 * n + i] = mk::gpu::exp_accurate(x[i]);
  out[3 * n + i] = mk::gpu::larger(x[i], 1.0f);
}
"""


def test_instructions_have_a_gpus_infinities_and_errors(tmp_path: Path) -> None:
    """PTX: ex2.approx.ftz and rcp.approx.ftz flush subnormal numbers; expf keeps them, and is finite up to 88.72."""
    special = torch.tensor([math.inf, -math.inf, math.nan, 0.0, 1e-40, 127.9, 128.0, -126.5, 88.7, 88.8, -100.0, 2e38])
    count = len(special)
    values = torch.cat((special, torch.linspace(-80.0, 80.0, 1024 - count)))
    out, said = launch(program(tmp_path, INSTRUCTIONS, "1", "1024"), values, 4 * len(values))
    power, reciprocal, exponential, larger = (part.double() for part in out.view(4, -1))
    assert said == ""
    expected = torch.tensor([math.inf, 0.0, math.nan, 1.0, 1.0, 2.0**127.9, math.inf, 0.0], dtype=torch.float64)
    torch.testing.assert_close(power[:8], expected, rtol=1e-5, atol=0, equal_nan=True)
    assert reciprocal[:5].nan_to_num(7, 8).tolist() == [0, 0, 7, 8, 8] and reciprocal[count - 1] == 0
    assert exponential[8].isfinite() and exponential[9] == math.inf and 0 < exponential[10] < 1e-40
    assert larger[:4].nan_to_num(7, 8).tolist() == [8, 1, 7, 1]
    wide = values[count:].double()
    for found, exact, most in (
        (power[count:], wide.exp2(), 2.0**-22),
        (reciprocal[count:], wide.reciprocal(), 2.0**-23),
        (exponential[count:], wide.exp(), 2.0**-23),
    ):
        error = ((found - exact) / exact).abs().max()
        assert most / 4 < error < 2 * most, "about as inexact as it may be: the model itself rounds"


# ---------------------------------------------------------------- planted mistakes


@pytest.mark.parametrize("occurrence", [0, 1])
def test_a_missing_barrier_is_seen_in_every_order(tmp_path: Path, occurrence: int) -> None:
    root = planted_checkout(tmp_path, "common/reduce.h", "__syncthreads();", ";", occurrence)
    library = program(tmp_path, SUM, "3", "128", root)
    x = torch.randn(1000)
    assert all("race of threads" in launch(library, x, 3, order)[1] for order in ORDERS.values())


MISTAKES = {
    "a wrong constant": Mistake("activation/math.h", "value * gate.complement + gate.value",
                                "0.999f * value * gate.complement + gate.value", "swiglu", "gradient of argument 0"),
    "a wrong coefficient": Mistake("activation/math.h", "2.658403343e-1f", "2.658603343e-1f", "gelu",
                                     "output 0: error"),
    "an end that comes too soon": Mistake("activation/cuda.cu", "if (at >= a.count) return;",
                                          "if (at + kStep >= a.count) return;", "squared_relu", "output 0: error at"),
    "a pack that is not aligned": Mistake("common/steps.h", "width % Pack<T>::size == 0", "width >= Pack<T>::size",
                                          "swiglu", "misaligned address"),
    "a grid that is too large": Mistake("activation/cuda.cu", "unsigned(rows < 65535 ? rows : 65535)", "unsigned(rows)",
                                        "swiglu", "a GPU rejects this grid"),
    "a bias that remembers one row": Mistake("norm/cuda.cu", "of_bias[s][i] += step.grad[i]",
                                             "of_bias[s][i] = step.grad[i]", "layer_norm",
                                             "gradient of argument 2: error"),
    "a gate that is not quite closed": Mistake("activation/math.h", "exp_in_range<T>(x)", "exp(at_most(x, 88.6f))",
                                               "swiglu", "output 0: error at", on_cpu=False),
    "no eps": Mistake("norm/cuda.cu", "squares / float(a.width) + a.eps", "squares / float(a.width)", "rms_norm",
                      ": error"),
    "a dropped gradient of the sum": Mistake("norm/cuda.cu", "if (sum_row != nullptr)", "if (false)",
                                             "add_rms_norm", "gradient of argument 0: error"),
    "a part that lacks a row": Mistake("common/columns.h", "(part + 1) * rows_each;", "(part + 1) * rows_each - 1;",
                                       "layer_norm", "gradient of argument 0: error at"),
    "a turn the wrong way": Mistake("rope/cuda.cu", "before * cos[i] - second", "before * cos[i] + second", "rope",
                                    "output 0: error"),
    "a gradient that turns on": Mistake("rope/cuda.cu", "sin[i] * a.direction", "sin[i]", "rope",
                                        "gradient of argument 0: error"),
    "packs of heads that lie off them": Mistake("rope/cuda.cu", "&& a.head_stride % kPack == 0", "", "rope",
                                                "misaligned address"),
    "packs of halves that lie off them": Mistake("rope/cuda.cu", "a.half % kPack == 0 && ", "", "rope", "output 0"),
    "packs of a copy that lie off them": Mistake("optim/cuda.cu", "&& packs_fit<bf16>(a.copy)", "", "adamw",
                                                 "misaligned address"),
    "packs of a sum that lie off them": Mistake("optim/cuda.cu", "reinterpret_cast<uintptr_t>(a.x) % 16 == 0",
                                                "true", "grad_norm", "misaligned address"),
    "no eps on the CPU": Mistake("norm/cpu.cpp", "squares / count + a.eps", "squares / count", "rms_norm",
                                 ": error"),
    "a dropped gradient of the sum on the CPU": Mistake("norm/cpu.cpp", "result += get(grad_sum", "0.0f * get(grad_sum",
                                                        "add_layer_norm", "gradient of argument 0: error"),
    "a turn the wrong way on the CPU": Mistake("rope/cpu.cpp", "a * cos[i] - b", "a * cos[i] + b", "rope",
                                               "output 0: error"),
    "a bias in another order than the numbers on the CPU": Mistake("common/lanes.h", "result.one[i] = from[2 * i]",
                                                                   "result.one[i] = from[2 * i + 1]", "layer_norm",
                                                                   "output 0: error", on_cpu=True),
    "a bf16 that is cut off on the CPU": Mistake("common/lanes.h", "1u) + 0x7fffu", "1u)", "gelu", "output 0: error",
                                                    on_cpu=True),
    "a row's end that counts on the CPU": Mistake("norm/cpu.cpp", "within<T>(at, term(get(row, at)))",
                                                  "term(get(row, at))", "layer_norm", "output 0: error"),
    "a segment that ends too late": Mistake("optim/cuda.cu", "if (at + i >= a.segments.ends[segment])",
                                            "if (at + i > a.segments.ends[segment])", "adamw", "output 0: error"),
    "a step that is made all the same": Mistake("optim/cuda.cu", "if (control.applied == 0.0f) return;", ";", "adamw",
                                                "left out: output 0"),
    "a sum without its barrier": Mistake("optim/cuda.cu", "__syncthreads();\n  double sum", "double sum", "grad_norm",
                                         "race of threads"),
    "a maximum that drops NaN": Mistake("common/gpu.h", "return a > b || a != a ? a : b;", "return a > b ? a : b;",
                                        "cross_entropy", "inf and nan: output 0"),
    "columns that another block has": Mistake("norm/cuda.cu", "if (gridDim.y > 1) add_other", "if (false) add_other",
                                              "rms_norm", "2x8200: gradient of argument 0"),
    "a gradient of the sum at a row's first columns": Mistake("norm/cuda.cu", "if (sum_row != nullptr) beside",
                                                              "if (sum_row != nullptr && s == 0) beside",
                                                              "add_rms_norm", "gradient of argument 0: error"),
    "a label at the beginning of a pack": Mistake("cross_entropy/cuda.cu", "label >= 0 && label <",
                                                  "label > 0 && label <",
                                                  "xent_in_place", "output 1: error"),
    "a sum of parts that lacks a lane": Mistake("common/sum_parts.h", "for (int i = 1; i < kLanes; ++i)",
                                                "for (int i = 1; i < kLanes - 1; ++i)", "layer_norm",
                                                "530x8: gradient of argument 1: error"),
    "a sum of parts without its barrier": Mistake("common/sum_parts.h", "__syncthreads();", ";", "layer_norm",
                                                  "race of threads"),
    "a choice of another token": Mistake("expert_rows/cuda.cu", "choice / a.per * a.width : 0",
                                         "choice % a.per * a.width : 0",
                                         "taken", "output 0: error"),
    "padding that is a row": Mistake("expert_rows/math.h", "uint64_t(index) < uint64_t(count)", "index < count",
                                     "taken", "output 0: error", on_cpu=False),
    "a sum that lacks a choice": Mistake("expert_rows/cuda.cu", "choice < (token + 1) * a.per;",
                                         "choice < (token + 1) * a.per - 1;", "taken",
                                         "gradient of argument 0: error"),
    "a gradient without its weight": Mistake("expert_rows/cuda.cu", "result.add(read, weight)",
                                             "result.add(read, float(found))", "weighted_sum",
                                             "gradient of argument 0: error"),
    "a sum of another choice's weight": Mistake("expert_rows/cuda.cu", "weight_of<T>(a.weights, choice));",
                                                "weight_of<T>(a.weights, token * a.per));", "weighted_sum",
                                                "output 0: error"),
    "a product that does not begin with 0": Mistake("expert_rows/cuda.cu", "float sum = 0.0f;\n  if (exists",
                                                     "float sum = float(a.per);\n  if (exists", "weighted_sum",
                                                     "gradient of argument 2: error"),
    "a product of the first columns alone": Mistake("expert_rows/cuda.cu", "sum += one.product", "sum = one.product",
                                                    "weighted_sum", "gradient of argument 2: error"),
    "packs of rows that lie off them": Mistake("expert_rows/cuda.cu", "packs_fit<T>(a.width, a.rows, a.dy)",
                                               "a.width > 1024 || packs_fit<T>(a.width, a.rows, a.dy)",
                                               "weighted_sum", "misaligned address"),
    "a copy where a weight is": Mistake("expert_rows/cpu.cpp", "terms.size() == 1 && !weighted", "terms.size() == 1",
                                        "weighted_sum", "output 0: error"),
    "a row of padding that is not cleared on the CPU": Mistake("expert_rows/cpu.cpp",
                                                               "return clear_row(out, a.width);", "return;", "taken",
                                                               "output 0: error"),
    "a product of another token on the CPU": Mistake("expert_rows/cpu.cpp", "dy + choice / a.per * a.width",
                                                     "dy + choice % a.per * a.width", "weighted_sum",
                                                     "gradient of argument 2: error"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_fails_the_comparison(tmp_path: Path, name: str) -> None:
    MISTAKES[name].must_be_seen(tmp_path)
