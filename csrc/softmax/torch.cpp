#include <optional>

#include "../common/binding.h"
#include "math.h"

MK_KERNEL(softmax_forward, SoftmaxForward)
MK_KERNEL(softmax_backward, SoftmaxBackward)

namespace mk::binding {
namespace {

constexpr const char* kName = "softmax";

// Sizes and mask of scores [outer, inner, queries, keys]; the mask broadcasts to them.
SoftmaxForward arguments(const Tensor& scores, const std::optional<Tensor>& mask, int64_t diagonal, double scale) {
  check_contiguous(scores, kName, "the tensor of scores");
  STD_TORCH_CHECK(scores.dim() == 4, kName, ": the scores are not [outer, inner, queries, keys]");
  SoftmaxForward args{};
  args.scores = scores.const_data_ptr();
  args.outer = scores.size(0), args.inner = scores.size(1), args.queries = scores.size(2), args.keys = scores.size(3);
  args.diagonal = diagonal, args.scale = float(scale), args.dtype = dtype_of(scores, kName);
  if (!mask.has_value()) return args;
  STD_TORCH_CHECK(mask->scalar_type() == ScalarType::Bool && mask->dim() == 4 && mask->size(3) == args.keys &&
                      (args.keys < 2 || mask->stride(3) == 1),
                  kName, ": the mask is not 4 dimensions of bool with a value for every key side by side");
  for (int64_t i = 0; i < 3; ++i)
    STD_TORCH_CHECK(mask->size(i) == 1 || mask->size(i) == scores.size(i), kName, ": the mask does not fit dimension ",
                    i, " of the scores");
  args.mask = static_cast<const bool*>(mask->const_data_ptr());
  args.mask_outer = mask->size(0) == 1 ? 0 : mask->stride(0);
  args.mask_inner = mask->size(1) == 1 ? 0 : mask->stride(1);
  args.mask_query = mask->size(2) == 1 ? 0 : mask->stride(2);
  return args;
}

template <class Backend>
Tensor softmax_forward(const Tensor& scores, const std::optional<Tensor>& mask, int64_t diagonal, double scale) {
  SoftmaxForward args = arguments(scores, mask, diagonal, scale);
  Tensor out = empty_like(scores);
  args.out = out.mutable_data_ptr();
  MK_RUN(Backend, softmax_forward, args, scores);
  return out;
}

template <class Backend>
Tensor softmax_backward(const Tensor& grad, const Tensor& out, int64_t diagonal, double scale) {
  check_contiguous(grad, kName, "the gradient");
  check_contiguous(out, kName, "the tensor of probabilities");
  STD_TORCH_CHECK(grad.dim() == 4 && grad.numel() == out.numel() && grad.size(3) == out.size(-1) &&
                      grad.scalar_type() == out.scalar_type(),
                  kName, ": the gradient does not fit the probabilities");
  Tensor grad_scores = empty_like(grad);
  const SoftmaxBackward args{grad.const_data_ptr(), out.const_data_ptr(), grad_scores.mutable_data_ptr(), rows_of(grad),
                             grad.size(2), grad.size(3), diagonal, float(scale), dtype_of(grad, kName)};
  MK_RUN(Backend, softmax_backward, args, grad);
  return grad_scores;
}

template <class Backend>
void implement(stable::Library& library) {
  library.impl("softmax_forward", TORCH_BOX(&softmax_forward<Backend>));
  library.impl("softmax_backward", TORCH_BOX(&softmax_backward<Backend>));
}

}  // namespace
}  // namespace mk::binding

STABLE_TORCH_LIBRARY_FRAGMENT(MK_LIBRARY, library) {
  library.def("softmax_forward(Tensor scores, Tensor? mask, int diagonal, float scale) -> Tensor");
  library.def("softmax_backward(Tensor grad, Tensor out, int diagonal, float scale) -> Tensor");
}

MK_REGISTER(mk::binding::implement)
