// Philox4x64-10 (Salmon et al., 2011) of the counters (n, 0, 0, 0), many of them at a time: products of 64 bits have no
// vector instruction, but four of 32 bits do, and the processor multiplies in scalar registers beside them.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace mk::cpu::MK_TIER {

constexpr int kPerBlock = 4;  // words that one counter gives

inline void product(uint64_t a, uint64_t factor, uint64_t& high, uint64_t& low) {
  const unsigned __int128 whole = (unsigned __int128)a * factor;
  high = uint64_t(whole >> 64), low = uint64_t(whole);
}

#if defined(__AVX2__)

#if defined(__AVX512F__)
using Register = __m512i;
inline Register low_products(Register a, Register b) { return _mm512_mul_epu32(a, b); }
#else
using Register = __m256i;
inline Register low_products(Register a, Register b) { return _mm256_mul_epu32(a, b); }
#endif

typedef uint64_t Lanes __attribute__((vector_size(sizeof(Register))));
constexpr int kVectorBlocks = sizeof(Register) / 8;

// Of the lower 32 bits of each lane.
inline Lanes low_products(Lanes a, uint64_t b) { return Lanes(low_products(Register(a), Register(Lanes{} + b))); }

inline void product(Lanes a, uint64_t factor, Lanes& high, Lanes& low) {
  const Lanes lower = Lanes{} + 0xFFFFFFFFu, above = a >> 32;
  const Lanes least = low_products(a, factor), most = low_products(above, factor >> 32);
  const Lanes one = low_products(above, factor) + (least >> 32);
  const Lanes two = low_products(a, factor >> 32) + (one & lower);
  high = most + (one >> 32) + (two >> 32);
  low = two << 32 | (least & lower);
}

#endif

template <class Word>
inline void philox_round(Word (&words)[kPerBlock], uint64_t key0, uint64_t key1) {
  Word high0, low0, high2, low2;
  product(words[0], 0xD2E7470EE14C6C93u, high0, low0);
  product(words[2], 0xCA5A826395121157u, high2, low2);
  words[0] = high2 ^ words[1] ^ key0, words[1] = low2;
  words[2] = high0 ^ words[3] ^ key1, words[3] = low0;
}

template <class... Words>
inline void philox_rounds(const uint64_t (&key)[2], Words&... blocks) {
  uint64_t key0 = key[0], key1 = key[1];
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    (philox_round(blocks, key0, key1), ...);
    key0 += 0x9E3779B97F4A7C15u, key1 += 0xBB67AE8584CAA73Bu;
  }
}

inline void philox_block(uint64_t counter, const uint64_t (&key)[2], uint64_t* words) {
  uint64_t block[kPerBlock] = {counter, 0, 0, 0};
  philox_rounds(key, block);
  std::memcpy(words, block, sizeof block);
}

#if defined(__AVX2__)

constexpr int kGroup = kVectorBlocks + 4;  // blocks

inline void philox_group(uint64_t counter, const uint64_t (&key)[2], uint64_t* words) {
  Lanes lanes[kPerBlock] = {};
  for (int lane = 0; lane < kVectorBlocks; ++lane) lanes[0][lane] = counter + uint64_t(lane);
  uint64_t one[kPerBlock] = {counter + kVectorBlocks}, two[kPerBlock] = {counter + kVectorBlocks + 1};
  uint64_t three[kPerBlock] = {counter + kVectorBlocks + 2}, four[kPerBlock] = {counter + kVectorBlocks + 3};
  philox_rounds(key, lanes, one, two, three, four);
  alignas(64) uint64_t by_lane[kPerBlock][kVectorBlocks];
  std::memcpy(by_lane, lanes, sizeof lanes);
  for (int lane = 0; lane < kVectorBlocks; ++lane)
    for (int word = 0; word < kPerBlock; ++word) words[lane * kPerBlock + word] = by_lane[word][lane];
  uint64_t* scalars = words + kVectorBlocks * kPerBlock;
  for (const auto& block : {one, two, three, four}) std::memcpy(scalars, block, sizeof one), scalars += kPerBlock;
}

#else

constexpr int kGroup = 1;

inline void philox_group(uint64_t counter, const uint64_t (&key)[2], uint64_t* words) {
  philox_block(counter, key, words);
}

#endif

}  // namespace mk::cpu::MK_TIER
