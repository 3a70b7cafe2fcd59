// Shared by the two passes of attention: blocks, the layout of factors for matrix products, which keys a query sees.
#pragma once

#include <algorithm>
#include <cmath>
#include <new>

#include "../common/math.h"
#include "../common/parallel.h"
#include "math.h"
#include "product.h"

namespace mk::cpu::MK_TIER {

constexpr int64_t kBlock = 64;  // queries, and keys, of a block: a pair's scores fit into the L1 cache
constexpr float kLog2E = 1.44269504f;

constexpr int64_t divided_up(int64_t count, int64_t by) { return (count + by - 1) / by; }
constexpr int64_t filled_up(int64_t count, int64_t to) { return divided_up(count, to) * to; }

template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count)
      : data_(static_cast<T*>(::operator new(size_t(std::max<int64_t>(count, 1)) * sizeof(T), kAlignment))) {}
  ~Buffer() { ::operator delete(data_, kAlignment); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  operator T*() const { return data_; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  T* data_;
};

// 2^x for x <= 127, to the accuracy of T: 0 far below the smallest normal number and for -inf; NaN for NaN.
template <class T>
inline Floats exp2_of(Floats x) {
  const Floats magic = 12582912.0f + 127.0f;  // see exponential() of common/math.h
  const Floats bounded = at_least(x, -127.0f), shifted = bounded + magic;
  return exp2_near_zero<T>(bounded - (shifted - magic)) * power_of_two(shifted);
}

// A block of queries and a block of keys: which of the keys each query sees.
struct Pair {
  int64_t first_query, queries;  // of the block
  int64_t first_key, keys;
  int64_t diagonal;

  // How many keys the row sees, from the block's first on.
  int64_t seen_by(int64_t row) const {
    return std::clamp<int64_t>(first_query + row + diagonal + 1 - first_key, 0, keys);
  }
  // The first row that sees the key.
  int64_t first_to_see(int64_t key) const {
    return std::clamp<int64_t>(first_key + key - diagonal - first_query, 0, queries);
  }
};

inline int64_t keys_seen_up_to(const AttentionShape& shape, int64_t query) {
  return std::clamp<int64_t>(query + shape.diagonal + 1, 0, shape.keys);
}

// The first key that any of these queries sees, rounded down to a block.
inline int64_t first_key_block(const AttentionShape& shape, int64_t batch, int64_t query, int64_t queries) {
  if (shape.from == nullptr) return 0;
  const int64_t* from = shape.from + batch * shape.from_batch + query;
  const int64_t first = *std::min_element(from, from + queries);
  return std::clamp<int64_t>(first, 0, shape.keys) / kBlock * kBlock;
}

// How many keys of the block lie before the first that the row sees.
inline int64_t hidden_before(const AttentionShape& shape, const Pair& pair, int64_t batch, int64_t row) {
  if (shape.from == nullptr) return 0;
  return std::clamp<int64_t>(shape.from[batch * shape.from_batch + pair.first_query + row] - pair.first_key, 0, kBlock);
}

inline const bool* mask_row(const AttentionShape& shape, int64_t batch, int64_t head, int64_t query) {
  return shape.mask + batch * shape.mask_batch + head * shape.mask_head + query * shape.mask_query;
}

// False where all keys of the block are hidden from all its queries.
inline bool any_visible(const AttentionShape& shape, const Pair& pair, int64_t batch, int64_t head) {
  if (shape.mask == nullptr && shape.from == nullptr) return true;
  for (int64_t row = 0; row < pair.queries; ++row) {
    const int64_t hidden = hidden_before(shape, pair, batch, row), seen = pair.seen_by(row);
    if (hidden >= seen) continue;
    if (shape.mask == nullptr) return true;
    const bool* allowed = mask_row(shape, batch, head, pair.first_query + row) + pair.first_key;
    if (std::any_of(allowed + hidden, allowed + seen, [](bool x) { return x; })) return true;
  }
  return false;
}

constexpr int64_t kParts = kBlock / kLanes;  // of a row of scores

// Which keys of a block a query sees: from `hidden` up to `seen` those that the mask allows.
class Visible {
 public:
  Visible(int64_t hidden, int64_t seen, const bool* allowed)
      : all_(hidden == 0 && seen == kBlock && allowed == nullptr) {
    if (all_) return;
    const int32_t first = int32_t(hidden), last = int32_t(seen);
#pragma omp simd
    for (int32_t i = 0; i < int32_t(kBlock); ++i) seen_[i] = i >= first && i < last ? 1.0f : 0.0f;
    for (int64_t i = hidden; i < seen && allowed != nullptr; ++i) seen_[i] = float(allowed[i]);
  }
  // `x` where the query sees the key, else `otherwise`, for part i of the block.
  Floats or_else(int64_t i, Floats x, float otherwise) const {
    return all_ ? x : where_less(0.5f, load_lanes(seen_ + i * kLanes), x, otherwise);
  }

 private:
  bool all_;
  float seen_[kBlock];
};

inline Visible visible(const AttentionShape& shape, const Pair& pair, int64_t batch, int64_t head, int64_t row) {
  const bool* allowed = nullptr;
  if (shape.mask != nullptr) allowed = mask_row(shape, batch, head, pair.first_query + row) + pair.first_key;
  return Visible(hidden_before(shape, pair, batch, row), pair.seen_by(row), allowed);
}

// 1 / (1 - probability) for what is kept, 0 for what is dropped: a hash of seed, head, query and key.
class Keep {
 public:
  Keep(const Dropout& dropout, int64_t head, int64_t query)
      : threshold_(uint32_t(std::min(double(dropout.probability) * 4294967296.0, 4294967295.0))),
        factor_(dropout.probability < 1.0f ? 1.0f / (1.0f - dropout.probability) : 0.0f) {
    uint64_t x = dropout.seed + 0x9e3779b97f4a7c15u * (uint64_t(head) << 32 | uint64_t(query));
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    row_ = uint32_t((x ^ (x >> 31)) >> 16);
  }
  // For kLanes keys from `key` on.
  Floats operator()(int64_t key) const {
    float result[kLanes];
#pragma omp simd
    for (int64_t i = 0; i < kLanes; ++i) {
      uint32_t x = row_ + uint32_t(key + i) * 0x9e3779b1u;
      x = (x ^ (x >> 16)) * 0x85ebca6bu;
      x = (x ^ (x >> 13)) * 0xc2b2ae35u;
      result[i] = (x ^ (x >> 16)) >= threshold_ ? factor_ : 0.0f;
    }
    return load_lanes(result);
  }

 private:
  uint32_t row_, threshold_;
  float factor_;
};

// ---- factors of products ----

template <class Math>
constexpr int64_t units(int64_t depth) {
  return divided_up(depth, Math::kDepth);
}

// Rows become a left factor of `all_rows` rows of `depth` units, filled up with zeros.
template <class Math, class T>
void lay_left(const T* from, int64_t stride, int64_t rows, int64_t width, typename Math::Unit* to, int64_t all_rows,
              int64_t depth) {
  const int64_t used = units<Math>(width);
  for (int64_t row = 0; row < rows; ++row, to += depth) {
    const T* numbers = from + row * stride;
    std::fill(to + used - 1, to + depth, typename Math::Unit(0));
    if constexpr (Math::kDepth == 1) {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) to[i] = load(numbers[i]);
    } else {
      memcpy(to, numbers, size_t(width) * sizeof(T));
    }
  }
  std::fill(to, to + (all_rows - rows) * depth, typename Math::Unit(0));
}

// Rows become a right factor [units(rows), columns], `columns` being `width` filled up with zeros.
template <class Math, class T>
void lay_right(const T* from, int64_t stride, int64_t rows, int64_t width, typename Math::Unit* to, int64_t columns) {
  for (int64_t row = 0; row < rows; row += Math::kDepth, to += columns) {
    const T* numbers = from + row * stride;
    std::fill(to + width, to + columns, typename Math::Unit(0));
    if constexpr (Math::kDepth == 1) {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) to[i] = load(numbers[i]);
    } else if (row + 1 < rows) {
      const T* next = numbers + stride;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) to[i] = uint32_t(numbers[i].bits) | uint32_t(next[i].bits) << 16;
    } else {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) to[i] = uint32_t(numbers[i].bits);
    }
  }
}

// The rows of a block become columns of a right factor [units(width), kBlock], filled up with zeros. `rows_laid` is
// a workspace: the same rows as a left factor whose rows are whole registers.
template <class Math, class T>
void lay_columns(const T* from, int64_t stride, int64_t rows, int64_t width, typename Math::Unit* rows_laid,
                 typename Math::Unit* to) {
  const int64_t depth = units<Math>(width), whole = filled_up(depth, kRegister);
  lay_left<Math>(from, stride, rows, width, rows_laid, kBlock, whole);
  for (int64_t row = 0; row < kBlock; row += kRegister) {
    for (int64_t k = 0; k < depth; k += kRegister) {
      Register tile[kRegister];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kRegister; ++i) tile[i] = load_register(rows_laid + (row + i) * whole + k);
      transpose(tile);
      for (int64_t i = 0; i < std::min<int64_t>(kRegister, depth - k); ++i)
        memcpy(to + (k + i) * kBlock + row, &tile[i], sizeof tile[i]);
    }
  }
}

template <class T>
void write_row(const float* from, float factor, T* to, int64_t width) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) to[i] = store<T>(from[i] * factor);
}

// A pass over every group of heads that share a key; a thread takes whole groups, so that sums have a fixed order.
template <class Pass, class Args>
void run_groups(const Args& args) {
  const int64_t groups = args.shape.groups;
  parallel_for(args.shape.batch * groups, 1, [&](int64_t begin, int64_t end) {
    Pass pass(args);
    for (int64_t i = begin; i < end; ++i) pass.run(i / groups, i % groups);
  });
}

// MK_FOR_MATH(dtype, Math, T, { ... }): bf16 is multiplied in pairs where the instruction set can.
#if defined(__AVX512BF16__)
#define MK_FOR_MATH(dtype, Math, T, ...)        \
  if (dtype == ::mk::DType::bf16) {             \
    using Math = Pairs;                         \
    using T = ::mk::bf16;                       \
    __VA_ARGS__;                                \
  } else {                                      \
    using Math = Singles;                       \
    MK_FOR_DTYPE(dtype, T, __VA_ARGS__)         \
  }
#else
#define MK_FOR_MATH(dtype, Math, T, ...)      \
  {                                           \
    using Math = Singles;                     \
    MK_FOR_DTYPE(dtype, T, __VA_ARGS__)       \
  }
#endif

}  // namespace mk::cpu::MK_TIER
