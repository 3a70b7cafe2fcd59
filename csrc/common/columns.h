// Sums over rows, for the gradients of weights and biases: rows are cut into parts, each part is summed in order into a
// row of its own, then the parts are summed in order. The cut depends on the number of rows alone, so the same input
// gives the same bits for any number of threads.
#pragma once

#include "dtype.h"

namespace mk {

struct RowParts {
  int64_t count, rows_each;

  MK_HD int64_t begin(int64_t part) const { return part * rows_each; }
  MK_HD int64_t end(int64_t part, int64_t rows) const {
    const int64_t end = (part + 1) * rows_each;
    return end < rows ? end : rows;
  }
};

// At most `most` parts of `least` rows or more each.
MK_HD RowParts row_parts(int64_t rows, int64_t most, int64_t least) {
  const int64_t even = (rows + most - 1) / most;
  const int64_t rows_each = even < least ? least : even;
  return {(rows + rows_each - 1) / rows_each, rows_each};
}

// Enough parts to keep every thread of the largest machine busy, few enough that summing them costs little.
MK_HD RowParts row_parts_of_cpu(int64_t rows) { return row_parts(rows, 64, 16); }
MK_HD RowParts row_parts_of_gpu(int64_t rows, int64_t width) { return row_parts(rows, width <= 1024 ? 4224 : 528, 8); }

}  // namespace mk
