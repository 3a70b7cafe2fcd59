// Instructions of NVIDIA's GPUs that CUDA has no exact C++ for. Everywhere else, as in the emulator, a model of them: the
// same infinities, NaNs and flushed numbers, and errors up to the largest that NVIDIA documents (PTX ISA 9, "Floating
// Point Instructions"; CUDA C++ Programming Guide, "Mathematical Functions").
#pragma once

#include <cmath>

#include "dtype.h"

namespace mk::gpu {

#if !defined(__CUDA_ARCH__)
// The number with a relative error of at most `most`, which depends on its bits: a kernel repeats its results.
inline float inexact(float exact, double most) {
  const uint32_t hash = bits_of(exact) * 2654435761u >> 30;  // 0 to 3
  return float(double(exact) * (1.0 + most * (double(hash) / 1.5 - 1.0)));
}

// Numbers below the smallest normal one are 0 (.ftz).
inline float flushed(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x; }
#endif

// 2^x within 2^-22.
MK_HD float exp2_approx(float x) {
#if defined(__CUDA_ARCH__)
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#else
  return flushed(inexact(exp2f(flushed(x)), 0x1p-22));
#endif
}

// 1 / x within 2^-23. Of a power of two it is exact on every GPU so far, and so is a gate that is fully open.
MK_HD float reciprocal_approx(float x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  const float exact = 1.0f / flushed(x);
  return flushed((bits_of(x) & 0x7fffffu) == 0 ? exact : inexact(exact, 0x1p-23));
#endif
}

// exp(x) within an ulp. Subnormal results are kept; it is finite up to x = 88.72.
MK_HD float exp_accurate(float x) {
#if defined(__CUDA_ARCH__)
  return expf(x);
#else
  return inexact(expf(x), 0x1p-24);
#endif
}

// The larger number; NaN if either is NaN, which fmaxf would drop.
MK_HD float larger(float a, float b) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a > b || a != a ? a : b;
#endif
}

}  // namespace mk::gpu
