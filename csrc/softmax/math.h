// The arguments of the scaled, masked softmax: contiguous scores [outer, inner, queries, keys].
#pragma once

#include "../common/dtype.h"

namespace mk {

// out = softmax(scale * scores) over the keys that a query may see: those the mask allows (null: all), up to key
// query + diagonal. A query that sees no key, or a NaN, becomes a row of NaN.
struct SoftmaxForward {
  const void* scores;
  void* out;                                    // may be the scores
  const bool* mask;                             // [outer, inner, queries, keys] with these strides, keys contiguous
  int64_t mask_outer, mask_inner, mask_query;   // 0 where the mask is the same for all
  int64_t outer, inner, queries, keys, diagonal;
  float scale;
  DType dtype;

  MK_HD int64_t rows() const { return outer * inner * queries; }
  MK_HD const bool* mask_row(int64_t row) const {
    if (mask == nullptr) return nullptr;
    const int64_t query = row % queries, block = row / queries;
    return mask + query * mask_query + block % inner * mask_inner + block / inner * mask_outer;
  }
};

// grad_scores = scale * out * (grad - <grad, out>); keys that a query does not see have out = 0, and are not
// read behind the diagonal.
struct SoftmaxBackward {
  const void* grad;
  const void* out;
  void* grad_scores;  // may be grad
  int64_t rows, queries, keys, diagonal;
  float scale;
  DType dtype;
};

// How many keys the row's query may see at most.
MK_HD int64_t visible_keys(int64_t row, int64_t queries, int64_t keys, int64_t diagonal) {
  const int64_t count = row % queries + diagonal + 1;
  return count < 0 ? 0 : (count < keys ? count : keys);
}

}  // namespace mk
