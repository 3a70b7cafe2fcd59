// Cross-entropy, a row of logits at a time: a row fits the cache, so only its first read comes from memory.
#include <cmath>

#include "../common/lanes.h"
#include "../common/math.h"
#include "../common/parallel.h"
#include "math.h"

namespace mk::cpu::MK_TIER {
namespace {

constexpr int64_t kGrain = 1 << 15;  // the least number of logits for a thread of its own

int64_t rows_worth_a_thread(int64_t columns) { return columns >= kGrain ? 1 : kGrain / (columns > 0 ? columns : 1); }

// NaN is ignored here: it reaches the result through the sum. -inf for an empty row.
template <class T>
float row_max(const T* x, int64_t count) {
  Floats peak = -INFINITY;
  for_lanes(count, [&](auto at) { peak = larger(get(x, at, -INFINITY), peak); });
  return largest_of(peak);
}

// If a number is inf the sum is inf, or NaN if there is a NaN: differences from inf would not show it.
template <class T>
double row_sum_with_inf(const T* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    if (load(x[i]) != load(x[i])) return NAN;
  return INFINITY;
}

// The sum of exp(x - shift); keep(place, exponentials) is called with the terms. Chunks of a fixed size are added in
// double: exact enough for a million columns, and the same whatever the number of threads.
template <class T, class Keep>
double row_exp_sum(const T* x, float shift, int64_t count, const Keep& keep) {
  constexpr int64_t kChunk = 1024;
  double total = 0.0;
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    Floats sum = 0.0f;
    for_lanes(begin, begin + kChunk < count ? begin + kChunk : count, [&](auto at) {
      const Floats value = exp_of_difference<T>(get(x, at, -INFINITY) - shift);
      keep(at, value);
      sum += value;
    });
    total += double(sum_of(sum));
  }
  return total;
}

// NaN for a label outside of the vocabulary: a wrong label must never look like a loss.
template <class T>
float target_of(const T* row, int64_t label, const XentForward& a) {
  if (label < 0 || label >= a.vocabulary) return NAN;
  const int64_t local = label - a.first;
  return local >= 0 && local < a.columns ? load(row[local]) : 0.0f;
}

// In double: the loss is rounded once.
double log_sum_exp(float peak, double sum) { return double(shift_of(peak)) + std::log(sum); }

template <class T>
void forward_row(const XentForward& a, int64_t row) {
  const T* x = static_cast<const T*>(a.logits) + row * a.stride;
  const float peak = row_max(x, a.columns), target = target_of(x, a.labels[row], a);
  const double sum = peak == INFINITY ? row_sum_with_inf(x, a.columns)
                                      : row_exp_sum(x, shift_of(peak), a.columns, [](auto, Floats) {});
  if (a.peak != nullptr) {
    a.peak[row] = peak, a.sum[row] = float(sum), a.target[row] = target;
  } else {
    const double total = log_sum_exp(peak, sum);
    a.loss[row] = float(total - double(target)), a.log_sum_exp[row] = float(total);
  }
}

template <class T>
void backward_row(const XentBackward& a, int64_t row) {
  const T* x = static_cast<const T*>(a.logits) + row * a.stride;
  T* out = static_cast<T*>(a.out) + row * a.out_stride;
  const float shift = quiet_nan(a.log_sum_exp[row]), grad = quiet_nan(a.grad[row]);
  const int64_t label = a.labels[row] - a.first;
  const bool here = label >= 0 && label < a.columns;
  const float target = here ? load(x[label]) : 0.0f;  // read before it may be overwritten
  for_lanes(a.columns, [=](auto at) { put(out, at, exp_of_difference<T>(get(x, at) - shift) * grad); });
  if (here) out[label] = store<T>((exp_of_difference<T>(target - shift) - 1.0f) * grad);
  std::memset(static_cast<void*>(out + a.columns), 0, size_t(a.out_width - a.columns) * sizeof(T));
}

// `kept` holds the exponentials between the two passes.
template <class T>
void in_place_row(const XentInPlace& a, int64_t row, Row<T>& kept) {
  T* x = static_cast<T*>(a.logits) + row * a.stride;
  const int64_t label = a.labels[row];
  const bool known = label >= 0 && label < a.columns;
  const float target = known ? load(x[label]) : NAN;  // read before it is overwritten
  const float peak = row_max(x, a.columns), shift = shift_of(peak);
  const double infinite = peak == INFINITY ? row_sum_with_inf(x, a.columns) : 0.0;
  const double sum = row_exp_sum(x, shift, a.columns, [&](auto at, Floats value) {
    kept.at(at) = value;
    __builtin_prefetch(x + a.stride + at.at, 1, 2);  // the next row, while memory has nothing else to do
  });
  const float factor = infinite == 0.0 ? float(1.0 / sum) : 0.0f;
  for_lanes(a.columns, [&](auto at) { put(x, at, kept.at(at) * factor); });
  if (known) x[label] = store<T>(exp_of_difference<T>(target - shift) * factor - 1.0f);
  std::memset(static_cast<void*>(x + a.columns), 0, size_t(a.width - a.columns) * sizeof(T));
  a.loss[row] = float(log_sum_exp(peak, infinite == 0.0 ? sum : infinite) - double(target));
}

template <class T>
void in_place_rows(const XentInPlace& a, int64_t begin, int64_t end) {
  Row<T> kept(a.columns);
  for (int64_t row = begin; row < end; ++row) in_place_row<T>(a, row, kept);
}

}  // namespace

void xent_forward(const XentForward& a) {
  MK_FOR_DTYPE(a.dtype, T, {
    parallel_for(a.rows, rows_worth_a_thread(a.columns), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) forward_row<T>(a, row);
    });
  })
}

void xent_backward(const XentBackward& a) {
  MK_FOR_DTYPE(a.dtype, T, {
    parallel_for(a.rows, rows_worth_a_thread(a.columns), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) backward_row<T>(a, row);
    });
  })
}

void xent_in_place(const XentInPlace& a) {
  MK_FOR_DTYPE(a.dtype, T, {
    parallel_for(a.rows, rows_worth_a_thread(a.columns),
                 [&](int64_t begin, int64_t end) { in_place_rows<T>(a, begin, end); });
  })
}

}  // namespace mk::cpu::MK_TIER
