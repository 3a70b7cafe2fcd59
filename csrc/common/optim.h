// What the optimizer's kernels are given: flat buffers, in which many parameters lie one after the other.
#pragma once

#include <math.h>

#include "dtype.h"

namespace mk {

// Where the weights are kept. `remainder`: only the bf16 weights and 16 more bits of each exist; together they are the
// fp32 weight, exactly.
enum class Weights : int32_t { in_place = 0, bf16_copy = 1, f16_copy = 2, remainder = 3 };

// Parameters of one kind: those up to `ends[i]` and from `ends[i - 1]` on take rates times rates[2 * i] (learning rate)
// and rates[2 * i + 1] (weight decay).
struct Segments {
  const int64_t* ends;
  const float* rates;
  int64_t count;
};

// The numbers of one step. They are computed on the device, so that no step waits for the host.
struct StepControl {
  float applied;      // 0: a gradient was not finite, and nothing is touched
  float grad_factor;  // what every gradient is multiplied by: unscaling and clipping in one
  float learning_rate, weight_decay;
  float correction1;       // 1 - beta1^step
  float correction2_root;  // sqrt(1 - beta2^step)
};

struct AdamW {
  float* weights;         // fp32; unused with Weights::remainder
  void* copy;             // what the model computes with: bf16 or fp16
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
  double* out;      // one number: not finite exactly if an element is not
  int64_t size;
  DType dtype;
};

constexpr int64_t kSquareSumPart = 1 << 16;

MK_HD int64_t square_sum_parts(int64_t size) { return (size + kSquareSumPart - 1) / kSquareSumPart; }

// A parameter's step, once its rates are known.
struct AdamStep {
  float grad_factor, decay, rate, beta1, one_minus_beta1, beta2, one_minus_beta2, correction2_root, eps;
};

MK_HD AdamStep adam_step(const AdamW& a, const StepControl& c, int64_t segment) {
  const float rate = c.learning_rate * a.segments.rates[2 * segment];
  const float decay = rate * (c.weight_decay * a.segments.rates[2 * segment + 1]);
  return {c.grad_factor, decay,           rate / c.correction1, a.beta1, a.one_minus_beta1, a.beta2,
          a.one_minus_beta2, c.correction2_root, a.eps};
}

// Decoupled weight decay. What is taken off the weight is summed up first, so that the weight is rounded once: 1 - decay
// alone would lose most of a decay of 1e-7.
MK_HD float adam_update(const AdamStep& s, float weight, float grad, float& exp_avg, float& exp_avg_sq) {
  const float g = grad * s.grad_factor;
  exp_avg = s.beta1 * exp_avg + s.one_minus_beta1 * g;
  exp_avg_sq = s.beta2 * exp_avg_sq + s.one_minus_beta2 * (g * g);
  const float size = sqrtf(exp_avg_sq) / s.correction2_root + s.eps;
  return weight - (s.decay * weight + s.rate * (exp_avg / size));
}

// The bf16 weight is the fp32 one rounded to the nearest (a tie upwards in magnitude), so that what is left fits 16 bits.
MK_HD float joined(bf16 weight, int16_t remainder) {
  return from_bits((uint32_t(weight.bits) << 16) + uint32_t(int32_t(remainder)));
}

MK_HD bf16 split(float weight, int16_t& remainder) {
  const uint32_t bits = bits_of(weight);
  remainder = int16_t(bits & 0xffffu);
  return bf16{uint16_t((bits + 0x8000u) >> 16)};
}

}  // namespace mk

// MK_FOR_ADAM(args, Grad, Moment, kKept, { ... }) runs the block with the storage types and with where the weights are.
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
