// A product of a few rows, bound by reading the weight: one row of it at a time, from memory once. Reading several at a
// time takes up to twice as long. The result for a row of x does not depend on the other rows.
#include "../common/lanes.h"
#include "../common/parallel.h"
#include "math.h"

namespace mk::cpu::MK_TIER {
namespace {

constexpr int64_t kTogether = 4;  // rows of x; for more, the row of the weight is read again, from the cache

template <class T, int64_t kRows>
void times(const FewRows& a, const T* weight, const T* x, float* result) {
  Floats even[kRows], odd[kRows];  // two sums each: an addition to a single sum would wait for the one before
  for (int64_t row = 0; row < kRows; ++row) even[row] = odd[row] = 0.0f;
  int64_t at = 0;
  for (; at + 2 * kLanes <= a.in; at += 2 * kLanes) {
    const Floats one = load_lanes(weight + at), two = load_lanes(weight + at + kLanes);
    for (int64_t row = 0; row < kRows; ++row) {
      even[row] = fused(one, load_lanes(x + row * a.in + at), even[row]);
      odd[row] = fused(two, load_lanes(x + row * a.in + at + kLanes), odd[row]);
    }
  }
  for_lanes(at, a.in, [&](auto place) {
    const Floats last = get(weight, place);
    for (int64_t row = 0; row < kRows; ++row) even[row] = fused(last, get(x + row * a.in, place), even[row]);
  });
  for (int64_t row = 0; row < kRows; ++row) result[row] = sum_of(even[row] + odd[row]);
}

template <class T>
void times_some(const FewRows& a, const T* weight, const T* x, int64_t rows, float* result) {
  switch (rows) {
    case 1: return times<T, 1>(a, weight, x, result);
    case 2: return times<T, 2>(a, weight, x, result);
    case 3: return times<T, 3>(a, weight, x, result);
    default: return times<T, kTogether>(a, weight, x, result);
  }
}

template <class T>
void output(const FewRows& a, int64_t column) {
  const T *weight = static_cast<const T*>(a.weight) + column * a.in, *x = static_cast<const T*>(a.x);
  const float bias = a.bias == nullptr ? 0.0f : load(static_cast<const T*>(a.bias)[column]);
  for (int64_t row = 0; row < a.rows; row += kTogether) {
    const int64_t rows = std::min(kTogether, a.rows - row);
    float sums[kTogether];
    times_some(a, weight, x + row * a.in, rows, sums);
    for (int64_t i = 0; i < rows; ++i)
      static_cast<T*>(a.result)[(row + i) * a.out + column] = store<T>(sums[i] + bias);
  }
}

}  // namespace

void few_rows(const FewRows& a) {
  constexpr int64_t kElements = 1 << 15;  // of the weight, worth a thread of its own
  const int64_t grain = std::max<int64_t>(1, kElements / std::max<int64_t>(1, a.in));
  MK_FOR_DTYPE(a.dtype, T, {
    parallel_for(a.out, grain, [&](int64_t begin, int64_t end) {
      for (int64_t column = begin; column < end; ++column) output<T>(a, column);
    });
  })
}

}  // namespace mk::cpu::MK_TIER
