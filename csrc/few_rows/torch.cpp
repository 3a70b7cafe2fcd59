#if !defined(MK_EMULATED)  // there is no CUDA kernel to emulate

#include <optional>

#include "../common/binding.h"
#include "math.h"

MK_CPU_KERNEL(few_rows, FewRows)

namespace mk::binding {
namespace {

constexpr const char* kName = "few_rows";

// The bias is added in fp32, before the result is rounded.
Tensor few_rows(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  check_contiguous(x, kName, "x");
  check_contiguous(weight, kName, "the weight");
  STD_TORCH_CHECK(x.dim() > 0 && weight.dim() == 2 && weight.size(1) == x.size(-1) &&
                      weight.scalar_type() == x.scalar_type(),
                  kName, ": the weight has not the width and type of x");
  if (bias.has_value()) {
    check_contiguous(*bias, kName, "the bias");
    STD_TORCH_CHECK(bias->numel() == weight.size(0) && bias->scalar_type() == x.scalar_type(), kName,
                    ": the bias must have the size and type of the result");
  }
  std::vector<int64_t> shape = x.sizes();
  shape.back() = weight.size(0);
  Tensor result = new_empty(x, shape);
  const FewRows args{
      .x = x.const_data_ptr(),
      .weight = weight.const_data_ptr(),
      .bias = bias.has_value() ? bias->const_data_ptr() : nullptr,
      .result = result.mutable_data_ptr(),
      .rows = shape.back() == 0 ? 0 : result.numel() / shape.back(),
      .in = x.size(-1),
      .out = shape.back(),
      .dtype = dtype_of(x, kName),
  };
  cpu::few_rows(args);
  return result;
}

}  // namespace
}  // namespace mk::binding

STABLE_TORCH_LIBRARY_FRAGMENT(MK_LIBRARY, library) {
  library.def("few_rows(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(MK_LIBRARY, CPU, library) {
  library.impl("few_rows", TORCH_BOX(&mk::binding::few_rows));
}

#endif
