// The element types of the kernels, and their conversion from and to float. Shared by host and device.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define MK_HD __host__ __device__ __forceinline__
#else
#define MK_HD inline __attribute__((always_inline))
#endif

// Defined for code of a GPU: nvcc compiles it, or the emulator runs it in place of a GPU.
#if defined(__CUDACC__) || defined(MK_EMULATED)
#define MK_GPU
#endif

namespace mk {

enum class DType : int32_t { f32 = 0, bf16 = 1, f16 = 2 };

// Storage only: arithmetic is done in float.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

MK_HD uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

MK_HD float from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

MK_HD float load(float x) { return x; }
MK_HD float load(bf16 x) { return from_bits(uint32_t(x.bits) << 16); }

// Without branches, so that loops are vectorized: both results are computed, one is selected.
MK_HD float load(f16 x) {
#if defined(__CUDA_ARCH__)
  float wide;  // a GPU has an instruction for it
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
#else
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16;
  const uint32_t shifted = uint32_t(x.bits & 0x7fffu) << 13;
  const uint32_t exponent = shifted & 0x0f800000u;
  const float normal = from_bits(shifted + (exponent == 0x0f800000u ? 0x70000000u : 0x38000000u));
  const float subnormal = float(int32_t(x.bits & 0x03ffu)) * 5.9604644775390625e-8f;
  return from_bits(sign | bits_of(exponent == 0 ? subnormal : normal));
#endif
}

template <class T>
MK_HD T store(float x);

template <>
MK_HD float store<float>(float x) {
  return x;
}

// Round to nearest, ties to even; NaN stays NaN.
template <>
MK_HD bf16 store<bf16>(float x) {
#if defined(__CUDA_ARCH__)
  bf16 narrow;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(x));
  return narrow;
#else
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return bf16{uint16_t(x != x ? 0x7fc0u : rounded)};
#endif
}

template <>
MK_HD f16 store<f16>(float x) {
#if defined(__CUDA_ARCH__)
  f16 narrow;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(x));
  return narrow;
#else
  const uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  // Adding 0.5 lets the adder round a subnormal to a multiple of 2^-24.
  const uint32_t subnormal = bits_of(from_bits(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  const uint32_t large = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  return f16{uint16_t(sign | (magnitude >= 0x477ff000u ? large : finite))};
#endif
}

// A number rounded to the type T.
template <class T>
MK_HD float rounded(float x) {
  return load(store<T>(x));
}

#if !defined(__CUDACC__)
// The same without narrowing in between, which costs vector code more than the rounding.
template <>
MK_HD float rounded<bf16>(float x) {
  const uint32_t bits = bits_of(x);
  const float result = from_bits((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
  return x != x ? x : result;
}
#endif

}  // namespace mk

// MK_FOR_DTYPE(dtype, T, { ... }) runs the block with T as the storage type.
#define MK_FOR_DTYPE(dtype, T, ...)     \
  switch (dtype) {                      \
    case ::mk::DType::f32: {            \
      using T = float;                  \
      __VA_ARGS__;                      \
      break;                            \
    }                                   \
    case ::mk::DType::bf16: {           \
      using T = ::mk::bf16;             \
      __VA_ARGS__;                      \
      break;                            \
    }                                   \
    case ::mk::DType::f16: {            \
      using T = ::mk::f16;              \
      __VA_ARGS__;                      \
      break;                            \
    }                                   \
  }
