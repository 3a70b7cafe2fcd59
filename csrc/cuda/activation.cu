// Activations: a thread takes a pack of 16 bytes of a row where all rows are aligned to it, else one number.
#include "activation.h"

#include "../common/launch.h"
#include "../common/math.h"
#include "../common/vec.h"

namespace mk::cuda {
namespace {

constexpr int kThreads = 256;

// Grid: x along a row, y over rows (strided, as y is limited to 65535).
dim3 grid_of(int64_t rows, int64_t units) {
  return dim3(unsigned((units + kThreads - 1) / kThreads), unsigned(rows < 65535 ? rows : 65535));
}

template <class T>
__device__ T swiglu_one(T gate, T up) {
  return store<T>(silu(load(gate)) * load(up));
}

template <class T, bool kPacked>
__global__ void __launch_bounds__(kThreads) swiglu_forward_kernel(SwigluForward a) {
  constexpr int kStep = kPacked ? Pack<T>::size : 1;
  const int64_t at = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kStep;
  if (at >= a.width) return;
  for (int64_t row = blockIdx.y; row < a.rows; row += gridDim.y) {
    const T* gate = static_cast<const T*>(a.x) + row * 2 * a.width + at;
    T* out = static_cast<T*>(a.out) + row * a.width + at;
    if constexpr (kPacked) {
      const Pack<T> gates = load_pack(gate), ups = load_pack(gate + a.width);
      Pack<T> outs;
#pragma unroll
      for (int i = 0; i < kStep; ++i) outs.at[i] = swiglu_one(gates.at[i], ups.at[i]);
      store_pack(out, outs);
    } else {
      *out = swiglu_one(*gate, gate[a.width]);
    }
  }
}

template <class T>
__device__ void swiglu_one_backward(T gate, T up, T grad, T& grad_gate, T& grad_up) {
  const float g = load(gate), upstream = load(grad);
  grad_gate = store<T>(upstream * load(up) * silu_derivative(g));
  grad_up = store<T>(upstream * silu(g));
}

template <class T, bool kPacked>
__global__ void __launch_bounds__(kThreads) swiglu_backward_kernel(SwigluBackward a) {
  constexpr int kStep = kPacked ? Pack<T>::size : 1;
  const int64_t at = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kStep;
  if (at >= a.width) return;
  for (int64_t row = blockIdx.y; row < a.rows; row += gridDim.y) {
    const T* gate = static_cast<const T*>(a.x) + row * 2 * a.width + at;
    const T* grad = static_cast<const T*>(a.grad) + row * a.width + at;
    T* grad_gate = static_cast<T*>(a.grad_x) + row * 2 * a.width + at;
    if constexpr (kPacked) {
      const Pack<T> gates = load_pack(gate), ups = load_pack(gate + a.width), upstream = load_pack(grad);
      Pack<T> grad_gates, grad_ups;
#pragma unroll
      for (int i = 0; i < kStep; ++i)
        swiglu_one_backward(gates.at[i], ups.at[i], upstream.at[i], grad_gates.at[i], grad_ups.at[i]);
      store_pack(grad_gate, grad_gates);
      store_pack(grad_gate + a.width, grad_ups);
    } else {
      swiglu_one_backward(*gate, gate[a.width], *grad, *grad_gate, grad_gate[a.width]);
    }
  }
}

template <class T>
bool packs_fit(const void* x, const void* out, int64_t width) {
  return width % Pack<T>::size == 0 && aligned(static_cast<const T*>(x)) && aligned(static_cast<const T*>(out));
}

}  // namespace

int swiglu_forward(const SwigluForward& a, void* stream) {
  if (a.rows == 0 || a.width == 0) return 0;
  MK_FOR_DTYPE(a.dtype, T, {
    if (packs_fit<T>(a.x, a.out, a.width)) {
      const dim3 grid = grid_of(a.rows, a.width / Pack<T>::size);
      MK_LAUNCH((swiglu_forward_kernel<T, true>), grid, kThreads, stream)(a);
    } else {
      MK_LAUNCH((swiglu_forward_kernel<T, false>), grid_of(a.rows, a.width), kThreads, stream)(a);
    }
  })
  return launch_result();
}

int swiglu_backward(const SwigluBackward& a, void* stream) {
  if (a.rows == 0 || a.width == 0) return 0;
  MK_FOR_DTYPE(a.dtype, T, {
    if (packs_fit<T>(a.x, a.grad_x, a.width) && aligned(static_cast<const T*>(a.grad))) {
      const dim3 grid = grid_of(a.rows, a.width / Pack<T>::size);
      MK_LAUNCH((swiglu_backward_kernel<T, true>), grid, kThreads, stream)(a);
    } else {
      MK_LAUNCH((swiglu_backward_kernel<T, false>), grid_of(a.rows, a.width), kThreads, stream)(a);
    }
  })
  return launch_result();
}

}  // namespace mk::cuda
