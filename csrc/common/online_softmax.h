// Online softmax: maximum and sum of exponentials of a row in one read, by the threads of a block.
#pragma once

#include "math.h"
#include "reduce.h"

namespace mk::cuda {

// Maximum of some numbers and the sum of exp(number - maximum).
struct Running {
  float peak = -INFINITY, sum = 0.0f;
};

// T: the type that the values were loaded from.
template <class T, int kCount>
__device__ void take(Running& r, const float (&values)[kCount]) {
  float peak = r.peak;
#pragma unroll
  for (int i = 0; i < kCount; ++i) peak = Max::join(peak, values[i]);
  const float shift = shift_of(peak);
  float sum = r.sum * exp_for<T>(r.peak - shift);
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum += exp_for<T>(values[i] - shift);
  r.peak = peak, r.sum = sum;
}

// Every thread gets the row's. Joined in a fixed order: runs are bit-equal.
template <int kThreads>
__device__ Running join_block(Running r) {
  const float peak = reduce_block<Max, kThreads>(r.peak);
  const float sum = reduce_block<Sum, kThreads>(r.sum * exp(r.peak - shift_of(peak)));
  return Running{peak, sum};
}

}  // namespace mk::cuda
