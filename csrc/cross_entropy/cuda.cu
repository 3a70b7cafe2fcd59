// Cross-entropy, a block of threads per row of logits: maximum and sum in one read, and the gradient in a second read,
// which finds the row in the L2 cache when both happen at once.
#include "../common/launch.h"
#include "../common/online_softmax.h"
#include "../common/vec.h"
#include "math.h"

namespace mk::cuda {
namespace {

constexpr int kThreads = 512;
// In place: rows are read a second time, which hits the L2 cache (50 MB on an H100) only if few enough rows are in
// flight. Twice 1024 threads on each of 132 processors are 264 rows, 26 MB of 50304 halves.
constexpr int kThreadsInPlace = 1024;

// Where a row's 16-byte packs begin: rows of an odd width are not aligned.
template <class T>
__device__ int64_t unaligned_head(const T* row, int64_t columns) {
  const int64_t head = int64_t((16 - reinterpret_cast<uintptr_t>(row) % 16) % 16 / sizeof(T));
  return head < columns ? head : columns;
}

template <class T, int kThreads>
__device__ Running read_row(const T* row, int64_t columns) {
  constexpr int kStep = Pack<T>::size;
  Running r;
  const int64_t head = unaligned_head(row, columns), packs = (columns - head) / kStep, tail = head + packs * kStep;
  for (int64_t i = threadIdx.x; i < packs; i += kThreads) {
    const Pack<T> pack = load_pack(row + head + i * kStep);
    float values[kStep];
#pragma unroll
    for (int j = 0; j < kStep; ++j) values[j] = load(pack.at[j]);
    take<T>(r, values);
  }
  // Fewer than two packs are left, at the ends of the row.
  const int64_t ends = head + columns - tail, mine = threadIdx.x;
  if (mine < ends) {
    const float value[1] = {load(row[mine < head ? mine : tail + mine - head])};
    take<T>(r, value);
  }
  return r;
}

// In double: the loss is rounded once. Differences from inf are no numbers, but the sum is inf.
__device__ double log_sum_exp(Running r) {
  return r.peak == INFINITY ? double(INFINITY) : double(shift_of(r.peak)) + log(double(r.sum));
}

// NaN for a label outside of the vocabulary: a wrong label must never look like a loss.
template <class T>
__device__ float target_of(const T* row, int64_t label, int64_t first, int64_t columns, int64_t vocabulary) {
  if (label < 0 || label >= vocabulary) return NAN;
  const int64_t local = label - first;
  return local >= 0 && local < columns ? load(row[local]) : 0.0f;
}

template <class T>
__global__ void __launch_bounds__(kThreads) forward_kernel(XentForward a) {
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* x = static_cast<const T*>(a.logits) + row * a.stride;
    const Running r = join_block<kThreads>(read_row<T, kThreads>(x, a.columns));
    if (threadIdx.x != 0) continue;
    const float target = target_of(x, a.labels[row], a.first, a.columns, a.vocabulary);
    if (a.peak != nullptr) {
      a.peak[row] = r.peak, a.sum[row] = r.sum, a.target[row] = target;
    } else {
      const double total = log_sum_exp(r);
      a.loss[row] = float(total - double(target)), a.log_sum_exp[row] = float(total);
    }
  }
}

// One row of (exp(x - shift) * factor - onehot) * grad over its own or another row; local: the label's column or -1.
template <class T>
struct GradientRow {
  const T* x;
  T* out;
  float shift, factor, grad;
  int64_t local;

  // hit: whether the logit is the label's.
  __device__ T of(T logit, bool hit) const {
    const float probability = exp_for<T>(load(logit) - shift) * factor;
    return store<T>((hit ? probability - 1.0f : probability) * grad);
  }
  __device__ void write(int64_t column) const { out[column] = of(x[column], column == local); }
};

template <int kThreads, class T>
__device__ void write_row(const GradientRow<T>& g, int64_t columns, int64_t width) {
  constexpr int kStep = Pack<T>::size;
  const bool packed = reinterpret_cast<uintptr_t>(g.x) % 16 == reinterpret_cast<uintptr_t>(g.out) % 16;
  const int64_t head = packed ? unaligned_head(g.x, columns) : columns;
  const int64_t packs = (columns - head) / kStep, tail = head + packs * kStep;
  for (int64_t i = threadIdx.x; i < packs; i += kThreads) {
    const int64_t at = head + i * kStep;
    Pack<T> pack = load_pack(g.x + at);
    const int64_t label = g.local - at;
    const int hit = label >= 0 && label < kStep ? int(label) : kStep;  // compared as 32 bits for each number
#pragma unroll
    for (int j = 0; j < kStep; ++j) pack.at[j] = g.of(pack.at[j], j == hit);
    store_pack(g.out + at, pack);
  }
  for (int64_t i = threadIdx.x; i < head; i += kThreads) g.write(i);
  for (int64_t i = tail + threadIdx.x; i < columns; i += kThreads) g.write(i);
  for (int64_t i = columns + threadIdx.x; i < width; i += kThreads) g.out[i] = store<T>(0.0f);
}

template <class T>
__global__ void __launch_bounds__(kThreads) backward_kernel(XentBackward a) {
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* x = static_cast<const T*>(a.logits) + row * a.stride;
    T* out = static_cast<T*>(a.out) + row * a.out_stride;
    const int64_t local = a.labels[row] - a.first;
    write_row<kThreads>(GradientRow<T>{x, out, a.log_sum_exp[row], 1.0f, a.grad[row], local}, a.columns, a.out_width);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreadsInPlace, 2) in_place_kernel(XentInPlace a) {
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    T* x = static_cast<T*>(a.logits) + row * a.stride;
    const int64_t label = a.labels[row];
    const float target = target_of(x, label, 0, a.columns, a.columns);
    // The barriers of the reduction lie between the read of the target and the first write: it is read intact.
    const Running r = join_block<kThreadsInPlace>(read_row<T, kThreadsInPlace>(x, a.columns));
    const float factor = r.peak == INFINITY ? 0.0f : 1.0f / r.sum;
    write_row<kThreadsInPlace>(GradientRow<T>{x, x, shift_of(r.peak), factor, 1.0f, label}, a.columns, a.width);
    if (threadIdx.x == 0) a.loss[row] = float(log_sum_exp(r) - double(target));
  }
}

dim3 grid_of(int64_t rows) { return dim3(unsigned(rows < 1 << 30 ? rows : 1 << 30)); }

}  // namespace

int xent_forward(const XentForward& a, void* stream) {
  if (a.rows == 0) return 0;
  MK_FOR_DTYPE(a.dtype, T, { MK_LAUNCH(forward_kernel<T>, grid_of(a.rows), kThreads, stream)(a); })
  return launch_result();
}

int xent_backward(const XentBackward& a, void* stream) {
  if (a.rows == 0 || a.out_width == 0) return 0;
  MK_FOR_DTYPE(a.dtype, T, { MK_LAUNCH(backward_kernel<T>, grid_of(a.rows), kThreads, stream)(a); })
  return launch_result();
}

int xent_in_place(const XentInPlace& a, void* stream) {
  if (a.rows == 0) return 0;
  MK_FOR_DTYPE(a.dtype, T, { MK_LAUNCH(in_place_kernel<T>, grid_of(a.rows), kThreadsInPlace, stream)(a); })
  return launch_result();
}

}  // namespace mk::cuda
