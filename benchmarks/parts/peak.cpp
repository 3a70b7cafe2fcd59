// Multiplications and additions at this processor's peak, without waiting for memory: the limit of every matrix product.
// benchmarks/parts/peak.py compiles it for the machine. Supports x86-64 with fused multiply-add, and bf16 with
// AVX512-BF16 or without any bf16 instruction (then the peak is fp32's).
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

// Enough sums to hide a multiplication's latency. Each is a register of the processor's full width.
constexpr int SUMS = 12;
#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));

template <typename Sum, typename Step>
void repeat(long times, Sum zero, Step step) {
  Sum sums[SUMS];
  for (Sum& sum : sums) sum = zero;
  for (long i = 0; i < times; i++) {
#pragma GCC unroll 16
    for (int k = 0; k < SUMS; k++) {
      Sum next = step(sums[k]);
      asm volatile("" : "+v"(next));  // it is computed, and stays there
      sums[k] = next;
    }
  }
}

}  // namespace

// Operations (a multiplication and an addition are two) that one repetition makes, in fp32 or in bf16; 0: not known.
extern "C" long peak_operations(int halves) {
#if !defined(__FMA__)
  return 0;
#elif defined(__AMX_BF16__)
  return halves ? 0 : 2L * SUMS * LANES;
#elif defined(__AVX512BF16__)
  return 2L * SUMS * (halves ? 32 : LANES);
#else
  return 2L * SUMS * LANES;
#endif
}

extern "C" void peak_repeat(long times, int halves) {
#if defined(__AVX512BF16__)
  if (halves) {
    const __m512bh one = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    repeat(times, _mm512_setzero_ps(), [&](__m512 sum) { return _mm512_dpbf16_ps(sum, one, one); });
    return;
  }
#endif
#if defined(__FMA__)
  Lanes factor, term;
  for (int i = 0; i < LANES; i++) factor[i] = 0.5f, term[i] = 1.0f;
  asm volatile("" : "+v"(factor), "+v"(term));  // not known to the compiler
  repeat(times, term, [&](Lanes sum) { return sum * factor + term; });
#endif
}
