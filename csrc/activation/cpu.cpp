// Activations, a row at a time: each number is read and written once.
#include <algorithm>

#include "../common/lanes.h"
#include "../common/rows.h"
#include "math.h"

namespace mk::cpu::MK_TIER {
namespace {

template <class F, class T>
void apply(const T* x, T* out, int64_t count) {
  for_lanes(count, [=](auto at) { put(out, at, F::template graph<T>(get(x, at)).value); });
}

template <class F, class T>
void apply_with_bias(const T* x, const Row<T>& bias, T* out, int64_t width) {
  for_lanes(width, [&](auto at) { put(out, at, F::template graph<T>(get(x, at) + bias.at(at)).value); });
}

template <class F, class T>
void differentiate(const T* grad, const T* x, T* grad_x, int64_t count) {
  for_lanes(count, [=](auto at) { put(grad_x, at, get(grad, at) * F::template graph<T>(get(x, at)).slope); });
}

template <class F, class T>
void differentiate_with_bias(const T* grad, const T* x, const Row<T>& bias, T* grad_x, Row<T>& for_bias,
                             int64_t width) {
  for_lanes(width, [&](auto at) {
    const Floats result = get(grad, at) * F::template graph<T>(get(x, at) + bias.at(at)).slope;
    for_bias.at(at) += result;
    put(grad_x, at, result);
  });
}

template <class F, class T>
void apply_gated(const T* gate, const T* up, T* out, int64_t width) {
  for_lanes(width, [=](auto at) { put(out, at, F::template graph<T>(get(gate, at)).value * get(up, at)); });
}

template <class F, class T>
void differentiate_gated(const T* grad, const T* gate, const T* up, T* grad_gate, T* grad_up, int64_t width) {
  for_lanes(width, [=](auto at) {
    const Graph<Floats> graph = F::template graph<T>(get(gate, at));
    const Floats upstream = get(grad, at);
    put(grad_gate, at, upstream * get(up, at) * graph.slope);
    put(grad_up, at, upstream * graph.value);
  });
}

template <class F, class T>
void backward_with_bias(const ActivationBackward& a) {
  const T *grad = static_cast<const T*>(a.grad), *x = static_cast<const T*>(a.x);
  T* grad_x = static_cast<T*>(a.grad_x);
  const Row<T> bias(a.bias, a.width, a.bias_dtype);
  const RowParts parts = row_parts_of_cpu(a.rows);
  parallel_for(parts.count, 1, [&](int64_t begin, int64_t end) {
    Row<T> for_bias(a.width);
    for (int64_t part = begin; part < end; ++part) {
      for_bias.clear();
      for (int64_t row = parts.begin(part); row < parts.end(part, a.rows); ++row) {
        const int64_t at = row * a.width;
        differentiate_with_bias<F>(grad + at, x + at, bias, grad_x + at, for_bias, a.width);
      }
      for_bias.copy_to(a.partial + part * a.width);
    }
  });
  sum_parts_as(a.bias_dtype, a.partial, parts.count, a.width, a.grad_bias, a.width);
}

}  // namespace

void activation_forward(const ActivationForward& a) {
  MK_FOR_DTYPE(a.dtype, T, MK_FOR_ACTIVATION(a.function, F, {
    const T* x = static_cast<const T*>(a.x);
    T* out = static_cast<T*>(a.out);
    if (a.bias == nullptr) {
      parallel_for(a.rows * a.width, rows_worth_a_thread(1), [&](int64_t begin, int64_t end) {
        apply<F>(x + begin, out + begin, end - begin);
      });
    } else {
      const Row<T> bias(a.bias, a.width, a.bias_dtype);
      parallel_for(a.rows, rows_worth_a_thread(a.width), [&](int64_t begin, int64_t end) {
        for (int64_t at = begin * a.width; at < end * a.width; at += a.width)
          apply_with_bias<F>(x + at, bias, out + at, a.width);
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
