// The arguments of the norms. Pointers are to contiguous rows of the type `dtype` unless said otherwise.
#pragma once

#include "../common/columns.h"

namespace mk {

struct NormForward {
  const void* x;         // [rows, width]
  const void* residual;  // [rows, width], or null: nothing is added
  const void* weight;    // [width], of the type `weight_dtype`
  const void* bias;      // the same, or null
  void* sum;             // [rows, width]: x + residual; null without a residual
  void* out;             // [rows, width]
  float* mean;           // [rows]; null: RMSNorm, which does not centre
  float* rstd;           // [rows]
  int64_t rows, width;
  float eps;
  DType dtype, weight_dtype;
};

struct NormBackward {
  const void* grad;      // [rows, width]
  const void* grad_sum;  // [rows, width]: gradient of x + residual that does not come through the norm; or null
  const void* x;         // [rows, width]: what was normalised
  const void* weight;
  const float* mean;     // null: RMSNorm
  const float* rstd;
  void* grad_x;          // [rows, width]
  void* grad_weight;     // [width], of the type `weight_dtype`
  void* grad_bias;       // the same, or null
  float* partial;        // workspace: [parts, 1 or 2 (with a bias), width]
  int64_t rows, width;
  DType dtype, weight_dtype;
};

}  // namespace mk
