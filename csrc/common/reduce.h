// Sums and maxima over the threads of a block, in a fixed order: the same input gives the same bits.
#pragma once

#include "gpu.h"
#include "launch.h"

namespace mk {

struct Sum {
  __device__ static float join(float a, float b) { return a + b; }
  __device__ static float nothing() { return 0.0f; }
};

struct Max {
  __device__ static float join(float a, float b) { return gpu::larger(a, b); }  // NaN if either is NaN
  __device__ static float nothing() { return -INFINITY; }
};

template <class Op>
__device__ float reduce_warp(float value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value = Op::join(value, __shfl_xor_sync(~0u, value, mask));
  return value;
}

// Every thread of a block of kThreads (a multiple of 32, at most 1024) gets the result.
template <class Op, int kThreads>
__device__ float reduce_block(float value) {
  static_assert(kThreads % 32 == 0 && kThreads <= 1024);
  MK_SHARED(float, of_warp, 32);
  value = reduce_warp<Op>(value);
  __syncthreads();  // an earlier reduction may still be read
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  value = int(threadIdx.x % 32) < kThreads / 32 ? of_warp[threadIdx.x % 32] : Op::nothing();
  return reduce_warp<Op>(value);
}

}  // namespace mk
