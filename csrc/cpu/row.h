// What softmax does with a row of numbers. Sums are taken in chunks of a fixed size and added in double: exact enough for
// a million columns, and the same whatever the number of threads.
#pragma once

#include <cmath>
#include <cstdint>

#include "../common/math.h"
#include "../common/softmax.h"

namespace mk::cpu::MK_TIER {
namespace {

constexpr int64_t kChunk = 1024;  // 4 KiB of fp32: stays in the nearest cache between the loops

// The sum of exp(x - shift); the exponentials are kept.
template <class T>
inline double row_exp_into(const T* x, float shift, float* kept, int64_t count) {
  double total = 0.0;
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    const int64_t end = begin + kChunk < count ? begin + kChunk : count;
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = begin; i < end; ++i) {
      const float value = exp_of_difference(load(x[i]) - shift);
      kept[i] = value;
      sum += value;
    }
    total += double(sum);
  }
  return total;
}

template <class T>
inline double row_dot(const T* x, const T* y, int64_t count) {
  double total = 0.0;
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    const int64_t end = begin + kChunk < count ? begin + kChunk : count;
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = begin; i < end; ++i) sum += load(x[i]) * load(y[i]);
    total += double(sum);
  }
  return total;
}

template <class T>
inline void row_scale_into(const float* kept, float factor, T* out, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] = store<T>(kept[i] * factor);
}

}  // namespace
}  // namespace mk::cpu::MK_TIER
