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

#if !defined(__CUDACC__)
// exp(x) is mantissa * 2^power, for x that is not far outside the range of exp.
struct Exponential {
  float mantissa;
  int32_t power;
};

MK_HD Exponential exponential(float x) {
  // x = n ln 2 + r with |r| <= ln 2 / 2.
  const float magic = 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  const float shifted = x * 1.44269504088896341f + magic;
  const float n = shifted - magic;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return {p * (r * r) + r + 1.0f, int32_t(bits_of(shifted) - bits_of(magic))};
}

MK_HD float power_of_two(int32_t power) { return from_bits(uint32_t(power + 127) << 23); }
#endif

// Within 1.5 ulp, also below the smallest normal number; exp(-inf) is 0, exp(inf) is inf, NaN stays NaN.
MK_HD float exp(float x) {
#if defined(__CUDACC__)
  return expf(x);
#else
  const Exponential e = exponential(x < -150.0f ? -150.0f : (x > 150.0f ? 150.0f : x));  // NaN passes through both
  const int32_t half = e.power >> 1;  // in two halves, so that the result may be subnormal or infinite
  return e.mantissa * power_of_two(half) * power_of_two(e.power - half);
#endif
}

// exp(x) for x of at most 1, as of differences from a maximum: half the work. Results below the smallest normal number
// are 0; NaN and inf give NaN.
MK_HD float exp_of_difference(float x) {
#if defined(__CUDACC__)
  return expf(x);
#else
  const Exponential e = exponential(x);
  return x < -87.0f ? 0.0f : e.mantissa * power_of_two(e.power);
#endif
}

struct Logistic {
  float value, slope;
};

// The logistic function and its derivative without differences of nearly equal numbers: relative accuracy everywhere,
// except that what is smaller than exp(-87) is 0.
MK_HD Logistic logistic(float x) {
  const float small = exp_of_difference(x < 0.0f ? x : -x), part = 1.0f / (1.0f + small);
  return {(x < 0.0f ? small : 1.0f) * part, small * part * part};
}

struct Normal {
  float cdf, density;
};

// The normal distribution: Phi(x), within 8 ulp also far below zero, and its density.
MK_HD Normal normal(float x) {
  const float magnitude = x < 0.0f ? -x : x;
  const float a = magnitude > 20.0f ? 20.0f : magnitude;  // nothing is left beyond; NaN passes
  // The tail is exp(-a^2 / 2) * t * P(t) with t = 1 / (a + 3.2): a fit by least relative error, 5e-8, over all a >= 0.
  const float t = 1.0f / (a + 3.2f);
  const float s = 6.4f * t - 1.0f;
  float p = -1.163800708e-4f;
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
  const float square = a * a, lost = fused(a, a, -square);
  const float e = exp_of_difference(-0.5f * square) * (1.0f - 0.5f * lost);
  const float tail = e * (t * p);
  return {x < 0.0f ? tail : 1.0f - tail, e * 0.3989422804f};
}

// The activations: value(x), and both value and slope. Infinite inputs give what the plain formula gives.
struct Graph {
  float value, slope;
};

struct Silu {
  MK_HD static float value(float x) { return x * logistic(x).value; }
  MK_HD static Graph graph(float x) {
    const Logistic gate = logistic(x);
    return {x * gate.value, gate.value + x * gate.slope};
  }
};

// (1 + tanh(u)) / 2 is the logistic function of 2 u, which has no difference of nearly equal numbers.
struct GeluTanh {
  static constexpr float kTwice = 1.5957691216f;  // 2 sqrt(2 / pi)
  static constexpr float kCubic = 0.044715f;

  MK_HD static Logistic gate(float x) { return logistic(kTwice * (x + kCubic * (x * x * x))); }
  MK_HD static float value(float x) { return x * gate(x).value; }
  MK_HD static Graph graph(float x) {
    const float above = x < -50.0f ? -50.0f : x, bounded = above > 50.0f ? 50.0f : above;
    const float inner = kTwice * (1.0f + 3.0f * kCubic * (bounded * bounded));  // of no weight beyond 50
    const Logistic g = gate(x);
    return {x * g.value, g.value + x * g.slope * inner};
  }
};

struct GeluErf {
  MK_HD static float value(float x) { return x * normal(x).cdf; }
  MK_HD static Graph graph(float x) {
    const Normal n = normal(x);
    return {x * n.cdf, n.cdf + x * n.density};
  }
};

struct SquaredRelu {
  MK_HD static float value(float x) {
    const float kept = x < 0.0f ? 0.0f : x;
    return kept * kept;
  }
  MK_HD static Graph graph(float x) { return {value(x), x < 0.0f ? 0.0f : 2.0f * x}; }
};

}  // namespace mk
