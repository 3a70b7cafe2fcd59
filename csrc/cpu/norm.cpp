// RMSNorm and LayerNorm, a row at a time: memory is read and written once, all further passes find the row in the cache.
#include "norm.h"

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
  for (int64_t i = 0; i < width; ++i) out[i] = store<T>(load(store<T>(load(x[i]) * rstd)) * weight[i]);
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

// With n = (x - mean) * rstd, h = grad * weight, c the mean of h * n and b that of h (0 without centring):
// grad_x = (h - n * c - b) * rstd, and the weight and the bias receive grad * n and grad.
template <class T, bool kBias>
void backward_row(const T* __restrict grad, const T* __restrict grad_sum, const T* __restrict x,
                  const float* __restrict weight, float mean, float rstd, float b, float c, T* __restrict grad_x,
                  float* __restrict for_weight, float* __restrict for_bias, int64_t width) {
  const auto element = [&](int64_t i, float beside) {
    const float g = load(grad[i]), n = (load(x[i]) - mean) * rstd;
    for_weight[i] += g * n;
    if constexpr (kBias) for_bias[i] += g;
    grad_x[i] = store<T>((g * weight[i] - n * c - b) * rstd + beside);
  };
  if (grad_sum == nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) element(i, 0.0f);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) element(i, load(grad_sum[i]));
  }
}

template <class T>
void backward_part(const NormBackward& a, const float* weight, int64_t begin, int64_t end, float* partial) {
  const T* grad_sums = static_cast<const T*>(a.grad_sum);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t at = row * a.width;
    const T *grad = static_cast<const T*>(a.grad) + at, *x = static_cast<const T*>(a.x) + at;
    const T* grad_sum = grad_sums == nullptr ? nullptr : grad_sums + at;
    T* grad_x = static_cast<T*>(a.grad_x) + at;
    const float rstd = a.rstd[row], mean = a.mean == nullptr ? 0.0f : a.mean[row], count = float(a.width);
    const float c =
        sum_of(a.width, [=](int64_t i) { return load(grad[i]) * weight[i] * (load(x[i]) - mean); }) * rstd / count;
    const float b =
        a.mean == nullptr ? 0.0f : sum_of(a.width, [=](int64_t i) { return load(grad[i]) * weight[i]; }) / count;
    if (a.grad_bias == nullptr)
      backward_row<T, false>(grad, grad_sum, x, weight, mean, rstd, b, c, grad_x, partial, nullptr, a.width);
    else
      backward_row<T, true>(grad, grad_sum, x, weight, mean, rstd, b, c, grad_x, partial, partial + a.width, a.width);
  }
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
    const std::vector<float> weight = widened(a.weight, a.width, a.weight_dtype);
    parallel_for(parts.count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) {
        float* partial = a.partial + part * stride;
        std::fill(partial, partial + stride, 0.0f);
        backward_part<T>(a, weight.data(), parts.begin(part), parts.end(part, a.rows), partial);
      }
    });
  })
  sum_parts_as(a.weight_dtype, a.partial, parts.count, stride, a.grad_weight, a.width);
  if (a.grad_bias != nullptr)
    sum_parts_as(a.weight_dtype, a.partial + a.width, parts.count, stride, a.grad_bias, a.width);
}

}  // namespace mk::cpu::MK_TIER
