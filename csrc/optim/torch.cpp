#include "../common/binding.h"
#include "math.h"

MK_KERNEL(adamw, AdamW)
MK_KERNEL(square_sum, SquareSum)

namespace mk::binding {
namespace {

void check_like(const Tensor& x, const Tensor& grad, ScalarType type, const char* name) {
  check_contiguous(x, "adamw", name);
  STD_TORCH_CHECK(x.scalar_type() == type, "adamw: ", name, " has another dtype");
  STD_TORCH_CHECK(x.numel() == grad.numel(), "adamw: ", name, " and the gradient differ in size");
}

DType wide_or_bf16(const Tensor& x, const char* name) {
  const DType dtype = dtype_of(x, "adamw");
  STD_TORCH_CHECK(dtype != DType::f16, "adamw: ", name, " must be float32 or bfloat16");
  return dtype;
}

Segments segments_of(const Tensor& ends, const Tensor& rates) {
  check_contiguous(ends, "adamw", "segment_ends");
  check_contiguous(rates, "adamw", "segment_rates");
  STD_TORCH_CHECK(ends.scalar_type() == ScalarType::Long && rates.scalar_type() == ScalarType::Float &&
                      rates.numel() == 2 * ends.numel() && ends.numel() > 0,
                  "adamw: segments are int64 ends and two float32 rates for each");
  return {static_cast<const int64_t*>(ends.const_data_ptr()), static_cast<const float*>(rates.const_data_ptr()),
          ends.numel()};
}

// All but the weights.
AdamW common_args(Tensor& exp_avg, Tensor& exp_avg_sq, const Tensor& grad, const Tensor& ends, const Tensor& rates,
                  const Tensor& control, double beta1, double beta2, double eps) {
  check_contiguous(grad, "adamw", "the gradient");
  check_like(exp_avg, grad, exp_avg.scalar_type(), "exp_avg");
  check_like(exp_avg_sq, grad, exp_avg.scalar_type(), "exp_avg_sq");
  STD_TORCH_CHECK(control.scalar_type() == ScalarType::Float && control.is_contiguous() &&
                      control.numel() * sizeof(float) == sizeof(StepControl),
                  "adamw: control is not six float32");
  AdamW args{};
  args.exp_avg = exp_avg.mutable_data_ptr();
  args.exp_avg_sq = exp_avg_sq.mutable_data_ptr();
  args.grad = grad.const_data_ptr();
  args.control = static_cast<const StepControl*>(control.const_data_ptr());
  args.segments = segments_of(ends, rates);
  args.size = grad.numel();
  args.beta1 = float(beta1), args.one_minus_beta1 = float(1.0 - beta1);
  args.beta2 = float(beta2), args.one_minus_beta2 = float(1.0 - beta2);
  args.eps = float(eps);
  args.grad_dtype = wide_or_bf16(grad, "the gradient");
  args.moment_dtype = wide_or_bf16(exp_avg, "exp_avg");
  return args;
}

template <class Backend>
void adamw(Tensor weights, Tensor copy, Tensor exp_avg, Tensor exp_avg_sq, const Tensor& grad, const Tensor& ends,
           const Tensor& rates, const Tensor& control, double beta1, double beta2, double eps) {
  AdamW args = common_args(exp_avg, exp_avg_sq, grad, ends, rates, control, beta1, beta2, eps);
  check_like(weights, grad, ScalarType::Float, "weights");
  args.weights = static_cast<float*>(weights.mutable_data_ptr());
  args.kept = Weights::in_place;
  if (copy.numel() > 0) {
    check_like(copy, grad, copy.scalar_type(), "copy");
    const DType dtype = dtype_of(copy, "adamw");
    STD_TORCH_CHECK(dtype != DType::f32, "adamw: a copy is bfloat16 or float16");
    args.kept = dtype == DType::bf16 ? Weights::bf16_copy : Weights::f16_copy;
    args.copy = copy.mutable_data_ptr();
  }
  MK_RUN(Backend, adamw, args, grad);
}

template <class Backend>
void adamw_remainder(Tensor weights, Tensor remainder, Tensor exp_avg, Tensor exp_avg_sq, const Tensor& grad,
                     const Tensor& ends, const Tensor& rates, const Tensor& control, double beta1, double beta2,
                     double eps) {
  AdamW args = common_args(exp_avg, exp_avg_sq, grad, ends, rates, control, beta1, beta2, eps);
  check_like(weights, grad, ScalarType::BFloat16, "weights");
  check_like(remainder, grad, ScalarType::Short, "remainder");
  args.copy = weights.mutable_data_ptr();
  args.remainder = static_cast<int16_t*>(remainder.mutable_data_ptr());
  args.kept = Weights::remainder;
  MK_RUN(Backend, adamw, args, grad);
}

template <class Backend>
Tensor square_sum(const Tensor& x) {
  check_contiguous(x, "square_sum", "x");
  const auto type = std::optional<ScalarType>(ScalarType::Double);
  Tensor partial = new_empty(x, {square_sum_parts(x.numel())}, type);
  Tensor out = new_empty(x, {}, type);
  const SquareSum args{x.const_data_ptr(), static_cast<double*>(partial.mutable_data_ptr()),
                       static_cast<double*>(out.mutable_data_ptr()), x.numel(), dtype_of(x, "square_sum")};
  MK_RUN(Backend, square_sum, args, x);
  return out;
}

template <class Backend>
void implement(stable::Library& library) {
  library.impl("adamw_", TORCH_BOX(&adamw<Backend>));
  library.impl("adamw_remainder_", TORCH_BOX(&adamw_remainder<Backend>));
  library.impl("square_sum", TORCH_BOX(&square_sum<Backend>));
}

}  // namespace
}  // namespace mk::binding

STABLE_TORCH_LIBRARY_FRAGMENT(MK_LIBRARY, library) {
  library.def(
      "adamw_(Tensor(a!) weights, Tensor(b!) copy, Tensor(c!) exp_avg, Tensor(d!) exp_avg_sq, Tensor grad, "
      "Tensor segment_ends, Tensor segment_rates, Tensor control, float beta1, float beta2, float eps) -> ()");
  library.def(
      "adamw_remainder_(Tensor(a!) weights, Tensor(b!) remainder, Tensor(c!) exp_avg, Tensor(d!) exp_avg_sq, "
      "Tensor grad, Tensor segment_ends, Tensor segment_rates, Tensor control, float beta1, float beta2, float eps) "
      "-> ()");
  library.def("square_sum(Tensor x) -> Tensor");
}

MK_REGISTER(mk::binding::implement)
