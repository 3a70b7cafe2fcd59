// The arguments of the rotary embedding.
#pragma once

#include "../common/dtype.h"

namespace mk {

// Channels i and i + half of every head are rotated by the angle of (position, i); channels from 2 * half on are
// copied.
struct Rope {
  const void* x;     // [batch, seq, heads, head_dim] with these strides; the channels of a head are contiguous
  const void* cos;   // [batch or 1, seq, half], contiguous, of the type `table_dtype`
  const void* sin;   // the same
  void* out;         // [batch, seq, heads, head_dim], contiguous
  int64_t batch, seq, heads, head_dim, half;
  int64_t batch_stride, seq_stride, head_stride;  // of x, in elements
  int64_t table_stride;                           // from one batch of cos to the next: 0 or seq * half
  float direction;                                // 1, or -1: rotate backwards, which is the gradient
  DType dtype, table_dtype;
};

}  // namespace mk
