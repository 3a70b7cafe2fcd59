// The optimizer on flat buffers: every number is read and written once.
#include <type_traits>

#include "../common/parallel.h"
#include "math.h"

namespace mk::cpu::MK_TIER {
namespace {

constexpr int64_t kGrain = 1 << 14;  // the least number of elements for a thread of its own
constexpr int kLanes = 16;           // parallel sums, the same number for every instruction set

template <class Grad, class Moment, Weights kKept>
void adamw_range(const AdamW& a, const AdamStep& step, int64_t begin, int64_t end) {
  constexpr bool kF16 = kKept == Weights::f16_copy;
  using Copy = std::conditional_t<kF16, f16, bf16>;
  float* __restrict weights = a.weights;
  Copy* __restrict copy = static_cast<Copy*>(a.copy);
  int16_t* __restrict remainder = a.remainder;
  Moment* __restrict exp_avg = static_cast<Moment*>(a.exp_avg);
  Moment* __restrict exp_avg_sq = static_cast<Moment*>(a.exp_avg_sq);
  const Grad* __restrict grad = static_cast<const Grad*>(a.grad);
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) {
    float m = load(exp_avg[i]), v = load(exp_avg_sq[i]), weight;
    if constexpr (kKept == Weights::remainder)
      weight = joined(copy[i], remainder[i]);
    else
      weight = weights[i];
    weight = adam_update(step, weight, load(grad[i]), m, v);
    exp_avg[i] = store<Moment>(m);
    exp_avg_sq[i] = store<Moment>(v);
    if constexpr (kKept == Weights::remainder) {
      const uint32_t bits = bits_of(weight);
      copy[i].bits = uint16_t((bits + 0x8000u) >> 16);
      remainder[i] = int16_t(bits & 0xffffu);
    } else {
      weights[i] = weight;
      if constexpr (kKept != Weights::in_place) copy[i] = store<Copy>(weight);
    }
  }
}

template <class T>
double square_sum_of_part(const T* x, int64_t size) {
  double lanes[kLanes] = {};
  const int64_t whole = size / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
#pragma omp simd
    for (int lane = 0; lane < kLanes; ++lane) {
      const double value = load(x[i + lane]);
      lanes[lane] += value * value;
    }
  }
  for (int64_t i = whole; i < size; ++i) lanes[i - whole] += double(load(x[i])) * double(load(x[i]));
  double sum = 0.0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

}  // namespace

void adamw(const AdamW& a) {
  const StepControl control = *a.control;
  if (control.applied == 0.0f) return;
  MK_FOR_ADAM(a, Grad, Moment, kKept, {
    parallel_for(a.size, kGrain, [&](int64_t begin, int64_t end) {
      int64_t segment = 0;
      while (segment < a.segments.count && a.segments.ends[segment] <= begin) ++segment;
      for (; begin < end; ++segment) {
        const int64_t stop = a.segments.ends[segment] < end ? a.segments.ends[segment] : end;
        adamw_range<Grad, Moment, kKept>(a, adam_step(a, control, segment), begin, stop);
        begin = stop;
      }
    });
  })
}

void square_sum(const SquareSum& a) {
  const int64_t parts = square_sum_parts(a.size);
  MK_FOR_DTYPE(a.dtype, T, {
    const T* x = static_cast<const T*>(a.x);
    parallel_for(parts, 1, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) {
        const int64_t start = part * kSquareSumPart, left = a.size - start;
        a.partial[part] = square_sum_of_part(x + start, left < kSquareSumPart ? left : kSquareSumPart);
      }
    });
  })
  double sum = 0.0;
  for (int64_t part = 0; part < parts; ++part) sum += a.partial[part];
  *a.out = sum;
}

}  // namespace mk::cpu::MK_TIER
