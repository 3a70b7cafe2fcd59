// Gradients of attention that was done in blocks of queries. That is a CPU's way: CUDA has no such kernel.
#pragma once

#include "../common/dtype.h"
#include "tiers.h"

namespace mk {

// [batch, heads, seq, width] with these strides, `width` side by side.
struct Heads {
  void* data;
  int64_t heads, batch_stride, head_stride, row_stride;  // in elements
};

// Parts hold one block's rows behind the other's, each contiguous: [batch * heads, rows of the block, width].
struct BlockGradients {
  const void *query_parts, *key_parts, *value_parts;
  Heads query, key, value;  // a key's gradient is the sum over the blocks that see it, in their order, rounded once
  int64_t batch, seq, width;
  int64_t block;  // queries of a block
  bool causal;    // a block sees the keys up to its last query's; else all
  DType dtype;

  int64_t blocks() const { return (seq + block - 1) / block; }
  int64_t end_of(int64_t i) const { return (i + 1) * block < seq ? (i + 1) * block : seq; }
  int64_t queries_of(int64_t i) const { return end_of(i) - i * block; }
  int64_t keys_of(int64_t i) const { return causal ? end_of(i) : seq; }
};

}  // namespace mk

MK_CPU_KERNEL(block_gradients, BlockGradients)
