// What the activation kernels are given. Pointers are to contiguous rows of the type `dtype` unless said otherwise.
#pragma once

#include "columns.h"

namespace mk {

enum class Activation : int32_t { silu, gelu_tanh, gelu_erf, squared_relu };

struct ActivationForward {
  const void* x;     // [rows, width]
  const void* bias;  // [width] of the type `bias_dtype`, added to x first; or null
  void* out;         // [rows, width]
  int64_t rows, width;
  Activation function;
  DType dtype, bias_dtype;
};

struct ActivationBackward {
  const void* grad;  // [rows, width]
  const void* x;     // [rows, width]
  const void* bias;  // as before
  void* grad_x;      // [rows, width]
  void* grad_bias;   // [width] of the type `bias_dtype`; null without a bias
  float* partial;    // workspace: [parts, width]; null without a bias
  int64_t rows, width;
  Activation function;
  DType dtype, bias_dtype;
};

// function(gate) * up
struct GatedForward {
  const void* x;  // [rows, 2 * width]: gate, then up
  void* out;      // [rows, width]
  int64_t rows, width;
  Activation function;
  DType dtype;
};

struct GatedBackward {
  const void* grad;  // [rows, width]
  const void* x;     // [rows, 2 * width]
  void* grad_x;      // [rows, 2 * width]
  int64_t rows, width;
  Activation function;
  DType dtype;
};

}  // namespace mk

// MK_FOR_ACTIVATION(function, F, { ... }) runs the block with F as the class of common/math.h.
#define MK_FOR_ACTIVATION(function, F, ...) \
  switch (function) {                       \
    case ::mk::Activation::silu: {          \
      using F = ::mk::Silu;                 \
      __VA_ARGS__;                          \
      break;                                \
    }                                       \
    case ::mk::Activation::gelu_tanh: {     \
      using F = ::mk::GeluTanh;             \
      __VA_ARGS__;                          \
      break;                                \
    }                                       \
    case ::mk::Activation::gelu_erf: {      \
      using F = ::mk::GeluErf;              \
      __VA_ARGS__;                          \
      break;                                \
    }                                       \
    case ::mk::Activation::squared_relu: {  \
      using F = ::mk::SquaredRelu;          \
      __VA_ARGS__;                          \
      break;                                \
    }                                       \
  }
