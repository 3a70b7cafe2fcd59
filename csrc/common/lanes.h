// Explicit vectors: two registers of fp32 numbers, and loops over rows of them. The compiler's own vectors take several
// comparisons for every clamp, and converting halves costs them more than the arithmetic.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "dtype.h"

namespace mk::cpu::MK_TIER {

#if defined(__AVX512F__)
constexpr int kRegister = 16;
#elif defined(__AVX2__)
constexpr int kRegister = 8;
#else
constexpr int kRegister = 4;
#endif
constexpr int kLanes = 2 * kRegister;

// The vector counterparts of math.h's functions of float.
struct Floats {
  typedef float Register __attribute__((vector_size(4 * kRegister)));
  typedef uint32_t Bits __attribute__((vector_size(4 * kRegister)));

  Register one, two;

  Floats() = default;
  MK_HD Floats(Register first, Register second) : one(first), two(second) {}
  MK_HD Floats(float all) : one(Register{} + all), two(Register{} + all) {}

  MK_HD friend Floats operator+(Floats a, Floats b) { return {a.one + b.one, a.two + b.two}; }
  MK_HD friend Floats operator-(Floats a, Floats b) { return {a.one - b.one, a.two - b.two}; }
  MK_HD friend Floats operator*(Floats a, Floats b) { return {a.one * b.one, a.two * b.two}; }
  MK_HD friend Floats operator/(Floats a, Floats b) { return {a.one / b.one, a.two / b.two}; }
  MK_HD friend Floats operator-(Floats a) { return {-a.one, -a.two}; }
  MK_HD Floats& operator+=(Floats other) { return *this = *this + other; }
};

using Register = Floats::Register;
using Bits = Floats::Bits;

// a < b ? yes : no
MK_HD Floats where_less(Floats a, Floats b, Floats yes, Floats no) {
  return {a.one < b.one ? yes.one : no.one, a.two < b.two ? yes.two : no.two};
}

MK_HD Floats power_of_two(Floats shifted) {
  return {Register(Bits(shifted.one) << 23), Register(Bits(shifted.two) << 23)};
}

// The larger (smaller) of two numbers, the second where one is NaN; a * b + c with one rounding.
#if defined(__AVX512F__)
MK_HD Register larger(Register a, Register b) { return _mm512_max_ps(a, b); }
MK_HD Register smaller(Register a, Register b) { return _mm512_min_ps(a, b); }
MK_HD Register fused(Register a, Register b, Register c) { return _mm512_fmadd_ps(a, b, c); }
#elif defined(__AVX2__)
MK_HD Register larger(Register a, Register b) { return _mm256_max_ps(a, b); }
MK_HD Register smaller(Register a, Register b) { return _mm256_min_ps(a, b); }
MK_HD Register fused(Register a, Register b, Register c) { return _mm256_fmadd_ps(a, b, c); }
#else
MK_HD Register larger(Register a, Register b) { return a > b ? a : b; }
MK_HD Register smaller(Register a, Register b) { return a < b ? a : b; }
MK_HD Register fused(Register a, Register b, Register c) {
  for (int i = 0; i < kRegister; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
#endif
MK_HD Floats larger(Floats a, Floats b) { return {larger(a.one, b.one), larger(a.two, b.two)}; }
MK_HD Floats smaller(Floats a, Floats b) { return {smaller(a.one, b.one), smaller(a.two, b.two)}; }
MK_HD Floats fused(Floats a, Floats b, Floats c) { return {fused(a.one, b.one, c.one), fused(a.two, b.two, c.two)}; }
MK_HD Floats at_least(Floats x, float least) { return larger(least, x); }
MK_HD Floats at_most(Floats x, float most) { return smaller(most, x); }

// The order of numbers in the registers depends on the type T of a kernel: for bf16 the even ones are in the first
// register and the odd ones in the second, so that no shuffle is needed to widen them; other types are in order. fp32
// numbers used beside bf16 have to be brought into that order (class Row).
MK_HD Floats load_lanes(const float* from) {
  Floats result;  // one register at a time: both together would be copied through the stack
  memcpy(&result.one, from, sizeof result.one);
  memcpy(&result.two, from + kRegister, sizeof result.two);
  return result;
}
MK_HD void store_lanes(float* to, Floats x) {
  memcpy(to, &x.one, sizeof x.one);
  memcpy(to + kRegister, &x.two, sizeof x.two);
}

MK_HD Floats load_lanes(const bf16* from) {
  Bits pairs;
  memcpy(&pairs, from, sizeof pairs);
  return {Register(pairs << 16), Register(pairs & 0xffff0000u)};
}

// To nearest, ties to even. NaN stays NaN: its lower half is 0 if it comes from arithmetic, from bf16 or from a Row, so
// nothing is carried into the upper half.
MK_HD Bits to_nearest_bf16(Register x) { return Bits(x) + ((Bits(x) >> 16 & 1u) + 0x7fffu); }
MK_HD void store_lanes(bf16* to, Floats x) {
  const Bits pairs = to_nearest_bf16(x.one) >> 16 | (to_nearest_bf16(x.two) & 0xffff0000u);
  memcpy(static_cast<void*>(to), &pairs, sizeof pairs);
}

#if defined(__AVX512F__)
MK_HD Register load_register(const f16* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
MK_HD void store_register(f16* to, Register x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__AVX2__) && defined(__F16C__)
MK_HD Register load_register(const f16* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
MK_HD void store_register(f16* to, Register x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
#else
MK_HD Register load_register(const f16* from) {
  Register result;
  for (int i = 0; i < kRegister; ++i) result[i] = load(from[i]);
  return result;
}
MK_HD void store_register(f16* to, Register x) {
  for (int i = 0; i < kRegister; ++i) to[i] = store<f16>(x[i]);
}
#endif
MK_HD Floats load_lanes(const f16* from) { return {load_register(from), load_register(from + kRegister)}; }
MK_HD void store_lanes(f16* to, Floats x) { store_register(to, x.one), store_register(to + kRegister, x.two); }

// Numbers rounded to the type T.
template <class T>
MK_HD Floats rounded_lanes(Floats x) {
  T stored[kLanes];
  store_lanes(stored, x);
  return load_lanes(stored);
}
template <>
MK_HD Floats rounded_lanes<bf16>(Floats x) {
  const auto nearest = [](Register r) { return Register(to_nearest_bf16(r) & 0xffff0000u); };
  return {nearest(x.one), nearest(x.two)};
}

// The sum and the largest of all, in a fixed order.
template <int kDistance, size_t... kLane>
MK_HD Register moved(Register x, std::index_sequence<kLane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(x, x, int(kLane ^ kDistance)...);
#else  // which GCC has since version 12
  return __builtin_shuffle(x, Bits{uint32_t(kLane ^ kDistance)...});
#endif
}
template <int kDistance = kRegister / 2, class Join>
MK_HD float joined(Register x, const Join& join) {
  if constexpr (kDistance == 0)
    return x[0];
  else
    return joined<kDistance / 2>(join(x, moved<kDistance>(x, std::make_index_sequence<kRegister>())), join);
}
MK_HD float sum_of(Floats x) {
  return joined(x.one + x.two, [](Register a, Register b) { return a + b; });
}
MK_HD float largest_of(Floats x) {
  return joined(larger(x.one, x.two), [](Register a, Register b) { return larger(a, b); });
}

// A place in a row: kLanes numbers, or the fewer at its end, filled up.
struct Whole {
  int64_t at;
};
struct Rest {
  int64_t at, count;
};

template <class T>
MK_HD Floats get(const T* row, Whole place, float = 0.0f) {
  return load_lanes(row + place.at);
}
template <class T>
MK_HD Floats get(const T* row, Rest place, float filler = 0.0f) {
  T filled[kLanes];
  std::fill(filled, filled + kLanes, store<T>(filler));
  memcpy(static_cast<void*>(filled), row + place.at, size_t(place.count) * sizeof(T));
  return load_lanes(filled);
}
template <class T>
MK_HD void put(T* row, Whole place, Floats x) {
  store_lanes(row + place.at, x);
}
template <class T>
MK_HD void put(T* row, Rest place, Floats x) {
  T filled[kLanes];
  store_lanes(filled, x);
  memcpy(static_cast<void*>(row + place.at), filled, size_t(place.count) * sizeof(T));
}

// Between rows in memory and the order of T.
template <class T>
MK_HD Floats ordered_for(Floats consecutive) {
  if constexpr (!std::is_same_v<T, bf16>) return consecutive;
  float from[kLanes];
  store_lanes(from, consecutive);
  Floats result;
  for (int i = 0; i < kRegister; ++i) result.one[i] = from[2 * i], result.two[i] = from[2 * i + 1];
  return result;
}
template <class T>
MK_HD Floats consecutive_from(Floats ordered) {
  if constexpr (!std::is_same_v<T, bf16>) return ordered;
  float to[kLanes];
  for (int i = 0; i < kRegister; ++i) to[2 * i] = ordered.one[i], to[2 * i + 1] = ordered.two[i];
  return load_lanes(to);
}

// x where it belongs to the row, else 0.
template <class T>
MK_HD Floats within(Whole, Floats x) {
  return x;
}
template <class T>
MK_HD Floats within(Rest place, Floats x) {
  float lanes[kLanes] = {};
  put(lanes, Rest{0, place.count}, consecutive_from<T>(x));
  return ordered_for<T>(load_lanes(lanes));
}

// body(place) for all of a row of `count` numbers, or for those from `at` on.
template <class Body>
MK_HD void for_lanes(int64_t at, int64_t count, const Body& body) {
  for (; at + kLanes <= count; at += kLanes) body(Whole{at});
  if (at < count) body(Rest{at, count - at});
}
template <class Body>
MK_HD void for_lanes(int64_t count, const Body& body) {
  for_lanes(0, count, body);
}

// All NaNs of fp32 become the same one.
MK_HD float quiet_nan(float x) { return x != x ? NAN : x; }

// A row of fp32 numbers in the order of T.
template <class T>
class Row {
 public:
  explicit Row(int64_t count) : count_(count), lanes_(size_t((count + kLanes - 1) / kLanes), Floats(0.0f)) {}

  // A weight or bias of any type; empty without one.
  Row(const void* values, int64_t count, DType dtype) : Row(values == nullptr ? 0 : count) {
    MK_FOR_DTYPE(dtype, U, {
      std::vector<float> wide(lanes_.size() * kLanes);
      for (int64_t i = 0; i < count_; ++i) wide[size_t(i)] = quiet_nan(load(static_cast<const U*>(values)[i]));
      for_lanes(count_, [&](auto place) { at(place) = ordered_for<T>(load_lanes(wide.data() + place.at)); });
    })
  }

  template <class Place>
  Floats& at(Place place) {
    return lanes_[size_t(place.at / kLanes)];
  }
  template <class Place>
  const Floats& at(Place place) const {
    return lanes_[size_t(place.at / kLanes)];
  }
  bool empty() const { return lanes_.empty(); }
  void clear() { std::fill(lanes_.begin(), lanes_.end(), Floats(0.0f)); }
  void copy_to(float* row) const {
    for_lanes(count_, [&](auto place) { put(row, place, consecutive_from<T>(at(place))); });
  }

 private:
  int64_t count_;
  std::vector<Floats> lanes_;
};

}  // namespace mk::cpu::MK_TIER
