// RMSNorm and LayerNorm, a row at a time: memory is read and written once, all further passes find the row in the cache.
#include "norm.h"

#include <algorithm>
#include <cmath>

#include "rows.h"

namespace mk::cpu::MK_TIER {
namespace {

template <class T>
void add_row(const T* __restrict x, const T* __restrict residual, T* __restrict sum, int64_t width) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) sum[i] = store<T>(load(x[i]) + load(residual[i]));
}

// Rounded before the gain, as the plain formula does.
template <class T>
void scale_row(const T* __restrict x, const float* __restrict weight, float rstd, T* __restrict out, int64_t width) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) out[i] = store<T>(rounded<T>(load(x[i]) * rstd) * weight[i]);
}

template <class T>
void centre_and_scale_row(const T* __restrict x, const float* __restrict weight, const float* __restrict bias,
                          float mean, float rstd, T* __restrict out, int64_t width) {
  if (bias == nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) out[i] = store<T>((load(x[i]) - mean) * rstd * weight[i]);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) out[i] = store<T>((load(x[i]) - mean) * rstd * weight[i] + bias[i]);
  }
}

template <class T>
void forward_row(const NormForward& a, const T* x, const float* weight, const float* bias, int64_t row) {
  T* out = static_cast<T*>(a.out) + row * a.width;
  const float count = float(a.width);
  if (a.mean == nullptr) {
    const float squares = sum_of(a.width, [=](int64_t i) { return load(x[i]) * load(x[i]); });
    a.rstd[row] = 1.0f / std::sqrt(squares / count + a.eps);
    scale_row(x, weight, a.rstd[row], out, a.width);
  } else {
    const float mean = sum_of(a.width, [=](int64_t i) { return load(x[i]); }) / count;
    const float squares = sum_of(a.width, [=](int64_t i) { return (load(x[i]) - mean) * (load(x[i]) - mean); });
    a.mean[row] = mean;
    a.rstd[row] = 1.0f / std::sqrt(squares / count + a.eps);
    centre_and_scale_row(x, weight, bias, mean, a.rstd[row], out, a.width);
  }
}

// With n = (x - mean) * rstd, h = grad * weight, b the mean of h (0 without centring) and c that of h * n:
// grad_x = (h - n * c - b) * rstd, and the weight and the bias receive grad * n and grad.
struct Means {
  float b, c;
};

template <bool kCentred, class T>
Means means_of_row(const T* __restrict grad, const T* __restrict x, const float* __restrict weight, float mean,
                   float rstd, int64_t width) {
  float b = 0.0f, c = 0.0f;
#pragma omp simd reduction(+ : b, c)
  for (int64_t i = 0; i < width; ++i) {
    const float h = load(grad[i]) * weight[i];
    if constexpr (kCentred) b += h;
    c += h * (load(x[i]) - mean);
  }
  return {b / float(width), c * rstd / float(width)};
}

template <bool kBias, bool kSum, class T>
void backward_row(const T* __restrict grad, const T* __restrict grad_sum, const T* __restrict x,
                  const float* __restrict weight, float mean, float rstd, Means means, T* __restrict grad_x,
                  float* __restrict for_weight, float* __restrict for_bias, int64_t width) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) {
    const float g = load(grad[i]), n = (load(x[i]) - mean) * rstd;
    for_weight[i] += g * n;
    if constexpr (kBias) for_bias[i] += g;
    float result = (g * weight[i] - n * means.c - means.b) * rstd;
    if constexpr (kSum) result += load(grad_sum[i]);
    grad_x[i] = store<T>(result);
  }
}

template <bool kCentred, bool kBias, bool kSum, class T>
void backward_part(const NormBackward& a, const float* weight, int64_t begin, int64_t end, float* partial) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t at = row * a.width;
    const T *grad = static_cast<const T*>(a.grad) + at, *x = static_cast<const T*>(a.x) + at;
    const T* grad_sum = kSum ? static_cast<const T*>(a.grad_sum) + at : nullptr;
    const float mean = kCentred ? a.mean[row] : 0.0f, rstd = a.rstd[row];
    const Means means = means_of_row<kCentred>(grad, x, weight, mean, rstd, a.width);
    backward_row<kBias, kSum>(grad, grad_sum, x, weight, mean, rstd, means, static_cast<T*>(a.grad_x) + at, partial,
                              partial + a.width, a.width);
  }
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
    const std::vector<float> weight = widened(a.weight, a.width, a.weight_dtype);
    const std::vector<float> bias = widened(a.bias, a.width, a.weight_dtype);
    parallel_for(a.rows, rows_worth_a_thread(a.width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t at = row * a.width;
        if (residual != nullptr) add_row(x + at, residual + at, sum + at, a.width);
        forward_row(a, (residual == nullptr ? x : sum) + at, weight.data(), a.bias == nullptr ? nullptr : bias.data(),
                    row);
      }
    });
  })
}

void norm_backward(const NormBackward& a) {
  const RowParts parts = row_parts_of_cpu(a.rows);
  const int64_t stride = a.grad_bias == nullptr ? a.width : 2 * a.width;
  MK_FOR_DTYPE(a.dtype, T, {
    const auto backward = backward_for<T>(a);
    const std::vector<float> weight = widened(a.weight, a.width, a.weight_dtype);
    parallel_for(parts.count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) {
        float* partial = a.partial + part * stride;
        std::fill(partial, partial + stride, 0.0f);
        backward(a, weight.data(), parts.begin(part), parts.end(part, a.rows), partial);
      }
    });
  })
  sum_parts_as(a.weight_dtype, a.partial, parts.count, stride, a.grad_weight, a.width);
  if (a.grad_bias != nullptr)
    sum_parts_as(a.weight_dtype, a.partial + a.width, parts.count, stride, a.grad_bias, a.width);
}

}  // namespace mk::cpu::MK_TIER
