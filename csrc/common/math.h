// Scalar functions of the kernels, the same for CUDA threads and for loops that the C++ compiler turns into vector
// instructions: no branches, no calls, no tables. Errors are relative to the exact value.
#pragma once

#include "dtype.h"

#if defined(__CUDACC__)
#include <math.h>
#endif

namespace mk {

// a * b + c with one rounding.
MK_HD float fused(float a, float b, float c) {
#if defined(__CUDACC__)
  return fmaf(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

// What the functions below are computed for: to every digit of fp32, or to be stored as T, which has 16 bits. The short
// forms are within 2^-18, which is a thousandth of what rounding to bf16 changes and a hundredth for fp16.
template <class T>
constexpr bool kShort = sizeof(T) == 2;

// Functions of a number or of many at once: V is float, or what cpu/lanes.h has for it together with the first five.
MK_HD float at_least(float x, float least) { return x < least ? least : x; }  // NaN passes, and below
MK_HD float at_most(float x, float most) { return x > most ? most : x; }

MK_HD float where_less(float a, float b, float yes, float no) { return a < b ? yes : no; }

// 2^(n - 127) for a number whose lowest bits are n: 0 (which gives 0) to 255 (inf).
MK_HD float power_of_two(float shifted) { return from_bits(bits_of(shifted) << 23); }

#if !defined(__CUDACC__)
// exp(x) is mantissa * power_of_two(shifted), for x that is not far outside the range of exp.
template <class V>
struct Exponential {
  V mantissa, shifted;
};

// 2^r for |r| <= 1/2: polynomials by least relative error, 3e-6 and 3e-9.
template <class T, class V>
MK_HD V exp2_near_zero(V r) {
  if constexpr (kShort<T>) {
    V p = 9.583114646e-03f;
    p = fused(p, r, V(5.590652302e-02f));
    p = fused(p, r, V(2.402409315e-01f));
    p = fused(p, r, V(6.931241751e-01f));
    return fused(p, r, V(1.0f));
  } else {
    V p = 1.532647148e-04f;
    p = fused(p, r, V(1.339080627e-03f));
    p = fused(p, r, V(9.618505836e-03f));
    p = fused(p, r, V(5.550359935e-02f));
    p = fused(p, r, V(2.402264774e-01f));
    p = fused(p, r, V(6.931471825e-01f));
    return fused(p, r, V(1.0f));
  }
}

template <class T = float, class V>
MK_HD Exponential<V> exponential(V x) {
  // x log2(e) = n + r with |r| <= 1/2. The magic number rounds to an integer, and has the exponent's bias in it.
  const V magic = 12582912.0f + 127.0f;  // 1.5 * 2^23
  const V log2_e = 1.44269502f, rest = 1.92596303e-8f;
  const V shifted = fused(x, log2_e, magic);
  const V n = shifted - magic;
  V r = fused(x, log2_e, -n);
  if constexpr (!kShort<T>) r = fused(x, rest, r);
  return {exp2_near_zero<T>(r), shifted};
}
#endif

// Within 1.5 ulp, also below the smallest normal number; exp(-inf) is 0, exp(inf) is inf, NaN stays NaN.
MK_HD float exp(float x) {
#if defined(__CUDACC__)
  return expf(x);
#else
  const Exponential<float> e = exponential(at_most(at_least(x, -150.0f), 150.0f));
  const int32_t power = int32_t(bits_of(e.shifted) - bits_of(12582912.0f)) - 127;
  const int32_t half = power >> 1;  // in two halves, so that the result may be subnormal or infinite
  return e.mantissa * from_bits(uint32_t(half + 127) << 23) * from_bits(uint32_t(power - half + 127) << 23);
#endif
}

// exp(x) where T is what the result is stored as, or what it was computed from: on a GPU two instructions for a short T.
template <class T>
MK_HD float exp_for(float x) {
#if defined(__CUDA_ARCH__)
  if constexpr (kShort<T>) {
    float power;  // within 2^-22 of 2^y; below 2^-126 it is 0
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * 1.44269502f));
    return power;
  }
#endif
  return exp(x);
}

// 1 / x, likewise.
template <class T, class V>
MK_HD V reciprocal_for(V x) {
#if defined(__CUDA_ARCH__)
  if constexpr (kShort<T>) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
  }
#endif
  return 1.0f / x;
}

// exp(x) for x of at most 1, as of differences from a maximum: half the work. Results below 2^-126.5 are 0; NaN and inf
// give NaN.
template <class T = float, class V>
MK_HD V exp_of_difference(V x) {
#if defined(__CUDACC__)
  return exp_for<T>(x);
#else
  const Exponential<V> e = exponential<T>(at_least(x, -88.0f));  // whose power of two is 0
  return e.mantissa * power_of_two(e.shifted);
#endif
}

template <class V>
struct Logistic {
  V value, complement;  // which is 1 - value
};

// The logistic function of -x for an x between kLogisticLeast, where it is 1, and kLogisticMost, where it is 0. Without
// differences of nearly equal numbers: relative accuracy everywhere.
constexpr float kLogisticLeast = -87.5f, kLogisticMost = 88.6f;

template <class T, class V>
MK_HD Logistic<V> logistic_of_minus(V x) {
#if defined(__CUDACC__)
  const V e = exp_for<T>(x);
#else
  const Exponential<V> by_two = exponential<T>(x);
  const V e = by_two.mantissa * power_of_two(by_two.shifted);
#endif
  const V value = reciprocal_for<T>(1.0f + e);
  // A short result adds the complement to something near 1 wherever little is left of it.
  if constexpr (kShort<T>) return {value, 1.0f - value};
  return {value, where_less(0.5f, value, e * value, 1.0f - value)};
}

template <class V>
struct Normal {
  V cdf, density;
};

// The normal distribution: Phi(x), within 8 ulp also far below zero, and its density.
template <class T, class V>
MK_HD Normal<V> normal(V x) {
  const V magnitude = where_less(x, 0.0f, -x, x);
  const V a = at_most(magnitude, 20.0f);  // nothing is left beyond; NaN passes
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
  // What a * a loses in rounding would be multiplied by a * a / 2 in the exponential.
  const V square = a * a, lost = fused(a, a, -square);
  const V e = exp_of_difference<T>(-0.5f * square) * (1.0f - 0.5f * lost);
  const V tail = e * (t * p);
  return {where_less(x, 0.0f, tail, 1.0f - tail), e * 0.3989422804f};
}

// The activations: value(x), and both value and slope, to be stored as T. Infinite inputs give what the plain formula
// gives.
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

// (1 + tanh(u)) / 2 is the logistic function of 2 u, which has no difference of nearly equal numbers.
struct GeluTanh {
  static constexpr float kTwice = 1.5957691216f;  // 2 sqrt(2 / pi)
  static constexpr float kCubic = kTwice * 0.044715f;

  template <class T, class V>
  MK_HD static Graph<V> graph(V x) {
    const V bounded = at_most(at_least(x, -10.055f), 10.0f);  // 2 u comes just to the limits
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
