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
void differentiate(const T* grad, const T* x, T* grad_x, int64_t count) {
  for_lanes(count, [=](auto at) { put(grad_x, at, get(grad, at) * F::template graph<T>(get(x, at)).slope); });
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

}  // namespace

void activation_forward(const ActivationForward& a) {
  MK_FOR_DTYPE(a.dtype, T, MK_FOR_ACTIVATION(a.function, F, {
    const T* x = static_cast<const T*>(a.x);
    T* out = static_cast<T*>(a.out);
    parallel_for(a.count, rows_worth_a_thread(1), [&](int64_t begin, int64_t end) {
      apply<F>(x + begin, out + begin, end - begin);
    });
  }))
}

void activation_backward(const ActivationBackward& a) {
  MK_FOR_DTYPE(a.dtype, T, MK_FOR_ACTIVATION(a.function, F, {
    const T* grad = static_cast<const T*>(a.grad);
    const T* x = static_cast<const T*>(a.x);
    T* grad_x = static_cast<T*>(a.grad_x);
    parallel_for(a.count, rows_worth_a_thread(1), [&](int64_t begin, int64_t end) {
      differentiate<F>(grad + begin, x + begin, grad_x + begin, end - begin);
    });
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
