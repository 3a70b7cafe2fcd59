// Elementary functions for CUDA threads and for vectorized loops on the CPU: no branches, no calls, no tables. Errors
// are relative to the exact value.
#pragma once

#include <cmath>

#include "dtype.h"
#include "gpu.h"

namespace mk {

// a * b + c with one rounding.
MK_HD float fused(float a, float b, float c) {
#if defined(__CUDACC__)
  return fmaf(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

// Whether a function's result is stored as a T of 16 bits: then a shorter form within 2^-18 is enough, a thousandth of
// the rounding error of bf16 and a hundredth of that of fp16. Otherwise it is accurate to fp32.
template <class T>
constexpr bool kShort = sizeof(T) == 2;

// V is float, or the vector type of lanes.h, which has its own versions of the first five functions.
MK_HD float at_least(float x, float least) { return x < least ? least : x; }  // NaN passes, here and below
MK_HD float at_most(float x, float most) { return x > most ? most : x; }

MK_HD float where_less(float a, float b, float yes, float no) { return a < b ? yes : no; }

// 2^(n - 127) for a number whose lowest bits are n: 0 (which gives 0) to 255 (inf).
MK_HD float power_of_two(float shifted) { return from_bits(bits_of(shifted) << 23); }

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
  // x log2(e) = n + r with |r| <= 1/2. Adding the magic number rounds to an integer and adds the exponent's bias.
  const V magic = 12582912.0f + 127.0f;  // 1.5 * 2^23
  const V log2_e = 1.44269502f, rest = 1.92596303e-8f;
  const V shifted = fused(x, log2_e, magic);
  const V n = shifted - magic;
  V r = fused(x, log2_e, -n);
  if constexpr (!kShort<T>) r = fused(x, rest, r);
  return {exp2_near_zero<T>(r), shifted};
}

// exp(x) where the result is stored as T or computed from it, for x that is not far outside the range of exp: below
// 2^-126.5 it is 0, and beyond 2^127.5 it is inf. Never subnormal.
template <class T, class V>
MK_HD V exp_in_range(V x) {
#if defined(MK_GPU)
  if constexpr (kShort<T>) return gpu::exp2_approx(x * 1.44269502f);
#endif
  const Exponential<V> e = exponential<T>(x);
  return e.mantissa * power_of_two(e.shifted);
}

// Within 1.5 ulp, also below the smallest normal number; exp(-inf) is 0, exp(inf) is inf, NaN stays NaN.
MK_HD float exp(float x) {
#if defined(MK_GPU)
  return gpu::exp_accurate(x);
#else
  const Exponential<float> e = exponential(at_most(at_least(x, -150.0f), 150.0f));
  const int32_t power = int32_t(bits_of(e.shifted) - bits_of(12582912.0f)) - 127;
  const int32_t half = power >> 1;  // in two halves, so that the result may be subnormal or infinite
  return e.mantissa * from_bits(uint32_t(half + 127) << 23) * from_bits(uint32_t(power - half + 127) << 23);
#endif
}

// exp(x) where the result is stored as T or computed from it: on a GPU two instructions if T has 16 bits.
template <class T>
MK_HD float exp_for(float x) {
#if defined(MK_GPU)
  if constexpr (kShort<T>) return gpu::exp2_approx(x * 1.44269502f);
#endif
  return exp(x);
}

// 1 / x, likewise.
template <class T, class V>
MK_HD V reciprocal_for(V x) {
#if defined(MK_GPU)
  if constexpr (kShort<T>) return gpu::reciprocal_approx(x);
#endif
  return 1.0f / x;
}

// exp(x) for x <= 1, such as differences from a maximum: half the work. Results below 2^-126.5 are 0; NaN and inf give
// NaN.
template <class T = float, class V>
MK_HD V exp_of_difference(V x) {
#if defined(MK_GPU)
  return exp_for<T>(x);
#else
  return exp_in_range<T>(at_least(x, -88.0f));  // whose power of two is 0
#endif
}

// What a softmax subtracts from its numbers before exp: their maximum, or 0 where all are -inf (-inf - -inf is NaN).
MK_HD float shift_of(float peak) { return peak == -INFINITY ? 0.0f : peak; }

}  // namespace mk
