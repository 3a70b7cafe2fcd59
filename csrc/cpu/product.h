// Products of small matrices that stay in the cache, for kernels that have work to do between two products. Larger
// products are the business of torch's libraries.
//
// A number of the factors is a `Unit` deep: one fp32, or two neighbours in bf16 that one instruction multiplies and
// adds in fp32. The left factor may lie in any order, so a transposed one is never written; the right factor is rows of
// units side by side, as many columns as whole vectors hold.
#pragma once

#include <cstdint>
#include <cstring>

#include "../common/dtype.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace mk::cpu::MK_TIER {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
constexpr int kVectorsAtOnce = 4;  // with kRowsAtOnce sums of them, all in registers
#elif defined(__AVX__)
constexpr int64_t kLanes = 8;
constexpr int kVectorsAtOnce = 2;
#else
constexpr int64_t kLanes = 4;
constexpr int kVectorsAtOnce = 2;
#endif
constexpr int64_t kRowsAtOnce = 4;  // the left factor is filled up to whole fours of rows

using Vector = float __attribute__((vector_size(kLanes * sizeof(float))));
using Ints = int32_t __attribute__((vector_size(kLanes * sizeof(float))));

inline Vector load_vector(const void* from) {
  Vector x;
  memcpy(&x, from, sizeof x);
  return x;
}

inline void store_vector(float* to, Vector x) { memcpy(to, &x, sizeof x); }

struct Singles {
  using Unit = float;
  static constexpr int64_t kDepth = 1;

  static Vector multiplied(Vector sum, Unit left, Vector right) { return sum + left * right; }
  // Numbers as units side by side; and the rows that a unit is deep as one row of units.
  template <size_t n>
  static void write(const Vector (&x)[n], Unit* to) {
    for (size_t v = 0; v < n; ++v) store_vector(to + v * kLanes, x[v]);
  }
  template <size_t n>
  static void write_across(const Vector (&x)[1][n], Unit* to) {
    write(x[0], to);
  }
};

#if defined(__AVX512BF16__)
struct Pairs {
  using Unit = uint32_t;
  static constexpr int64_t kDepth = 2;

  static Vector multiplied(Vector sum, Unit left, Vector right) {
    return _mm512_dpbf16_ps(sum, __m512bh(_mm512_set1_epi32(int32_t(left))), __m512bh(right));
  }
  template <size_t n>
  static void write(const Vector (&x)[n], Unit* to) {
    for (size_t v = 0; v < n; v += 2) {
      const __m512bh both = _mm512_cvtne2ps_pbh(x[v + 1], x[v]);
      memcpy(to + v / 2 * kLanes, &both, sizeof both);
    }
  }
  template <size_t n>
  static void write_across(const Vector (&x)[2][n], Unit* to) {
    // Lane 0 of the first row, of the second, lane 1 of the first, ...
    const __m512i numbers = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i twice = _mm512_or_si512(numbers, _mm512_slli_epi32(numbers, 16));
    const __m512i turns = _mm512_add_epi32(twice, _mm512_set1_epi32(0x00100000));
    for (size_t v = 0; v < n; ++v) {
      const __m512i both = __m512i(_mm512_cvtne2ps_pbh(x[1][v], x[0][v]));
      const __m512i units = _mm512_permutexvar_epi16(turns, both);
      memcpy(to + v * kLanes, &units, sizeof units);
    }
  }
};
#endif

// Element (i, k) is data[i * row + k * step].
template <class Unit>
struct Left {
  const Unit* data;
  int64_t row, step;
};

// Element (k, j) is data[k * columns + j].
template <class Unit>
struct Right {
  const Unit* data;
  int64_t columns;
};

struct Result {
  float* data;
  int64_t columns;
  bool add;  // to what stands there
};

// Lane i is lane index[i] of the lanes of a, then those of b.
inline Vector picked(Vector a, Vector b, Ints index) {
#if defined(__clang__)
  float both[2 * kLanes];
  memcpy(both, &a, sizeof a), memcpy(both + kLanes, &b, sizeof b);
  Vector result;
  for (int64_t i = 0; i < kLanes; ++i) result[i] = both[index[i]];
  return result;
#else
  return __builtin_shuffle(a, b, index);
#endif
}

// Lane j of rows[i] becomes lane i of rows[j]: at each step, blocks twice as wide change places across the diagonal.
inline void transpose(Vector (&rows)[kLanes]) {
#pragma GCC unroll 4
  for (int64_t step = 1; step < kLanes; step *= 2) {
    Ints low, high;
    for (int64_t i = 0; i < kLanes; ++i) {
      low[i] = int32_t(i & step ? kLanes + i - step : i);
      high[i] = low[i] + int32_t(step);
    }
#pragma GCC unroll 16
    for (int64_t i = 0; i < kLanes; ++i) {
      if (i & step) continue;
      const Vector a = rows[i], b = rows[i + step];
      rows[i] = picked(a, b, low), rows[i + step] = picked(a, b, high);
    }
  }
}

// Four rows and kVectors vectors of columns of the result.
template <class Math, int kVectors>
inline void product_tile(Left<typename Math::Unit> a, Right<typename Math::Unit> b, int64_t depth, Result out) {
  Vector sum[kRowsAtOnce][kVectors];
#pragma GCC unroll 4
  for (int64_t i = 0; i < kRowsAtOnce; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      sum[i][v] = out.add ? load_vector(out.data + i * out.columns + v * kLanes) : Vector{};
  for (int64_t k = 0; k < depth; ++k) {
    Vector right[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) right[v] = load_vector(b.data + k * b.columns + v * kLanes);
#pragma GCC unroll 4
    for (int64_t i = 0; i < kRowsAtOnce; ++i) {
      const typename Math::Unit left = a.data[i * a.row + k * a.step];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[i][v] = Math::multiplied(sum[i][v], left, right[v]);
    }
  }
#pragma GCC unroll 4
  for (int64_t i = 0; i < kRowsAtOnce; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store_vector(out.data + i * out.columns + v * kLanes, sum[i][v]);
}

// Four rows of a [4, depth] times b [depth, columns], the first `vectors` vectors of columns.
template <class Math>
inline void product_rows(Left<typename Math::Unit> a, Right<typename Math::Unit> b, int64_t depth, Result out,
                         int64_t vectors) {
  const auto tile = [&]<int kVectors>(int64_t v) {
    const Right<typename Math::Unit> right{b.data + v * kLanes, b.columns};
    product_tile<Math, kVectors>(a, right, depth, Result{out.data + v * kLanes, out.columns, out.add});
  };
  int64_t v = 0;
  for (; v + kVectorsAtOnce <= vectors; v += kVectorsAtOnce) tile.template operator()<kVectorsAtOnce>(v);
  for (; v + 2 <= vectors; v += 2) tile.template operator()<2>(v);
  if (v < vectors) tile.template operator()<1>(v);
}

}  // namespace mk::cpu::MK_TIER
