#include "../common/binding.h"
#include "math.h"

MK_KERNEL(norm_forward, NormForward)
MK_KERNEL(norm_backward, NormBackward)

namespace mk::binding {
namespace {

using OptionalTensor = std::optional<Tensor>;

const void* data_of(const OptionalTensor& x) { return x.has_value() ? x->const_data_ptr() : nullptr; }

void check_weight(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  check_contiguous(weight, "norm", "the weight");
  STD_TORCH_CHECK(x.dim() > 0 && weight.dim() == 1 && weight.size(0) == x.size(-1),
                  "norm: the weight must have the width of x");
  STD_TORCH_CHECK(weight.scalar_type() == x.scalar_type() || weight.scalar_type() == ScalarType::Float,
                  "norm: the weight must have the type of x or float32");
  if (!bias.has_value()) return;
  check_contiguous(*bias, "norm", "the bias");
  STD_TORCH_CHECK(bias->numel() == weight.numel() && bias->scalar_type() == weight.scalar_type(),
                  "norm: the bias must have the size and type of the weight");
}

void check_like(const Tensor& other, const Tensor& x, const char* name) {
  check_contiguous(other, "norm", name);
  STD_TORCH_CHECK(other.numel() == x.numel() && other.scalar_type() == x.scalar_type(), "norm: ", name,
                  " must have the size and type of x");
}

struct Normed {
  Tensor out, sum, mean, rstd;  // sum and mean may be empty
};

template <class Backend>
Normed forward(const Tensor& x, const OptionalTensor& residual, const Tensor& weight, const OptionalTensor& bias,
               double eps, bool centred) {
  check_contiguous(x, "norm", "x");
  check_weight(x, weight, bias);
  if (residual.has_value()) check_like(*residual, x, "the residual");
  const int64_t rows = rows_of(x);
  Tensor out = empty_like(x);
  Tensor sum = residual.has_value() ? empty_like(x) : new_empty(x, {0});
  Tensor mean = new_empty(x, {centred ? rows : 0}, ScalarType::Float);
  Tensor rstd = new_empty(x, {rows}, ScalarType::Float);
  const NormForward args{
      .x = x.const_data_ptr(),
      .residual = data_of(residual),
      .weight = weight.const_data_ptr(),
      .bias = data_of(bias),
      .sum = residual.has_value() ? sum.mutable_data_ptr() : nullptr,
      .out = out.mutable_data_ptr(),
      .mean = centred ? static_cast<float*>(mean.mutable_data_ptr()) : nullptr,
      .rstd = static_cast<float*>(rstd.mutable_data_ptr()),
      .rows = rows,
      .width = x.size(-1),
      .eps = float(eps),
      .dtype = dtype_of(x, "norm"),
      .weight_dtype = dtype_of(weight, "norm"),
  };
  MK_RUN(Backend, norm_forward, args, x);
  return {out, sum, mean, rstd};
}

template <class Backend>
std::tuple<Tensor, Tensor, Tensor> norm_forward(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                                double eps, bool centred) {
  const Normed result = forward<Backend>(x, std::nullopt, weight, bias, eps, centred);
  return {result.out, result.mean, result.rstd};
}

template <class Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor> add_norm_forward(const Tensor& x, const Tensor& residual,
                                                            const Tensor& weight, const OptionalTensor& bias,
                                                            double eps, bool centred) {
  const Normed result = forward<Backend>(x, residual, weight, bias, eps, centred);
  return {result.out, result.sum, result.mean, result.rstd};
}

template <class Backend>
std::tuple<Tensor, Tensor, Tensor> norm_backward(const Tensor& grad, const OptionalTensor& grad_sum, const Tensor& x,
                                                 const Tensor& weight, const Tensor& mean, const Tensor& rstd,
                                                 bool with_bias) {
  check_contiguous(x, "norm", "x");
  check_weight(x, weight, std::nullopt);
  check_like(grad, x, "the gradient");
  if (grad_sum.has_value()) check_like(*grad_sum, x, "the gradient of the sum");
  const int64_t rows = rows_of(x), width = x.size(-1);
  STD_TORCH_CHECK(rstd.numel() == rows && (mean.numel() == rows || mean.numel() == 0),
                  "norm: the statistics do not fit x");
  const RowParts parts = Backend::gpu ? row_parts_of_gpu(rows, width) : row_parts_of_cpu(rows);
  Tensor partial = new_empty(x, {parts.count, with_bias ? 2 : 1, width}, ScalarType::Float);
  Tensor grad_x = empty_like(x);
  Tensor grad_weight = empty_like(weight);
  Tensor grad_bias = new_empty(weight, {with_bias ? width : 0});
  const NormBackward args{
      .grad = grad.const_data_ptr(),
      .grad_sum = data_of(grad_sum),
      .x = x.const_data_ptr(),
      .weight = weight.const_data_ptr(),
      .mean = mean.numel() > 0 ? static_cast<const float*>(mean.const_data_ptr()) : nullptr,
      .rstd = static_cast<const float*>(rstd.const_data_ptr()),
      .grad_x = grad_x.mutable_data_ptr(),
      .grad_weight = grad_weight.mutable_data_ptr(),
      .grad_bias = with_bias ? grad_bias.mutable_data_ptr() : nullptr,
      .partial = static_cast<float*>(partial.mutable_data_ptr()),
      .rows = rows,
      .width = width,
      .dtype = dtype_of(x, "norm"),
      .weight_dtype = dtype_of(weight, "norm"),
  };
  MK_RUN(Backend, norm_backward, args, x);
  return {grad_x, grad_weight, grad_bias};
}

template <class Backend>
void implement(stable::Library& library) {
  library.impl("norm_forward", TORCH_BOX(&norm_forward<Backend>));
  library.impl("add_norm_forward", TORCH_BOX(&add_norm_forward<Backend>));
  library.impl("norm_backward", TORCH_BOX(&norm_backward<Backend>));
}

}  // namespace
}  // namespace mk::binding

STABLE_TORCH_LIBRARY_FRAGMENT(MK_LIBRARY, library) {
  library.def(
      "norm_forward(Tensor x, Tensor weight, Tensor? bias, float eps, bool centred)"
      " -> (Tensor out, Tensor mean, Tensor rstd)");
  library.def(
      "add_norm_forward(Tensor x, Tensor residual, Tensor weight, Tensor? bias, float eps, bool centred)"
      " -> (Tensor out, Tensor sum, Tensor mean, Tensor rstd)");
  library.def(
      "norm_backward(Tensor grad, Tensor? grad_sum, Tensor x, Tensor weight, Tensor mean, Tensor rstd, bool with_bias)"
      " -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)");
}

MK_REGISTER(mk::binding::implement)
