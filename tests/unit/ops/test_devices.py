"""A kernel runs on the device and stream of its tensor, whichever device is current in torch's CUDA runtime and in the
one linked with our kernels. Both runtimes are stand-ins; csrc/common is the real one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.helpers.kernels import builder
from tests.helpers.planted import planted_checkout
from tests.policy.rules import ROOT

CUDA_RUNTIME = """
#pragma once
extern int our_device;
inline int cudaSetDevice(int index) { return index > 1 ? 101 : (our_device = index, 0); }
"""
TORCH_CUDA = """
#include <cstdint>
extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  *stream = reinterpret_cast<void*>(intptr_t(100 + device));
  return 0;
}
"""
PROGRAM = """
#include <dlfcn.h>
#include <cstdio>
#include <exception>
#include "common/binding.h"

int our_device = 0, torch_device = 0;
struct Stand { int device; } on[] = {{0}, {1}, {7}};
struct Guard { int before; };

extern "C" {
int32_t aoti_torch_get_device_index(TorchTensor* x, int32_t* index) {
  *index = reinterpret_cast<Stand*>(x)->device;
  return 0;
}
int32_t aoti_torch_create_device_guard(int32_t index, TorchDeviceGuard** guard) {
  *guard = reinterpret_cast<TorchDeviceGuard*>(new Guard{torch_device});
  torch_device = index;
  return 0;
}
int32_t aoti_torch_delete_device_guard(TorchDeviceGuard* guard) {
  torch_device = reinterpret_cast<Guard*>(guard)->before;
  return 0;
}
int32_t aoti_torch_delete_tensor_object(TorchTensor*) { return 0; }
}

struct Args {};
int launch(const Args&, void* stream) {
  std::printf("torch %d ours %d stream %ld; ", torch_device, our_device, reinterpret_cast<long>(stream));
  return 0;
}

int main(int, char** words) {
  dlopen(words[1], RTLD_NOW);
  for (int current : {0, 1})
    for (int device : {1, 0}) {
      torch_device = current;
      mk::stable::Tensor x(reinterpret_cast<TorchTensor*>(&on[device]));
      mk::binding::on_gpu(launch, Args{}, x, "op");
      std::printf("back on %d\\n", torch_device);
    }
  try {
    mk::stable::Tensor x(reinterpret_cast<TorchTensor*>(&on[2]));
    mk::binding::on_gpu(launch, Args{}, x, "op");
  } catch (const std::exception& error) {
    std::printf("%s\\n", error.what());
  }
}
"""
EXPECTED = [
    "torch 1 ours 1 stream 101; back on 0",
    "torch 0 ours 0 stream 100; back on 0",
    "torch 1 ours 1 stream 101; back on 1",
    "torch 0 ours 0 stream 100; back on 1",
]


def where_kernels_run(folder: Path, checkout: Path) -> list[str]:
    try:
        cxx = builder().compiler()
    except builder().BuildError as error:
        pytest.skip(f"nothing can be compiled here: {error}")
    (folder / "cuda_runtime.h").write_text(CUDA_RUNTIME)
    (folder / "torch_cuda.cpp").write_text(TORCH_CUDA)
    (folder / "program.cpp").write_text(PROGRAM)
    common = checkout / "csrc" / "common"
    library = folder / "libtorch_cuda.so"
    builder().run(
        [*cxx, "-shared", "-fPIC", str(folder / "torch_cuda.cpp"), "-Wl,-soname,libtorch_cuda.so", "-o", str(library)]
    )
    command = [*cxx, "-std=c++20", "-O0", "-I", str(folder), "-I", str(common.parent)]
    command += ["-x", "c++", str(folder / "program.cpp")]
    command += [str(common / "device.cu"), str(common / "stream.cpp"), "-o", str(folder / "program"), "-ldl"]
    builder().run([*command, "-Wl,--unresolved-symbols=ignore-all"])  # functions of torch that are never called
    return subprocess.run([str(folder / "program"), str(library)], capture_output=True, text=True).stdout.splitlines()


def test_a_kernel_runs_where_its_tensor_is(tmp_path: Path) -> None:
    *said, refused = where_kernels_run(tmp_path, ROOT)
    assert said == EXPECTED
    assert "op: device 7 gives CUDA error 101" in refused


def test_a_runtime_that_is_not_told_is_seen(tmp_path: Path) -> None:
    told = "mk::cuda::use_device(where.get_device_index())"
    said = where_kernels_run(tmp_path, planted_checkout(tmp_path, "common/binding.h", told, "0"))
    assert said[0] == "torch 1 ours 0 stream 101; back on 0"
