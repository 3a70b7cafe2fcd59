#include "../common/binding.h"
#include "math.h"

MK_KERNEL(rope, Rope)

namespace mk::binding {
namespace {

void check_angles(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  check_contiguous(cos, "rope", "cos");
  check_contiguous(sin, "rope", "sin");
  STD_TORCH_CHECK(x.dim() == 4 && cos.dim() == 4 && sin.dim() == 4, "rope: x, cos and sin must have four dimensions");
  STD_TORCH_CHECK(x.size(3) <= 1 || x.stride(3) == 1, "rope: the channels of a head must be contiguous");
  STD_TORCH_CHECK((cos.size(0) == 1 || cos.size(0) == x.size(0)) && cos.size(1) == x.size(1) && cos.size(2) == 1 &&
                      2 * cos.size(3) <= x.size(3),
                  "rope: cos does not fit x");
  STD_TORCH_CHECK(cos.scalar_type() == x.scalar_type() || cos.scalar_type() == ScalarType::Float,
                  "rope: cos must have the type of x or float32");
  bool alike = sin.scalar_type() == cos.scalar_type();
  for (int64_t i = 0; i < 4; ++i) alike = alike && sin.size(i) == cos.size(i);
  STD_TORCH_CHECK(alike, "rope: cos and sin differ in size or type");
}

template <class Backend>
Tensor rope(const Tensor& x, const Tensor& cos, const Tensor& sin, bool backwards) {
  check_angles(x, cos, sin);
  Tensor out = new_empty(x, x.sizes());
  const mk::Rope args{
      .x = x.const_data_ptr(),
      .cos = cos.const_data_ptr(),
      .sin = sin.const_data_ptr(),
      .out = out.mutable_data_ptr(),
      .batch = x.size(0),
      .seq = x.size(1),
      .heads = x.size(2),
      .head_dim = x.size(3),
      .half = cos.size(3),
      .batch_stride = x.stride(0),
      .seq_stride = x.stride(1),
      .head_stride = x.stride(2),
      .table_stride = cos.size(0) == 1 ? 0 : cos.size(1) * cos.size(3),
      .direction = backwards ? -1.0f : 1.0f,
      .dtype = dtype_of(x, "rope"),
      .table_dtype = dtype_of(cos, "rope"),
  };
  MK_RUN(Backend, rope, args, x);
  return out;
}

template <class Backend>
void implement(stable::Library& library) {
  library.impl("rope", TORCH_BOX(&rope<Backend>));
}

}  // namespace
}  // namespace mk::binding

STABLE_TORCH_LIBRARY_FRAGMENT(MK_LIBRARY, library) {
  library.def("rope(Tensor x, Tensor cos, Tensor sin, bool backwards) -> Tensor");
}

MK_REGISTER(mk::binding::implement)
