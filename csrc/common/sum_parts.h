// The second stage of columns.h on a GPU: the parts of every column, in a fixed order.
#pragma once

#include "columns.h"
#include "launch.h"

namespace mk::cuda {

// Per block. Each lane sums every 64th part of its column. A width of 768 makes 96 blocks, and 8 adjacent floats are
// one memory transaction of 32 bytes.
constexpr int kColumns = 8, kLanes = 64;

template <class T>
__global__ void __launch_bounds__(kColumns* kLanes)
    sum_parts_kernel(const float* partial, int64_t parts, int64_t stride, T* out, int64_t width) {
  MK_SHARED(float, of_lane, kColumns* kLanes);
  const int column = threadIdx.x % kColumns, lane = threadIdx.x / kColumns;
  const int64_t at = int64_t(blockIdx.x) * kColumns + column;
  float sum = 0.0f;
  if (at < width) {
#pragma unroll 8  // loads in flight
    for (int64_t part = lane; part < parts; part += kLanes) sum += partial[part * stride + at];
  }
  of_lane[threadIdx.x] = sum;
  __syncthreads();
  if (lane > 0 || at >= width) return;
  for (int i = 1; i < kLanes; ++i) sum += of_lane[i * kColumns + column];
  out[at] = store<T>(sum);
}

// out[i] = the sum over parts of partial[part * stride + i].
inline void sum_parts(DType dtype, const float* partial, int64_t parts, int64_t stride, void* out, int64_t width,
                      void* stream) {
  const unsigned blocks = unsigned((width + kColumns - 1) / kColumns);
  MK_FOR_DTYPE(dtype, T, {
    MK_LAUNCH((sum_parts_kernel<T>), blocks, kColumns* kLanes, stream)
    (partial, parts, stride, static_cast<T*>(out), width);
  })
}

}  // namespace mk::cuda
