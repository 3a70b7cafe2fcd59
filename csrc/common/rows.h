// Shared by CPU kernels over rows: rows per thread, conversion to float, sums over parts.
#pragma once

#include <vector>

#include "columns.h"
#include "parallel.h"

namespace mk::cpu::MK_TIER {

// The least number of rows of `width` elements for a thread of its own.
inline int64_t rows_worth_a_thread(int64_t width) {
  constexpr int64_t kElements = 1 << 14;
  return width >= kElements ? 1 : kElements / (width > 0 ? width : 1);
}

template <class T>
void widen(const T* __restrict from, float* __restrict to, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] = load(from[i]);
}

// out[i] is the sum over parts of partial[part * stride + i].
template <class T>
void sum_parts(const float* partial, int64_t parts, int64_t stride, T* out, int64_t width) {
  parallel_for(width, rows_worth_a_thread(parts), [&](int64_t begin, int64_t end) {
    std::vector<float> total(size_t(end - begin), 0.0f);
    for (int64_t part = 0; part < parts; ++part) {
      const float* row = partial + part * stride + begin;
#pragma omp simd
      for (int64_t i = 0; i < end - begin; ++i) total[i] += row[i];
    }
#pragma omp simd
    for (int64_t i = 0; i < end - begin; ++i) out[begin + i] = store<T>(total[i]);
  });
}

inline void sum_parts_as(DType dtype, const float* partial, int64_t parts, int64_t stride, void* out, int64_t width) {
  MK_FOR_DTYPE(dtype, T, { sum_parts(partial, parts, stride, static_cast<T*>(out), width); })
}

}  // namespace mk::cpu::MK_TIER
