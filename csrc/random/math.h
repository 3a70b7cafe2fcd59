// Random values by index: the formulas of megatron/model/random_values.py, operation for operation, so both give the
// same bits. Only 64-bit integers and + - * / and square root of float64, none of them fused.
#pragma once

#include <bit>
#include <cstdint>

namespace mk {

struct RandomValues {
  const int64_t* runs;  // [number_of_runs, 2]: the first element and the number of elements
  int64_t number_of_runs;
  float* out;  // the elements of the runs, one after the other
  int64_t count;
  uint64_t key[2];
  double scale;  // the standard deviation, or the bound
  bool normal;
};

namespace random {

// Exact for integers below 2^52.
inline double as_double(uint64_t integer) { return std::bit_cast<double>(integer | 0x4330000000000000u) - 0x1p52; }

// The natural logarithm of x in (0, 1) to 7 digits: the series of the inverse hyperbolic tangent for a factor between
// sqrt(1/2) and sqrt(2), and a power of two.
inline double log(double x) {
  constexpr uint64_t kBelowSqrtHalf = 0x3FE6A09E00000000u, kBias = uint64_t(1024) << 52;
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  const uint64_t above = bits - kBelowSqrtHalf + kBias;  // biased, so that the shift needs no sign
  const uint64_t factor_bits = bits - ((above & 0xFFF0000000000000u) - kBias);
  const double exponent = std::bit_cast<double>((above >> 52) | 0x4330000000000000u) - (0x1p52 + 1024);
  const double factor = std::bit_cast<double>(factor_bits);
  const double s = (factor - 1.0) / (factor + 1.0), square = s * s;
  const double series = ((square * (2.0 / 7) + 2.0 / 5) * square + 2.0 / 3) * square + 2.0;
  return series * s + exponent * 0.6931471805599453;
}

// Taylor's series, to 7 digits for angles up to 45 degrees.
inline double cosine(double square) {
  return (((square * (1.0 / 40320) + -1.0 / 720) * square + 1.0 / 24) * square + -1.0 / 2) * square + 1.0;
}

inline double sine(double x, double square) {
  return ((((square * (1.0 / 362880) + -1.0 / 5040) * square + 1.0 / 120) * square + -1.0 / 6) * square + 1.0) * x;
}

inline double with_sign(double value, uint64_t word) {
  return std::bit_cast<double>(std::bit_cast<uint64_t>(value) ^ (word & 0x8000000000000000u));
}

// Box and Muller: the lower half of a word is a distance from the origin, the upper half two signs and 30 bits of an
// angle in the first quadrant.
inline void normal_pair(uint64_t word, double std, float& first, float& second) {
  const double distance = __builtin_sqrt(-log((as_double(word & 0xFFFFFFFFu) + 0.5) * 0x1p-32)) * std;
  const double angle = (as_double((word >> 32) & 0x3FFFFFFFu) + (0.5 - 0x1p29)) * (3.141592653589793 / 2 * 0x1p-30);
  const double square = angle * angle, cos = cosine(square), sin = sine(angle, square);
  first = float(with_sign((cos - sin) * distance, word));
  second = float(with_sign((cos + sin) * distance, word << 1));
}

// The middle of one of 2^32 equal parts of (-bound, bound), of each half of a word.
inline void uniform_pair(uint64_t word, double bound, float& first, float& second) {
  first = float((as_double(word & 0xFFFFFFFFu) + (0.5 - 0x1p31)) * (bound * 0x1p-31));
  second = float((as_double(word >> 32) + (0.5 - 0x1p31)) * (bound * 0x1p-31));
}

}  // namespace random
}  // namespace mk
