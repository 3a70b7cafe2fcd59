// The arguments of the cross-entropy kernels. Logits are [rows, stride]; the first `columns` are this rank's part of
// the vocabulary, whose entries are first, first + 1, ... Statistics are fp32 for every type of logits.
#pragma once

#include "../common/dtype.h"

namespace mk {

// One read of the logits. A label outside of [0, vocabulary) makes its target, and with it the loss, NaN.
struct XentForward {
  const void* logits;
  const int64_t* labels;  // [rows], in the whole vocabulary
  float* peak;            // [rows]: the largest logit; null if loss and log_sum_exp are wanted instead
  float* sum;             // [rows]: of exp(logit - peak), or of exp(logit) where all are -inf
  float* target;          // [rows]: the label's logit, 0 where another rank holds it
  float* loss;            // [rows]: log_sum_exp - target
  float* log_sum_exp;     // [rows]
  int64_t rows, columns, stride, first, vocabulary;
  DType dtype;
};

// out = (softmax - onehot) * grad, which may be the logits themselves. Padding behind the columns becomes 0.
struct XentBackward {
  const void* logits;
  void* out;  // [rows, out_stride]
  const int64_t* labels;
  const float* log_sum_exp;  // [rows], of the whole vocabulary
  const float* grad;         // [rows]
  int64_t rows, columns, stride, first, out_width, out_stride;
  DType dtype;
};

// Forward and backward at once, for a whole vocabulary and an upstream gradient of 1: the logits become softmax -
// onehot while they are in the cache.
struct XentInPlace {
  void* logits;
  const int64_t* labels;
  float* loss;  // [rows]
  int64_t rows, columns, width, stride;  // the padding between columns and width becomes 0
  DType dtype;
};

}  // namespace mk
