// Binding to torch: checks of tensors, and the call of a kernel on the right backend, device and stream.
#pragma once

#include "device.h"
#include "dtype.h"
#include "stable.h"
#include "tiers.h"

#if defined(MK_EMULATED)
// The CUDA kernels run on the CPU, thread by thread (emulator.h), in a namespace of their own.
#define MK_LIBRARY megatron_emulated
#define MK_HAS_CUDA 1
#else
#define MK_LIBRARY megatron_native
#endif

namespace mk::binding {

using stable::ScalarType;
using stable::Tensor;

inline DType dtype_of(const Tensor& x, const char* op) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return DType::f32;
    case ScalarType::BFloat16: return DType::bf16;
    case ScalarType::Half: return DType::f16;
    default: STD_TORCH_CHECK(false, op, ": only float32, bfloat16 and float16 are built"); return DType::f32;
  }
}

inline void check_contiguous(const Tensor& x, const char* op, const char* name) {
  STD_TORCH_CHECK(x.is_contiguous(), op, ": ", name, " is not contiguous");
}

// The product of all dimensions but the last.
inline int64_t rows_of(const Tensor& x) {
  const int64_t width = x.size(-1);
  return width == 0 ? 0 : x.numel() / width;
}

}  // namespace mk::binding

namespace mk::binding {

// torch's current stream (stream.cpp).
void* current_stream(int32_t device_index);

struct Cpu {
  static constexpr bool gpu = false;
};
struct Cuda {
  static constexpr bool gpu = true;
};

// Runs a launcher (an operation's cuda.cu) on the current stream of the tensor's device.
template <class Args>
void on_gpu(int (*launch)(const Args&, void* stream), const Args& args, const Tensor& where, const char* op) {
  void* stream = nullptr;
#if !defined(MK_EMULATED)
  // torch's guard restores the caller's device afterwards; it does not set the device of our own CUDA runtime.
  const stable::DeviceGuard guard(where.get_device_index());
  stream = current_stream(where.get_device_index());
  const int unusable = mk::cuda::use_device(where.get_device_index());
  STD_TORCH_CHECK(unusable == 0, op, ": device ", where.get_device_index(), " gives CUDA error ", unusable);
#endif
  const int error = launch(args, stream);
  STD_TORCH_CHECK(error == 0, op, ": CUDA error ", error);
}

}  // namespace mk::binding

// MK_KERNEL(name, Args) declares what an operation's cpu.cpp and cuda.cu define: mk::cpu::name(const Args&) and
// mk::cuda::name(const Args&, void* stream), which returns 0 or a CUDA error.
#define MK_KERNEL(name, Args)            \
  MK_CPU_KERNEL(name, Args)              \
  namespace mk::cuda {                   \
  int name(const Args&, void* stream);   \
  }

// MK_RUN(Backend, kernel, args, tensor): mk::cpu::kernel(args), or mk::cuda::kernel(args, stream of the tensor).
#define MK_RUN(Backend, kernel, args, where)                                \
  do {                                                                      \
    if constexpr (Backend::gpu)                                             \
      ::mk::binding::on_gpu(::mk::cuda::kernel, args, where, #kernel);      \
    else                                                                    \
      ::mk::cpu::kernel(args);                                              \
  } while (false)

// MK_REGISTER(implement): calls implement<Backend>(library) for every backend that is built.
#if defined(MK_EMULATED)
#define MK_REGISTER(implement) \
  STABLE_TORCH_LIBRARY_IMPL(MK_LIBRARY, CPU, library) { implement<::mk::binding::Cuda>(library); }
#elif defined(MK_HAS_CUDA)
#define MK_REGISTER(implement)                                                                  \
  STABLE_TORCH_LIBRARY_IMPL(MK_LIBRARY, CPU, library) { implement<::mk::binding::Cpu>(library); } \
  STABLE_TORCH_LIBRARY_IMPL(MK_LIBRARY, CUDA, library) { implement<::mk::binding::Cuda>(library); }
#else
#define MK_REGISTER(implement) \
  STABLE_TORCH_LIBRARY_IMPL(MK_LIBRARY, CPU, library) { implement<::mk::binding::Cpu>(library); }
#endif
