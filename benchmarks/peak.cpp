// What this processor can multiply and add when nothing waits for memory: the limit of every matrix product.
// Compiled by benchmarks/peak.py for the machine at hand.
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

// As many sums as hide a multiplication's latency; each is a register as wide as the processor has.
constexpr int SUMS = 12;
#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
#if defined(__x86_64__)
#define IN_A_REGISTER "+v"
#else
#define IN_A_REGISTER "+w"
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
      asm volatile("" : IN_A_REGISTER(next));  // it is computed, and stays there
      sums[k] = next;
    }
  }
}

}  // namespace

// Operations (a multiplication and an addition are two) that one repetition makes, in fp32 and in bf16.
extern "C" long peak_operations(int halves) {
#if defined(__AVX512BF16__)
  if (halves) return 2L * SUMS * 32;
#endif
  return 2L * SUMS * LANES;
}

extern "C" void peak_repeat(long times, int halves) {
#if defined(__AVX512BF16__)
  if (halves) {
    const __m512bh one = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    repeat(times, _mm512_setzero_ps(), [&](__m512 sum) { return _mm512_dpbf16_ps(sum, one, one); });
    return;
  }
#endif
  Lanes factor, term;
  for (int i = 0; i < LANES; i++) factor[i] = 0.5f, term[i] = 1.0f;
  asm volatile("" : IN_A_REGISTER(factor), IN_A_REGISTER(term));  // not known to the compiler
  repeat(times, term, [&](Lanes sum) { return sum * factor + term; });
}
