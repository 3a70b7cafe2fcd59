// Scaled, masked softmax, a block of threads per row of scores, which it reads twice and writes once.
#include "../common/launch.h"
#include "../common/online_softmax.h"
#include "math.h"

namespace mk::cuda {
namespace {

constexpr int kThreads = 128;

template <class T>
__device__ float score_at(const T* x, const bool* mask, float scale, int64_t key) {
  return mask == nullptr || mask[key] ? load(x[key]) * scale : -INFINITY;
}

template <class T>
__global__ void __launch_bounds__(kThreads) forward_kernel(SoftmaxForward a) {
  for (int64_t row = blockIdx.x; row < a.rows(); row += gridDim.x) {
    const T* x = static_cast<const T*>(a.scores) + row * a.keys;
    T* out = static_cast<T*>(a.out) + row * a.keys;
    const bool* mask = a.mask_row(row);
    const int64_t count = visible_keys(row, a.queries, a.keys, a.diagonal);
    Running mine;
    for (int64_t key = threadIdx.x; key < count; key += kThreads) {
      const float value[1] = {score_at(x, mask, a.scale, key)};
      take<T>(mine, value);
    }
    const Running all = join_block<kThreads>(mine);
    const float shift = shift_of(all.peak), factor = all.sum > 0.0f ? 1.0f / all.sum : NAN;
    for (int64_t key = threadIdx.x; key < a.keys; key += kThreads) {
      const float share = key < count ? exp_for<T>(score_at(x, mask, a.scale, key) - shift) : 0.0f;
      out[key] = store<T>(share * factor);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) backward_kernel(SoftmaxBackward a) {
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* grad = static_cast<const T*>(a.grad) + row * a.keys;
    const T* out = static_cast<const T*>(a.out) + row * a.keys;
    T* grad_scores = static_cast<T*>(a.grad_scores) + row * a.keys;
    const int64_t count = visible_keys(row, a.queries, a.keys, a.diagonal);
    float sum = 0.0f;
    for (int64_t key = threadIdx.x; key < count; key += kThreads) sum += load(grad[key]) * load(out[key]);
    const float dot = reduce_block<Sum, kThreads>(sum);
    for (int64_t key = threadIdx.x; key < a.keys; key += kThreads)
      grad_scores[key] = store<T>(key < count ? (load(grad[key]) - dot) * (load(out[key]) * a.scale) : 0.0f);
  }
}

dim3 grid_of(int64_t rows) { return dim3(unsigned(rows < 1 << 30 ? rows : 1 << 30)); }

}  // namespace

int softmax_forward(const SoftmaxForward& a, void* stream) {
  if (a.rows() == 0 || a.keys == 0) return 0;
  MK_FOR_DTYPE(a.dtype, T, { MK_LAUNCH(forward_kernel<T>, grid_of(a.rows()), kThreads, stream)(a); })
  return launch_result();
}

int softmax_backward(const SoftmaxBackward& a, void* stream) {
  if (a.rows == 0 || a.keys == 0) return 0;
  MK_FOR_DTYPE(a.dtype, T, { MK_LAUNCH(backward_kernel<T>, grid_of(a.rows), kThreads, stream)(a); })
  return launch_result();
}

}  // namespace mk::cuda
