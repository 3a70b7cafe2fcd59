// What the activation kernels are given. Pointers are to contiguous rows of the type `dtype`.
#pragma once

#include "dtype.h"

namespace mk {

struct SwigluForward {
  const void* x;  // [rows, 2 * width]: gate, then up
  void* out;      // [rows, width]
  int64_t rows, width;
  DType dtype;
};

struct SwigluBackward {
  const void* x;     // [rows, 2 * width]
  const void* grad;  // [rows, width]
  void* grad_x;      // [rows, 2 * width]
  int64_t rows, width;
  DType dtype;
};

}  // namespace mk
