// The optimizer's update, and the arguments of its kernels: flat buffers that hold many parameters one after the other.
#pragma once

#include <math.h>

#include "../common/dtype.h"

namespace mk {

// How the weights are stored. `remainder`: as bf16 and 16 more bits, which together are exactly the fp32 weight.
enum class Weights : int32_t { in_place = 0, bf16_copy = 1, f16_copy = 2, remainder = 3 };

// Parameter groups: elements from ends[i - 1] up to ends[i] multiply the learning rate by rates[2 * i] and the weight
// decay by rates[2 * i + 1].
struct Segments {
  const int64_t* ends;
  const float* rates;
  int64_t count;
};

// The numbers of one step, computed on the device: no host sync.
struct StepControl {
  float applied;      // 0: a gradient was not finite, and the step is skipped
  float grad_factor;  // unscaling and clipping of the gradients in one factor
  float learning_rate, weight_decay;
  float correction1;       // 1 - beta1^step
  float correction2_root;  // sqrt(1 - beta2^step)
};

struct AdamW {
  float* weights;         // fp32; unused with Weights::remainder
  void* copy;             // the model's weights: bf16 or fp16
  int16_t* remainder;     // with Weights::remainder
  void *exp_avg, *exp_avg_sq;
  const void* grad;
  const StepControl* control;
  Segments segments;
  int64_t size;
  float beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
  Weights kept;
  DType grad_dtype, moment_dtype;
};

struct SquareSum {
  const void* x;
  double* partial;  // one for every kSquareSumPart elements
  double* out;      // one number: finite if and only if all elements are
  int64_t size;
  DType dtype;
};

constexpr int64_t kSquareSumPart = 1 << 16;

MK_HD int64_t square_sum_parts(int64_t size) { return (size + kSquareSumPart - 1) / kSquareSumPart; }

// The constants of one segment's step.
struct AdamStep {
  float grad_factor, decay, rate, beta1, one_minus_beta1, beta2, one_minus_beta2, correction2_root, eps;
};

MK_HD AdamStep adam_step(const AdamW& a, const StepControl& c, int64_t segment) {
  const float rate = c.learning_rate * a.segments.rates[2 * segment];
  const float decay = rate * (c.weight_decay * a.segments.rates[2 * segment + 1]);
  return {c.grad_factor, decay,           rate / c.correction1, a.beta1, a.one_minus_beta1, a.beta2,
          a.one_minus_beta2, c.correction2_root, a.eps};
}

// Decoupled weight decay. Decay and step are summed before they are subtracted, so that the weight is rounded once: 1 -
// 1e-7 alone would lose most of the decay.
MK_HD float adam_update(const AdamStep& s, float weight, float grad, float& exp_avg, float& exp_avg_sq) {
  const float g = grad * s.grad_factor;
  exp_avg = s.beta1 * exp_avg + s.one_minus_beta1 * g;
  exp_avg_sq = s.beta2 * exp_avg_sq + s.one_minus_beta2 * (g * g);
  const float size = sqrtf(exp_avg_sq) / s.correction2_root + s.eps;
  return weight - (s.decay * weight + s.rate * (exp_avg / size));
}

// The bf16 weight is the fp32 one rounded to the nearest (a tie upwards in magnitude), so that the remainder fits into
// 16 bits.
MK_HD float joined(bf16 weight, int16_t remainder) {
  return from_bits((uint32_t(weight.bits) << 16) + uint32_t(int32_t(remainder)));
}

MK_HD bf16 split(float weight, int16_t& remainder) {
  const uint32_t bits = bits_of(weight);
  remainder = int16_t(bits & 0xffffu);
  return bf16{uint16_t((bits + 0x8000u) >> 16)};
}

}  // namespace mk

// MK_FOR_ADAM(args, Grad, Moment, kKept, { ... }) runs the block with the storage types and the kind of weights.
#define MK_FOR_ADAM(args, Grad, Moment, kKept, ...)                               \
  MK_FOR_WIDE_OR_BF16((args).grad_dtype, Grad,                                    \
                      MK_FOR_WIDE_OR_BF16((args).moment_dtype, Moment, MK_FOR_KEPT((args).kept, kKept, __VA_ARGS__)))
#define MK_FOR_WIDE_OR_BF16(dtype, T, ...) \
  if ((dtype) == ::mk::DType::f32) {       \
    using T = float;                       \
    __VA_ARGS__                            \
  } else {                                 \
    using T = ::mk::bf16;                  \
    __VA_ARGS__                            \
  }
#define MK_FOR_KEPT(kept, kKept, ...)                            \
  switch (kept) {                                                \
    case ::mk::Weights::in_place: {                              \
      constexpr ::mk::Weights kKept = ::mk::Weights::in_place;   \
      __VA_ARGS__;                                               \
      break;                                                     \
    }                                                            \
    case ::mk::Weights::bf16_copy: {                             \
      constexpr ::mk::Weights kKept = ::mk::Weights::bf16_copy;  \
      __VA_ARGS__;                                               \
      break;                                                     \
    }                                                            \
    case ::mk::Weights::f16_copy: {                              \
      constexpr ::mk::Weights kKept = ::mk::Weights::f16_copy;   \
      __VA_ARGS__;                                               \
      break;                                                     \
    }                                                            \
    case ::mk::Weights::remainder: {                             \
      constexpr ::mk::Weights kKept = ::mk::Weights::remainder;  \
      __VA_ARGS__;                                               \
      break;                                                     \
    }                                                            \
  }
