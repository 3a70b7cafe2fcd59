// Attention on a CPU, a block of queries and a block of keys at a time: scores exist for one pair of blocks only, the
// backward pass computes them again. CUDA has torch's own.
#pragma once

#include "../common/dtype.h"
#include "tiers.h"

namespace mk {

// [batch, rows, heads, width] with these strides in elements, `width` numbers side by side.
struct Heads {
  void* data;
  int64_t batch_stride, row_stride, head_stride;

  template <class T>
  T* at(int64_t batch, int64_t row, int64_t head) const {
    return static_cast<T*>(data) + batch * batch_stride + row * row_stride + head * head_stride;
  }
};

// Each element is kept with the same probability, whatever the order in which blocks are taken.
struct Dropout {
  float probability;  // of being dropped
  uint64_t seed;
};

struct AttentionShape {
  int64_t batch, heads, groups, queries, keys, width;  // heads of a group share a key and a value
  int64_t diagonal;                                    // query i sees the keys up to i + diagonal
  float scale;
  const bool* mask;  // true = may look; keys side by side; or null
  int64_t mask_batch, mask_head, mask_query;
  Dropout dropout;
  DType dtype;
};

struct AttentionForward {
  AttentionShape shape;
  Heads query, key, value, out;
  float* log_sum_exp;  // [batch, heads, queries]: of the scaled scores, in powers of two
};

struct AttentionBackward {
  AttentionShape shape;
  Heads query, key, value, out, grad;
  const float* log_sum_exp;
  Heads grad_query, grad_key, grad_value;
};

}  // namespace mk

MK_CPU_PRODUCTS(attention_forward, AttentionForward)
MK_CPU_PRODUCTS(attention_backward, AttentionBackward)
