// The arguments of a product of a few rows with a large weight, as a step of generation computes it on a CPU.
#pragma once

#include "../common/dtype.h"

namespace mk {

struct FewRows {
  const void *x, *weight, *bias;  // [rows, in], [out, in], [out] or null
  void* result;                   // [rows, out]
  int64_t rows, in, out;
  DType dtype;
};

}  // namespace mk
