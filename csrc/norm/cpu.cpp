// RMSNorm and LayerNorm, a row at a time: memory is read and written once, all further passes find the row in the
// cache.
#include <cmath>

#include "../common/lanes.h"
#include "../common/rows.h"
#include "math.h"

namespace mk::cpu::MK_TIER {
namespace {

template <class T>
void add_row(const T* x, const T* residual, T* sum, int64_t width) {
  for_lanes(width, [=](auto at) { put(sum, at, get(x, at) + get(residual, at)); });
}

// The sum over a row of term(numbers).
template <class T, class Term>
float sum_over(const T* row, int64_t width, const Term& term) {
  Floats sum = 0.0f;
  for_lanes(width, [&](auto at) { sum += within<T>(at, term(get(row, at))); });
  return sum_of(sum);
}

template <class T>
void forward_row(const NormForward& a, const T* x, const Row<T>& weight, const Row<T>& bias, int64_t row) {
  T* out = static_cast<T*>(a.out) + row * a.width;
  const float count = float(a.width);
  if (a.mean == nullptr) {
    const float squares = sum_over(x, a.width, [](Floats numbers) { return numbers * numbers; });
    const float rstd = a.rstd[row] = 1.0f / std::sqrt(squares / count + a.eps);
    // Rounded before the gain, as the plain formula does.
    for_lanes(a.width, [&](auto at) { put(out, at, rounded_lanes<T>(get(x, at) * rstd) * weight.at(at)); });
    return;
  }
  const float mean = a.mean[row] = sum_over(x, a.width, [](Floats numbers) { return numbers; }) / count;
  const float squares = sum_over(x, a.width, [=](Floats numbers) { return (numbers - mean) * (numbers - mean); });
  const float rstd = a.rstd[row] = 1.0f / std::sqrt(squares / count + a.eps);
  if (bias.empty()) {
    for_lanes(a.width, [&](auto at) { put(out, at, (get(x, at) - mean) * rstd * weight.at(at)); });
  } else {
    for_lanes(a.width, [&](auto at) { put(out, at, (get(x, at) - mean) * rstd * weight.at(at) + bias.at(at)); });
  }
}

// With n = (x - mean) * rstd, h = grad * weight, b the mean of h (0 without centring) and c that of h * n:
// grad_x = (h - n * c - b) * rstd, and the weight and the bias receive grad * n and grad.
struct Statistics {
  float mean, rstd;
  float offset, slope;  // b * rstd and c * rstd^2: offset + slope * (x - mean) is subtracted from grad_x
};

template <bool kCentred, class T>
Statistics statistics_of_row(const NormBackward& a, const Row<T>& weight, int64_t row) {
  const T *grad = static_cast<const T*>(a.grad) + row * a.width, *x = static_cast<const T*>(a.x) + row * a.width;
  const float mean = kCentred ? a.mean[row] : 0.0f, rstd = a.rstd[row], count = float(a.width);
  Floats b = 0.0f, c = 0.0f;  // lanes beyond the row count as 0
  for_lanes(a.width, [&](auto at) {
    const Floats h = get(grad, at) * weight.at(at);
    if constexpr (kCentred) b += h;
    c += h * (get(x, at) - mean);
  });
  return {mean, rstd, sum_of(b) / count * rstd, sum_of(c) / count * rstd * rstd * rstd};
}

// The contribution of a part of the rows to the gradients of weight and bias.
template <class T>
struct Gained {
  Row<T> weight, bias;
};

// Row by row: reading several at a time halves the memory bandwidth.
template <bool kCentred, bool kBias, bool kSum, class T>
void backward_row(const NormBackward& a, const Row<T>& weight, int64_t row, Gained<T>& gained) {
  const T *grad = static_cast<const T*>(a.grad) + row * a.width, *x = static_cast<const T*>(a.x) + row * a.width;
  const T* grad_sum = kSum ? static_cast<const T*>(a.grad_sum) + row * a.width : nullptr;
  T* grad_x = static_cast<T*>(a.grad_x) + row * a.width;
  const Statistics of = statistics_of_row<kCentred>(a, weight, row);
  for_lanes(a.width, [&](auto at) {
    const Floats g = get(grad, at), scaled = g * of.rstd, centred = get(x, at) - of.mean;
    gained.weight.at(at) += scaled * centred;
    if constexpr (kBias) gained.bias.at(at) += g;
    Floats result = scaled * weight.at(at) - (centred * of.slope + of.offset);
    if constexpr (kSum) result += get(grad_sum, at);
    put(grad_x, at, result);
  });
}

template <bool kCentred, bool kBias, bool kSum, class T>
void backward_part(const NormBackward& a, const Row<T>& weight, int64_t begin, int64_t end, Gained<T>& gained) {
  for (int64_t row = begin; row < end; ++row) backward_row<kCentred, kBias, kSum>(a, weight, row, gained);
}

template <class T>
auto backward_for(const NormBackward& a) {
  const bool sum = a.grad_sum != nullptr;
  if (a.mean == nullptr) return sum ? backward_part<false, false, true, T> : backward_part<false, false, false, T>;
  if (a.grad_bias == nullptr) return sum ? backward_part<true, false, true, T> : backward_part<true, false, false, T>;
  return sum ? backward_part<true, true, true, T> : backward_part<true, true, false, T>;
}

}  // namespace

void norm_forward(const NormForward& a) {
  MK_FOR_DTYPE(a.dtype, T, {
    const T* x = static_cast<const T*>(a.x);
    const T* residual = static_cast<const T*>(a.residual);
    T* sum = static_cast<T*>(a.sum);
    const Row<T> weight(a.weight, a.width, a.weight_dtype), bias(a.bias, a.width, a.weight_dtype);
    parallel_for(a.rows, rows_worth_a_thread(a.width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t at = row * a.width;
        if (residual != nullptr) add_row(x + at, residual + at, sum + at, a.width);
        forward_row(a, (residual == nullptr ? x : sum) + at, weight, bias, row);
      }
    });
  })
}

void norm_backward(const NormBackward& a) {
  const RowParts parts = row_parts_of_cpu(a.rows);
  const int64_t stride = a.grad_bias == nullptr ? a.width : 2 * a.width;
  MK_FOR_DTYPE(a.dtype, T, {
    const auto backward = backward_for<T>(a);
    const Row<T> weight(a.weight, a.width, a.weight_dtype);
    parallel_for(parts.count, 1, [&](int64_t begin, int64_t end) {
      Gained<T> gained{Row<T>(a.width), Row<T>(a.grad_bias == nullptr ? 0 : a.width)};
      for (int64_t part = begin; part < end; ++part) {
        gained.weight.clear(), gained.bias.clear();
        backward(a, weight, parts.begin(part), parts.end(part, a.rows), gained);
        gained.weight.copy_to(a.partial + part * stride);
        gained.bias.copy_to(a.partial + part * stride + a.width);
      }
    });
  })
  sum_parts_as(a.weight_dtype, a.partial, parts.count, stride, a.grad_weight, a.width);
  if (a.grad_bias != nullptr)
    sum_parts_as(a.weight_dtype, a.partial + a.width, parts.count, stride, a.grad_bias, a.width);
}

}  // namespace mk::cpu::MK_TIER
