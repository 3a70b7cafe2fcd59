// What the cross-entropy kernels are given. Logits are [rows, stride], of which this rank's `columns` count: those of
// the vocabulary's entries first, first + 1, ... Statistics are fp32 whatever the logits are.
#pragma once

#include "dtype.h"

namespace mk {

// One read of the logits. A label outside of [0, vocabulary) makes its target, and with it the loss, NaN.
struct XentForward {
  const void* logits;
  const int64_t* labels;  // [rows], in the whole vocabulary
  float* peak;            // [rows]: the largest logit; null where the two below are asked for instead
  float* sum;             // [rows]: of exp(logit - peak), or of exp(logit) where all are -inf
  float* target;          // [rows]: the label's logit, 0 where another rank holds it
  float* loss;            // [rows]: log_sum_exp - target
  float* log_sum_exp;     // [rows]
  int64_t rows, columns, stride, first, vocabulary;
  DType dtype;
};

// out = (softmax - onehot) * grad, which may be the logits themselves. What lies behind the columns becomes 0.
struct XentBackward {
  const void* logits;
  void* out;  // [rows, out_stride]
  const int64_t* labels;
  const float* log_sum_exp;  // [rows], of the whole vocabulary
  const float* grad;         // [rows]
  int64_t rows, columns, stride, first, out_width, out_stride;
  DType dtype;
};

// Both at once for a whole vocabulary and a gradient of one: the logits become softmax - onehot while they are near.
struct XentInPlace {
  void* logits;
  const int64_t* labels;
  float* loss;  // [rows]
  int64_t rows, columns, width, stride;  // what lies between columns and width becomes 0
  DType dtype;
};

}  // namespace mk
