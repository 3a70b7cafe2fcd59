// Scalar functions of the kernels, the same for CUDA threads and for loops that the C++ compiler turns into vector
// instructions: no branches, no calls, no tables. Errors are relative to the exact value.
#pragma once

#include "dtype.h"

#if defined(__CUDACC__)
#include <math.h>
#endif

namespace mk {

// Within 1.5 ulp, also below the smallest normal number; exp(-inf) is 0, exp(inf) is inf, NaN stays NaN.
MK_HD float exp(float x) {
#if defined(__CUDACC__)
  return expf(x);
#else
  // x = n ln 2 + r with |r| <= ln 2 / 2; 2^n is applied in two halves so that the result may be subnormal or infinite.
  const float bounded = x < -150.0f ? -150.0f : (x > 150.0f ? 150.0f : x);  // NaN passes through both
  const float magic = 12582912.0f;                                         // 1.5 * 2^23: rounds to an integer
  const float shifted = bounded * 1.44269504088896341f + magic;
  const float n = shifted - magic;
  const float r = (bounded - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const int32_t power = int32_t(bits_of(shifted)) - int32_t(bits_of(magic));
  const int32_t half = power >> 1;
  return p * from_bits(uint32_t(half + 127) << 23) * from_bits(uint32_t(power - half + 127) << 23);
#endif
}

// exp(x) for x of at most 1, as of differences from a maximum: half the work. Results below the smallest normal number
// are 0; NaN and inf give NaN.
MK_HD float exp_of_difference(float x) {
#if defined(__CUDACC__)
  return expf(x);
#else
  const float magic = 12582912.0f;  // as above
  const float shifted = x * 1.44269504088896341f + magic;
  const float n = shifted - magic;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const float result = p * from_bits((bits_of(shifted) - bits_of(magic) + 127u) << 23);
  return x < -87.0f ? 0.0f : result;
#endif
}

MK_HD float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }

MK_HD float silu(float x) { return x * sigmoid(x); }

MK_HD float silu_derivative(float x) {
  const float s = sigmoid(x);
  return s * (1.0f + x * (1.0f - s));
}

}  // namespace mk
