// Products of small matrices that stay in the cache, for kernels with work between two products. Larger products are
// left to torch's libraries.
//
// The factors are made of units: one fp32, or a pair of bf16 along the summed dimension, which one instruction
// multiplies and adds in fp32. The left factor may have any strides, so it is never transposed in memory; the right
// factor has contiguous rows, filled up to whole registers.
#pragma once

#include "../common/lanes.h"

namespace mk::cpu::MK_TIER {

constexpr int kRegistersAtOnce = kRegister == 16 ? 4 : 2;  // kRowsAtOnce sums of so many registers stay in registers
constexpr int64_t kRowsAtOnce = 4;  // the left factor is filled up to a multiple of this

using Numbers = int32_t __attribute__((vector_size(4 * kRegister)));

inline Register load_register(const void* from) {
  Register x;
  memcpy(&x, from, sizeof x);
  return x;
}

inline void store_register(float* to, Register x) { memcpy(to, &x, sizeof x); }

struct Singles {
  using Unit = float;
  static constexpr int64_t kDepth = 1;

  static Register multiplied(Register sum, Unit left, Register right) { return fused(Register{} + left, right, sum); }
  // Writes one row as units; and kDepth rows as one row of units.
  template <size_t n>
  static void write(const Floats (&x)[n], Unit* to) {
    for (size_t i = 0; i < n; ++i) store_lanes(to + i * kLanes, x[i]);
  }
  template <size_t n>
  static void write_across(const Floats (&x)[1][n], Unit* to) {
    write(x[0], to);
  }
};

#if defined(__AVX512BF16__)
struct Pairs {
  using Unit = uint32_t;
  static constexpr int64_t kDepth = 2;

  static Register multiplied(Register sum, Unit left, Register right) {
    return _mm512_dpbf16_ps(sum, __m512bh(_mm512_set1_epi32(int32_t(left))), __m512bh(right));
  }
  template <size_t n>
  static void write(const Floats (&x)[n], Unit* to) {
    for (size_t i = 0; i < n; ++i) {
      const __m512bh both = _mm512_cvtne2ps_pbh(x[i].two, x[i].one);
      memcpy(to + i * kRegister, &both, sizeof both);
    }
  }
  template <size_t n>
  static void write_across(const Floats (&x)[2][n], Unit* to) {
    // Lane 0 of the first row, of the second, lane 1 of the first, ...
    const __m512i numbers = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i twice = _mm512_or_si512(numbers, _mm512_slli_epi32(numbers, 16));
    const __m512i turns = _mm512_add_epi32(twice, _mm512_set1_epi32(0x00100000));
    const auto join = [&](Register first, Register second, Unit* units) {
      const __m512i both = __m512i(_mm512_cvtne2ps_pbh(second, first));
      const __m512i in_turns = _mm512_permutexvar_epi16(turns, both);
      memcpy(units, &in_turns, sizeof in_turns);
    };
    for (size_t i = 0; i < n; ++i) {
      join(x[0][i].one, x[1][i].one, to + i * kLanes);
      join(x[0][i].two, x[1][i].two, to + i * kLanes + kRegister);
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
  bool add;  // to the numbers in `data`, instead of overwriting them
};

// Lane i is lane index[i] of the lanes of a, then those of b.
inline Register picked(Register a, Register b, Numbers index) {
#if defined(__clang__)
  float both[2 * kRegister];
  memcpy(both, &a, sizeof a), memcpy(both + kRegister, &b, sizeof b);
  Register result;
  for (int64_t i = 0; i < kRegister; ++i) result[i] = both[index[i]];
  return result;
#else
  return __builtin_shuffle(a, b, index);
#endif
}

// Lane j of rows[i] becomes lane i of rows[j]: each step swaps blocks twice as wide across the diagonal.
inline void transpose(Register (&rows)[kRegister]) {
#pragma GCC unroll 4
  for (int64_t step = 1; step < kRegister; step *= 2) {
    Numbers low, high;
    for (int64_t i = 0; i < kRegister; ++i) {
      low[i] = int32_t(i & step ? kRegister + i - step : i);
      high[i] = low[i] + int32_t(step);
    }
#pragma GCC unroll 16
    for (int64_t i = 0; i < kRegister; ++i) {
      if (i & step) continue;
      const Register a = rows[i], b = rows[i + step];
      rows[i] = picked(a, b, low), rows[i + step] = picked(a, b, high);
    }
  }
}

// Four rows and kRegisters registers of columns of the result.
template <class Math, int kRegisters>
inline void product_tile(Left<typename Math::Unit> a, Right<typename Math::Unit> b, int64_t depth, Result out) {
  Register sum[kRowsAtOnce][kRegisters];
#pragma GCC unroll 4
  for (int64_t i = 0; i < kRowsAtOnce; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < kRegisters; ++v)
      sum[i][v] = out.add ? load_register(out.data + i * out.columns + v * kRegister) : Register{};
  for (int64_t k = 0; k < depth; ++k) {
    Register right[kRegisters];
#pragma GCC unroll 4
    for (int v = 0; v < kRegisters; ++v) right[v] = load_register(b.data + k * b.columns + v * kRegister);
#pragma GCC unroll 4
    for (int64_t i = 0; i < kRowsAtOnce; ++i) {
      const typename Math::Unit left = a.data[i * a.row + k * a.step];
#pragma GCC unroll 4
      for (int v = 0; v < kRegisters; ++v) sum[i][v] = Math::multiplied(sum[i][v], left, right[v]);
    }
  }
#pragma GCC unroll 4
  for (int64_t i = 0; i < kRowsAtOnce; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < kRegisters; ++v) store_register(out.data + i * out.columns + v * kRegister, sum[i][v]);
}

// Four rows of a [4, depth] times b [depth, columns], the first `registers` registers of columns.
template <class Math>
inline void product_rows(Left<typename Math::Unit> a, Right<typename Math::Unit> b, int64_t depth, Result out,
                         int64_t registers) {
  const auto tile = [&]<int kRegisters>(int64_t v) {
    const Right<typename Math::Unit> right{b.data + v * kRegister, b.columns};
    product_tile<Math, kRegisters>(a, right, depth, Result{out.data + v * kRegister, out.columns, out.add});
  };
  int64_t v = 0;
  for (; v + kRegistersAtOnce <= registers; v += kRegistersAtOnce) tile.template operator()<kRegistersAtOnce>(v);
  for (; v + 2 <= registers; v += 2) tile.template operator()<2>(v);
  if (v < registers) tile.template operator()<1>(v);
}

}  // namespace mk::cpu::MK_TIER
