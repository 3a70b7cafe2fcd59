// Scaled, masked softmax, a row of scores at a time, in a buffer of fp32 that stays in the L1 cache.
#include <memory>

#include "../common/math.h"
#include "../common/parallel.h"
#include "math.h"

namespace mk::cpu::MK_TIER {
namespace {

constexpr int64_t kChunk = 1024;  // 4 KiB of fp32: stays in the L1 cache between the loops

// The sum of exp(x - shift), whose terms are stored. Chunks of a fixed size are added in double: exact enough for a
// million columns, and independent of the number of threads.
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

constexpr int64_t kGrain = 1 << 14;  // the least number of scores for a thread of its own
constexpr int64_t kLanes = 16;       // rows in the buffer are filled up to whole vectors: loops have no remainder

int64_t rows_worth_a_thread(int64_t keys) { return keys >= kGrain ? 1 : kGrain / (keys > 0 ? keys : 1); }

int64_t whole_vectors(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// The scores of `count` keys, scaled, -inf where hidden and behind them; returns the largest.
template <class T>
float scaled_scores(const T* x, const bool* mask, float scale, float* kept, int64_t count) {
  float peak = -INFINITY;
  if (mask == nullptr) {
#pragma omp simd reduction(max : peak)
    for (int64_t i = 0; i < count; ++i) {
      const float score = load(x[i]) * scale;
      kept[i] = score;
      peak = score > peak ? score : peak;
    }
  } else {
#pragma omp simd reduction(max : peak)
    for (int64_t i = 0; i < count; ++i) {
      const float score = mask[i] ? load(x[i]) * scale : -INFINITY;
      kept[i] = score;
      peak = score > peak ? score : peak;
    }
  }
  for (int64_t i = count; i < whole_vectors(count); ++i) kept[i] = -INFINITY;
  return peak;
}

template <class T>
void forward_row(const SoftmaxForward& a, int64_t row, float* kept) {
  const T* x = static_cast<const T*>(a.scores) + row * a.keys;
  T* out = static_cast<T*>(a.out) + row * a.keys;
  const int64_t count = visible_keys(row, a.queries, a.keys, a.diagonal);
  const float peak = scaled_scores(x, a.mask_row(row), a.scale, kept, count);
  const double sum = row_exp_into(kept, shift_of(peak), kept, whole_vectors(count));
  if (sum > 0.0) {
    row_scale_into(kept, float(1.0 / sum), out, count);
    for (int64_t i = count; i < a.keys; ++i) out[i] = store<T>(0.0f);
  } else {
    for (int64_t i = 0; i < a.keys; ++i) out[i] = store<T>(NAN);
  }
}

template <class T>
void backward_row(const SoftmaxBackward& a, int64_t row) {
  const T* grad = static_cast<const T*>(a.grad) + row * a.keys;
  const T* out = static_cast<const T*>(a.out) + row * a.keys;
  T* grad_scores = static_cast<T*>(a.grad_scores) + row * a.keys;
  const int64_t count = visible_keys(row, a.queries, a.keys, a.diagonal);
  const float dot = float(row_dot(grad, out, count));
#pragma omp simd
  for (int64_t i = 0; i < count; ++i)
    grad_scores[i] = store<T>((load(grad[i]) - dot) * (load(out[i]) * a.scale));
  for (int64_t i = count; i < a.keys; ++i) grad_scores[i] = store<T>(0.0f);
}

}  // namespace

void softmax_forward(const SoftmaxForward& a) {
  MK_FOR_DTYPE(a.dtype, T, {
    parallel_for(a.rows(), rows_worth_a_thread(a.keys), [&](int64_t begin, int64_t end) {
      const std::unique_ptr<float[]> kept(new float[size_t(whole_vectors(a.keys))]);
      for (int64_t row = begin; row < end; ++row) forward_row<T>(a, row, kept.get());
    });
  })
}

void softmax_backward(const SoftmaxBackward& a) {
  MK_FOR_DTYPE(a.dtype, T, {
    parallel_for(a.rows, rows_worth_a_thread(a.keys), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) backward_row<T>(a, row);
    });
  })
}

}  // namespace mk::cpu::MK_TIER
