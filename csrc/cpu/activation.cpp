// Activations, a row at a time: each number is read and written once.
#include "activation.h"

#include <algorithm>

#include "../common/math.h"
#include "rows.h"

namespace mk::cpu::MK_TIER {
namespace {

template <class F, class T>
void apply(const T* __restrict x, T* __restrict out, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] = store<T>(F::value(load(x[i])));
}

template <class F, class T>
void apply_with_bias(const T* __restrict x, const float* __restrict bias, T* __restrict out, int64_t width) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) out[i] = store<T>(F::value(load(x[i]) + bias[i]));
}

template <class F, class T>
void differentiate(const T* __restrict grad, const T* __restrict x, T* __restrict grad_x, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) grad_x[i] = store<T>(load(grad[i]) * F::graph(load(x[i])).slope);
}

template <class F, class T>
void differentiate_with_bias(const T* __restrict grad, const T* __restrict x, const float* __restrict bias,
                             T* __restrict grad_x, float* __restrict for_bias, int64_t width) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) {
    const float result = load(grad[i]) * F::graph(load(x[i]) + bias[i]).slope;
    for_bias[i] += result;
    grad_x[i] = store<T>(result);
  }
}

template <class F, class T>
void apply_gated(const T* __restrict gate, const T* __restrict up, T* __restrict out, int64_t width) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) out[i] = store<T>(F::value(load(gate[i])) * load(up[i]));
}

template <class F, class T>
void differentiate_gated(const T* __restrict grad, const T* __restrict gate, const T* __restrict up,
                         T* __restrict grad_gate, T* __restrict grad_up, int64_t width) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) {
    const Graph graph = F::graph(load(gate[i]));
    grad_gate[i] = store<T>(load(grad[i]) * load(up[i]) * graph.slope);
    grad_up[i] = store<T>(load(grad[i]) * graph.value);
  }
}

template <class F, class T>
void backward_with_bias(const ActivationBackward& a) {
  const T *grad = static_cast<const T*>(a.grad), *x = static_cast<const T*>(a.x);
  T* grad_x = static_cast<T*>(a.grad_x);
  const std::vector<float> bias = widened(a.bias, a.width, a.bias_dtype);
  const RowParts parts = row_parts_of_cpu(a.rows);
  parallel_for(parts.count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      float* for_bias = a.partial + part * a.width;
      std::fill(for_bias, for_bias + a.width, 0.0f);
      for (int64_t row = parts.begin(part); row < parts.end(part, a.rows); ++row) {
        const int64_t at = row * a.width;
        differentiate_with_bias<F>(grad + at, x + at, bias.data(), grad_x + at, for_bias, a.width);
      }
    }
  });
  sum_parts_as(a.bias_dtype, a.partial, parts.count, a.width, a.grad_bias, a.width);
}

}  // namespace

void activation_forward(const ActivationForward& a) {
  const std::vector<float> bias = widened(a.bias, a.width, a.bias_dtype);
  MK_FOR_DTYPE(a.dtype, T, MK_FOR_ACTIVATION(a.function, F, {
    const T* x = static_cast<const T*>(a.x);
    T* out = static_cast<T*>(a.out);
    if (a.bias == nullptr) {
      parallel_for(a.rows * a.width, rows_worth_a_thread(1), [&](int64_t begin, int64_t end) {
        apply<F>(x + begin, out + begin, end - begin);
      });
    } else {
      parallel_for(a.rows, rows_worth_a_thread(a.width), [&](int64_t begin, int64_t end) {
        for (int64_t at = begin * a.width; at < end * a.width; at += a.width)
          apply_with_bias<F>(x + at, bias.data(), out + at, a.width);
      });
    }
  }))
}

void activation_backward(const ActivationBackward& a) {
  MK_FOR_DTYPE(a.dtype, T, MK_FOR_ACTIVATION(a.function, F, {
    if (a.bias == nullptr) {
      const T* grad = static_cast<const T*>(a.grad);
      const T* x = static_cast<const T*>(a.x);
      T* grad_x = static_cast<T*>(a.grad_x);
      parallel_for(a.rows * a.width, rows_worth_a_thread(1), [&](int64_t begin, int64_t end) {
        differentiate<F>(grad + begin, x + begin, grad_x + begin, end - begin);
      });
    } else {
      backward_with_bias<F, T>(a);
    }
  }))
}

void gated_forward(const GatedForward& a) {
  MK_FOR_DTYPE(a.dtype, T, MK_FOR_ACTIVATION(a.function, F, {
    parallel_for(a.rows, rows_worth_a_thread(a.width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* gate = static_cast<const T*>(a.x) + row * 2 * a.width;
        apply_gated<F>(gate, gate + a.width, static_cast<T*>(a.out) + row * a.width, a.width);
      }
    });
  }))
}

void gated_backward(const GatedBackward& a) {
  MK_FOR_DTYPE(a.dtype, T, MK_FOR_ACTIVATION(a.function, F, {
    parallel_for(a.rows, rows_worth_a_thread(a.width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* gate = static_cast<const T*>(a.x) + row * 2 * a.width;
        const T* grad = static_cast<const T*>(a.grad) + row * a.width;
        T* grad_gate = static_cast<T*>(a.grad_x) + row * 2 * a.width;
        differentiate_gated<F>(grad, gate, gate + a.width, grad_gate, grad_gate + a.width, a.width);
      }
    });
  }))
}

}  // namespace mk::cpu::MK_TIER
