// The arguments of attention on a CPU. It takes a block of queries and a block of keys at a time: scores exist for one
// pair of blocks only, and the backward pass computes them again. On CUDA PyTorch's own attention is used.
#pragma once

#include "../common/dtype.h"

namespace mk {

// [batch, rows, heads, width] with these strides in elements, `width` contiguous numbers.
struct Heads {
  void* data;
  int64_t batch_stride, row_stride, head_stride;

  template <class T>
  T* at(int64_t batch, int64_t row, int64_t head) const {
    return static_cast<T*>(data) + batch * batch_stride + row * row_stride + head * head_stride;
  }
};

// Whether an element is kept depends on its place alone, not on the order in which blocks are taken.
struct Dropout {
  float probability;  // of being dropped
  uint64_t seed;
};

struct AttentionShape {
  int64_t batch, heads, groups, queries, keys, width;  // heads of a group share a key and a value
  int64_t diagonal;                                    // query i sees the keys up to i + diagonal
  float scale;
  const bool* mask;  // true = may look; keys contiguous; or null
  int64_t mask_batch, mask_head, mask_query;
  const int64_t* from;  // the first key that a query sees, the same for all heads; or null
  int64_t from_batch;
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
