#include "../common/binding.h"
#include "math.h"

MK_KERNEL(activation_forward, ActivationForward)
MK_KERNEL(activation_backward, ActivationBackward)
MK_KERNEL(gated_forward, GatedForward)
MK_KERNEL(gated_backward, GatedBackward)

namespace mk::binding {
namespace {

void check_gradient(const Tensor& grad, const Tensor& x, int64_t elements, const char* op) {
  check_contiguous(grad, op, "the gradient");
  STD_TORCH_CHECK(grad.numel() == elements && grad.scalar_type() == x.scalar_type(), op,
                  ": the gradient does not fit x");
}

template <class Backend>
Tensor gated_forward(const Tensor& x, Activation function, const char* op) {
  check_contiguous(x, op, "x");
  STD_TORCH_CHECK(x.dim() > 0 && x.size(-1) % 2 == 0, op, ": the last dimension of x is not even");
  std::vector<int64_t> shape = x.sizes();
  shape.back() /= 2;
  Tensor out = new_empty(x, shape);
  const GatedForward args{
      .x = x.const_data_ptr(),
      .out = out.mutable_data_ptr(),
      .rows = rows_of(x),
      .width = shape.back(),
      .function = function,
      .dtype = dtype_of(x, op),
  };
  MK_RUN(Backend, gated_forward, args, x);
  return out;
}

template <class Backend>
Tensor gated_backward(const Tensor& grad, const Tensor& x, Activation function, const char* op) {
  check_contiguous(x, op, "x");
  STD_TORCH_CHECK(x.dim() > 0 && x.size(-1) % 2 == 0, op, ": the last dimension of x is not even");
  check_gradient(grad, x, x.numel() / 2, op);
  Tensor grad_x = empty_like(x);
  const GatedBackward args{
      .grad = grad.const_data_ptr(),
      .x = x.const_data_ptr(),
      .grad_x = grad_x.mutable_data_ptr(),
      .rows = rows_of(x),
      .width = x.size(-1) / 2,
      .function = function,
      .dtype = dtype_of(x, op),
  };
  MK_RUN(Backend, gated_backward, args, x);
  return grad_x;
}

template <class Backend>
Tensor activation_forward(const Tensor& x, Activation function, const char* op) {
  check_contiguous(x, op, "x");
  Tensor out = empty_like(x);
  const ActivationForward args{
      .x = x.const_data_ptr(),
      .out = out.mutable_data_ptr(),
      .count = x.numel(),
      .function = function,
      .dtype = dtype_of(x, op),
  };
  MK_RUN(Backend, activation_forward, args, x);
  return out;
}

template <class Backend>
Tensor activation_backward(const Tensor& grad, const Tensor& x, Activation function, const char* op) {
  check_contiguous(x, op, "x");
  check_gradient(grad, x, x.numel(), op);
  Tensor grad_x = empty_like(x);
  const ActivationBackward args{
      .grad = grad.const_data_ptr(),
      .x = x.const_data_ptr(),
      .grad_x = grad_x.mutable_data_ptr(),
      .count = x.numel(),
      .function = function,
      .dtype = dtype_of(x, op),
  };
  MK_RUN(Backend, activation_backward, args, x);
  return grad_x;
}

Activation gelu(bool tanh) { return tanh ? Activation::gelu_tanh : Activation::gelu_erf; }

template <class Backend>
Tensor swiglu_forward(const Tensor& x) {
  return gated_forward<Backend>(x, Activation::silu, "swiglu");
}

template <class Backend>
Tensor swiglu_backward(const Tensor& grad, const Tensor& x) {
  return gated_backward<Backend>(grad, x, Activation::silu, "swiglu");
}

template <class Backend>
Tensor geglu_forward(const Tensor& x, bool tanh) {
  return gated_forward<Backend>(x, gelu(tanh), "geglu");
}

template <class Backend>
Tensor geglu_backward(const Tensor& grad, const Tensor& x, bool tanh) {
  return gated_backward<Backend>(grad, x, gelu(tanh), "geglu");
}

template <class Backend>
Tensor gelu_forward(const Tensor& x, bool tanh) {
  return activation_forward<Backend>(x, gelu(tanh), "gelu");
}

template <class Backend>
Tensor gelu_backward(const Tensor& grad, const Tensor& x, bool tanh) {
  return activation_backward<Backend>(grad, x, gelu(tanh), "gelu");
}

template <class Backend>
Tensor squared_relu_forward(const Tensor& x) {
  return activation_forward<Backend>(x, Activation::squared_relu, "squared_relu");
}

template <class Backend>
Tensor squared_relu_backward(const Tensor& grad, const Tensor& x) {
  return activation_backward<Backend>(grad, x, Activation::squared_relu, "squared_relu");
}

template <class Backend>
void implement(stable::Library& library) {
  library.impl("swiglu_forward", TORCH_BOX(&swiglu_forward<Backend>));
  library.impl("swiglu_backward", TORCH_BOX(&swiglu_backward<Backend>));
  library.impl("geglu_forward", TORCH_BOX(&geglu_forward<Backend>));
  library.impl("geglu_backward", TORCH_BOX(&geglu_backward<Backend>));
  library.impl("gelu_forward", TORCH_BOX(&gelu_forward<Backend>));
  library.impl("gelu_backward", TORCH_BOX(&gelu_backward<Backend>));
  library.impl("squared_relu_forward", TORCH_BOX(&squared_relu_forward<Backend>));
  library.impl("squared_relu_backward", TORCH_BOX(&squared_relu_backward<Backend>));
}

}  // namespace
}  // namespace mk::binding

STABLE_TORCH_LIBRARY_FRAGMENT(MK_LIBRARY, library) {
  library.def("swiglu_forward(Tensor x) -> Tensor");
  library.def("swiglu_backward(Tensor grad, Tensor x) -> Tensor");
  library.def("geglu_forward(Tensor x, bool tanh) -> Tensor");
  library.def("geglu_backward(Tensor grad, Tensor x, bool tanh) -> Tensor");
  library.def("gelu_forward(Tensor x, bool tanh) -> Tensor");
  library.def("gelu_backward(Tensor grad, Tensor x, bool tanh) -> Tensor");
  library.def("squared_relu_forward(Tensor x) -> Tensor");
  library.def("squared_relu_backward(Tensor grad, Tensor x) -> Tensor");
}

MK_REGISTER(mk::binding::implement)
