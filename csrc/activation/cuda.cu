// Activations: a thread takes a step (steps.h), of a gated one the same columns of every row.
#include "../common/steps.h"
#include "math.h"

namespace mk::cuda {
namespace {

constexpr int kThreads = 256;

// Grid: x along a row, y over rows (strided, as y is limited to 65535).
dim3 grid_of(int64_t rows, int64_t steps) {
  return dim3(unsigned((steps + kThreads - 1) / kThreads), unsigned(rows < 65535 ? rows : 65535));
}

template <int kStep>
__device__ int64_t column_of_thread() {
  return (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kStep;
}

template <class F, class T, bool kPacked>
__global__ void __launch_bounds__(kThreads) activation_forward_kernel(ActivationForward a) {
  constexpr int kStep = kStepOf<T, kPacked>;
  const int64_t at = column_of_thread<kStep>();
  if (at >= a.count) return;
  float x[kStep];
  load_step(static_cast<const T*>(a.x) + at, x);
#pragma unroll
  for (int i = 0; i < kStep; ++i) x[i] = F::template graph<T>(x[i]).value;
  store_step(static_cast<T*>(a.out) + at, x);
}

template <class F, class T, bool kPacked>
__global__ void __launch_bounds__(kThreads) activation_backward_kernel(ActivationBackward a) {
  constexpr int kStep = kStepOf<T, kPacked>;
  const int64_t at = column_of_thread<kStep>();
  if (at >= a.count) return;
  float x[kStep], grad[kStep];
  load_step(static_cast<const T*>(a.x) + at, x);
  load_step(static_cast<const T*>(a.grad) + at, grad);
#pragma unroll
  for (int i = 0; i < kStep; ++i) grad[i] *= F::template graph<T>(x[i]).slope;
  store_step(static_cast<T*>(a.grad_x) + at, grad);
}

template <class F, class T, bool kPacked>
__global__ void __launch_bounds__(kThreads) gated_forward_kernel(GatedForward a) {
  constexpr int kStep = kStepOf<T, kPacked>;
  const int64_t at = column_of_thread<kStep>();
  if (at >= a.width) return;
  for (int64_t row = blockIdx.y; row < a.rows; row += gridDim.y) {
    const T* x = static_cast<const T*>(a.x) + row * 2 * a.width + at;
    float gate[kStep], up[kStep];
    load_step(x, gate);
    load_step(x + a.width, up);
#pragma unroll
    for (int i = 0; i < kStep; ++i) up[i] *= F::template graph<T>(gate[i]).value;
    store_step(static_cast<T*>(a.out) + row * a.width + at, up);
  }
}

template <class F, class T, bool kPacked>
__global__ void __launch_bounds__(kThreads) gated_backward_kernel(GatedBackward a) {
  constexpr int kStep = kStepOf<T, kPacked>;
  const int64_t at = column_of_thread<kStep>();
  if (at >= a.width) return;
  for (int64_t row = blockIdx.y; row < a.rows; row += gridDim.y) {
    const T* x = static_cast<const T*>(a.x) + row * 2 * a.width + at;
    float gate[kStep], up[kStep], grad[kStep];
    load_step(x, gate);
    load_step(x + a.width, up);
    load_step(static_cast<const T*>(a.grad) + row * a.width + at, grad);
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      const Graph<float> graph = F::template graph<T>(gate[i]);
      gate[i] = grad[i] * up[i] * graph.slope;
      up[i] = grad[i] * graph.value;
    }
    T* grad_x = static_cast<T*>(a.grad_x) + row * 2 * a.width + at;
    store_step(grad_x, gate);
    store_step(grad_x + a.width, up);
  }
}

}  // namespace

int activation_forward(const ActivationForward& a, void* stream) {
  if (a.count == 0) return 0;
  MK_FOR_DTYPE(a.dtype, T, MK_FOR_ACTIVATION(a.function, F, {
    if (packs_fit<T>(a.count, a.x, a.out))
      MK_LAUNCH((activation_forward_kernel<F, T, true>), grid_of(1, a.count / Pack<T>::size), kThreads, stream)(a);
    else
      MK_LAUNCH((activation_forward_kernel<F, T, false>), grid_of(1, a.count), kThreads, stream)(a);
  }))
  return launch_result();
}

int activation_backward(const ActivationBackward& a, void* stream) {
  if (a.count == 0) return 0;
  MK_FOR_DTYPE(a.dtype, T, MK_FOR_ACTIVATION(a.function, F, {
    if (packs_fit<T>(a.count, a.grad, a.x, a.grad_x))
      MK_LAUNCH((activation_backward_kernel<F, T, true>), grid_of(1, a.count / Pack<T>::size), kThreads, stream)(a);
    else
      MK_LAUNCH((activation_backward_kernel<F, T, false>), grid_of(1, a.count), kThreads, stream)(a);
  }))
  return launch_result();
}

int gated_forward(const GatedForward& a, void* stream) {
  if (a.rows == 0 || a.width == 0) return 0;
  MK_FOR_DTYPE(a.dtype, T, MK_FOR_ACTIVATION(a.function, F, {
    if (packs_fit<T>(a.width, a.x, a.out))
      MK_LAUNCH((gated_forward_kernel<F, T, true>), grid_of(a.rows, a.width / Pack<T>::size), kThreads, stream)(a);
    else
      MK_LAUNCH((gated_forward_kernel<F, T, false>), grid_of(a.rows, a.width), kThreads, stream)(a);
  }))
  return launch_result();
}

int gated_backward(const GatedBackward& a, void* stream) {
  if (a.rows == 0 || a.width == 0) return 0;
  MK_FOR_DTYPE(a.dtype, T, MK_FOR_ACTIVATION(a.function, F, {
    if (packs_fit<T>(a.width, a.grad, a.x, a.grad_x))
      MK_LAUNCH((gated_backward_kernel<F, T, true>), grid_of(a.rows, a.width / Pack<T>::size), kThreads, stream)(a);
    else
      MK_LAUNCH((gated_backward_kernel<F, T, false>), grid_of(a.rows, a.width), kThreads, stream)(a);
  }))
  return launch_result();
}

}  // namespace mk::cuda
