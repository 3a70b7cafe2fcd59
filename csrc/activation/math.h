// The activations, and the arguments of their kernels. Pointers are to contiguous rows of the type `dtype` unless said
// otherwise.
#pragma once

#include "../common/math.h"

namespace mk {

enum class Activation : int32_t { silu, gelu_tanh, gelu_erf, squared_relu };

struct ActivationForward {
  const void* x;
  void* out;
  int64_t count;
  Activation function;
  DType dtype;
};

struct ActivationBackward {
  const void* grad;
  const void* x;
  void* grad_x;
  int64_t count;
  Activation function;
  DType dtype;
};

// function(gate) * up
struct GatedForward {
  const void* x;  // [rows, 2 * width]: gate, then up
  void* out;      // [rows, width]
  int64_t rows, width;
  Activation function;
  DType dtype;
};

struct GatedBackward {
  const void* grad;  // [rows, width]
  const void* x;     // [rows, 2 * width]
  void* grad_x;      // [rows, 2 * width]
  int64_t rows, width;
  Activation function;
  DType dtype;
};

template <class V>
struct Logistic {
  V value, complement;  // complement = 1 - value
};

// The logistic function of -x for x in [kLogisticLeast, kLogisticMost], where it falls from exactly 1 to exactly 0: an
// infinite input times 0 is NaN, and a huge one times the complement is 0. No cancellation, so the relative error is
// small everywhere.
constexpr float kLogisticLeast = -88.0f, kLogisticMost = 88.9f;

template <class T, class V>
MK_HD Logistic<V> logistic_of_minus(V x) {
  const V e = exp_in_range<T>(x);
  const V value = reciprocal_for<T>(1.0f + e);
  // Half precision: where the complement is small, its lost digits do not reach the result.
  if constexpr (kShort<T>) return {value, 1.0f - value};
  return {value, where_less(0.5f, value, e * value, 1.0f - value)};
}

template <class V>
struct Normal {
  V cdf, density;
};

// The normal distribution function Phi(x), within 8 ulp also for very negative x, and its density.
template <class T, class V>
MK_HD Normal<V> normal(V x) {
  const V magnitude = where_less(x, 0.0f, -x, x);
  const V a = at_most(magnitude, 20.0f);  // the tail is 0 beyond; NaN passes
  // The tail is exp(-a^2 / 2) * t * P(t) with t = 1 / (a + 3.2): a fit by least relative error, 5e-8, over all a >= 0.
  const V t = reciprocal_for<T>(a + 3.2f);
  const V s = 6.4f * t - 1.0f;
  V p = -1.163800708e-4f;
  p = p * s + 9.095062745e-5f;
  p = p * s + 1.060802337e-3f;
  p = p * s - 7.282505896e-4f;
  p = p * s - 8.246963614e-3f;
  p = p * s - 1.619729809e-3f;
  p = p * s + 7.402684103e-2f;
  p = p * s + 2.658403343e-1f;
  p = p * s + 5.338045901e-1f;
  p = p * s + 7.358878856e-1f;
  // The exponential would multiply the rounding error of a * a by a * a / 2, so it is added back.
  const V square = a * a, lost = fused(a, a, -square);
  const V e = exp_of_difference<T>(-0.5f * square) * (1.0f - 0.5f * lost);
  const V tail = e * (t * p);
  return {where_less(x, 0.0f, tail, 1.0f - tail), e * 0.3989422804f};
}

// The activations: value and derivative at x, to be stored as T. Infinite inputs give what the plain formula gives.
template <class V>
struct Graph {
  V value, slope;
};

struct Silu {
  template <class T, class V>
  MK_HD static Graph<V> graph(V x) {
    const Logistic<V> gate = logistic_of_minus<T>(at_most(at_least(-x, kLogisticLeast), kLogisticMost));
    const V value = x * gate.value;
    return {value, value * gate.complement + gate.value};
  }
};

// (1 + tanh(u)) / 2 is the logistic function of 2 u, which has no cancellation.
struct GeluTanh {
  static constexpr float kTwice = 1.5957691216f;  // 2 sqrt(2 / pi)
  static constexpr float kCubic = kTwice * 0.044715f;

  template <class T, class V>
  MK_HD static Graph<V> graph(V x) {
    const V bounded = at_most(at_least(x, -10.067f), 10.03f);  // 2 u just reaches the limits above
    const V square = bounded * bounded;
    const Logistic<V> gate = logistic_of_minus<T>(bounded * (-kCubic * square - kTwice));
    const V value = x * gate.value, inner = 3.0f * kCubic * square + kTwice;
    return {value, value * (inner * gate.complement) + gate.value};
  }
};

struct GeluErf {
  template <class T, class V>
  MK_HD static Graph<V> graph(V x) {
    const Normal<V> n = normal<T>(x);
    return {x * n.cdf, n.cdf + x * n.density};
  }
};

struct SquaredRelu {
  template <class T, class V>
  MK_HD static Graph<V> graph(V x) {
    const V kept = where_less(x, 0.0f, 0.0f, x);
    return {kept * kept, 2.0f * kept};
  }
};

}  // namespace mk

// MK_FOR_ACTIVATION(function, F, { ... }) runs the block with F as the class that computes it.
#define MK_FOR_ACTIVATION(function, F, ...) \
  switch (function) {                       \
    case ::mk::Activation::silu: {          \
      using F = ::mk::Silu;                 \
      __VA_ARGS__;                          \
      break;                                \
    }                                       \
    case ::mk::Activation::gelu_tanh: {     \
      using F = ::mk::GeluTanh;             \
      __VA_ARGS__;                          \
      break;                                \
    }                                       \
    case ::mk::Activation::gelu_erf: {      \
      using F = ::mk::GeluErf;              \
      __VA_ARGS__;                          \
      break;                                \
    }                                       \
    case ::mk::Activation::squared_relu: {  \
      using F = ::mk::SquaredRelu;          \
      __VA_ARGS__;                          \
      break;                                \
    }                                       \
  }
