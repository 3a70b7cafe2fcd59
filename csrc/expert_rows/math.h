// The arguments of the kernels that move rows of a mixture-of-experts layer.
#pragma once

#include "../common/dtype.h"

namespace mk {

// A token has `per` choices of an expert; choice c belongs to token c / per. -1 stands for no choice, or for no row.

// out[r] = x[source[r] / per] * weights[source[r]]; zeros without a choice.
struct TakeRows {
  const void* x;          // [tokens, width]
  const int64_t* source;  // [rows]: choices
  const void* weights;    // [choices], or null: 1
  void* out;              // [rows, width]
  int64_t rows, choices, width, per;
  DType dtype;
};

// out[t] = the sum over j < per of rows[place[c]] * weights[c] for c = t * per + j, in order of j.
struct SumRows {
  const void* rows;      // [count, width]
  const int64_t* place;  // [tokens * per]: rows
  const void* weights;   // [tokens * per], or null: 1
  void* out;             // [tokens, width]
  int64_t tokens, count, width, per;
  DType dtype;
};

// out[c] = the product of rows[place[c]] and dy[c / per]; 0 without a row.
struct RowProducts {
  const void* rows;      // [count, width]
  const int64_t* place;  // [choices]: rows
  const void* dy;        // [choices / per, width]
  void* out;             // [choices]
  int64_t choices, count, width, per;
  DType dtype;
};

// Whether an index is that of one of `count` things. The CPU rejects indices other than these and -1; on a GPU, where
// a check would need a host sync, they count as -1.
MK_HD bool exists(int64_t index, int64_t count) { return uint64_t(index) < uint64_t(count); }

template <class T>
MK_HD float weight_of(const void* weights, int64_t choice) {
  return weights == nullptr ? 1.0f : load(static_cast<const T*>(weights)[choice]);
}

}  // namespace mk
