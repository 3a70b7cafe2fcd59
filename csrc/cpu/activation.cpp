// Activations, a row at a time: each number is read and written once.
#include "activation.h"

#include "../common/math.h"
#include "parallel.h"

namespace mk::cpu::MK_TIER {
namespace {

constexpr int64_t kGrain = 1 << 14;  // elements that are worth waking a thread for

int64_t rows_worth_a_thread(int64_t width) { return width >= kGrain ? 1 : kGrain / (width > 0 ? width : 1); }

template <class T>
void swiglu_row(const T* __restrict gate, const T* __restrict up, T* __restrict out, int64_t width) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) out[i] = store<T>(silu(load(gate[i])) * load(up[i]));
}

template <class T>
void swiglu_row_backward(const T* __restrict gate, const T* __restrict up, const T* __restrict grad,
                         T* __restrict grad_gate, T* __restrict grad_up, int64_t width) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) {
    const float g = load(gate[i]), upstream = load(grad[i]);
    const float s = sigmoid(g);
    grad_gate[i] = store<T>(upstream * load(up[i]) * (s * (1.0f + g * (1.0f - s))));
    grad_up[i] = store<T>(upstream * (g * s));  // s is 0 where upstream * g would overflow
  }
}

}  // namespace

void swiglu_forward(const SwigluForward& a) {
  MK_FOR_DTYPE(a.dtype, T, {
    const T* x = static_cast<const T*>(a.x);
    T* out = static_cast<T*>(a.out);
    parallel_for(a.rows, rows_worth_a_thread(a.width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* gate = x + row * 2 * a.width;
        swiglu_row(gate, gate + a.width, out + row * a.width, a.width);
      }
    });
  })
}

void swiglu_backward(const SwigluBackward& a) {
  MK_FOR_DTYPE(a.dtype, T, {
    const T* x = static_cast<const T*>(a.x);
    const T* grad = static_cast<const T*>(a.grad);
    T* grad_x = static_cast<T*>(a.grad_x);
    parallel_for(a.rows, rows_worth_a_thread(a.width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* gate = x + row * 2 * a.width;
        T* grad_gate = grad_x + row * 2 * a.width;
        swiglu_row_backward(gate, gate + a.width, grad + row * a.width, grad_gate, grad_gate + a.width, a.width);
      }
    });
  })
}

}  // namespace mk::cpu::MK_TIER
