#include "../cpu/activation.h"

#include "../cuda/activation.h"
#include "binding.h"

namespace mk::binding {
namespace {

template <class Backend>
Tensor swiglu_forward(const Tensor& x) {
  check_contiguous(x, "swiglu", "x");
  STD_TORCH_CHECK(x.dim() > 0 && x.size(-1) % 2 == 0, "swiglu: the last dimension of x is not even");
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() /= 2;
  Tensor out = torch::stable::new_empty(x, shape);
  const SwigluForward args{x.const_data_ptr(), out.mutable_data_ptr(), rows_of(x), shape.back(), dtype_of(x, "swiglu")};
  MK_RUN(Backend, swiglu_forward, args, x);
  return out;
}

template <class Backend>
Tensor swiglu_backward(const Tensor& grad, const Tensor& x) {
  check_contiguous(grad, "swiglu", "the gradient");
  check_contiguous(x, "swiglu", "x");
  STD_TORCH_CHECK(grad.numel() * 2 == x.numel() && grad.scalar_type() == x.scalar_type(),
                  "swiglu: the gradient does not fit x");
  Tensor grad_x = torch::stable::empty_like(x);
  const SwigluBackward args{x.const_data_ptr(), grad.const_data_ptr(), grad_x.mutable_data_ptr(),
                            rows_of(x),         x.size(-1) / 2,        dtype_of(x, "swiglu")};
  MK_RUN(Backend, swiglu_backward, args, x);
  return grad_x;
}

template <class Backend>
void implement(torch::stable::detail::StableLibrary& library) {
  library.impl("swiglu_forward", TORCH_BOX(&swiglu_forward<Backend>));
  library.impl("swiglu_backward", TORCH_BOX(&swiglu_backward<Backend>));
}

}  // namespace
}  // namespace mk::binding

STABLE_TORCH_LIBRARY_FRAGMENT(MK_LIBRARY, library) {
  library.def("swiglu_forward(Tensor x) -> Tensor");
  library.def("swiglu_backward(Tensor grad, Tensor x) -> Tensor");
}

MK_REGISTER(mk::binding::implement)
