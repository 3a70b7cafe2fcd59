#include <tuple>

#include "../common/binding.h"
#include "math.h"

MK_KERNEL(xent_forward, XentForward)
MK_KERNEL(xent_backward, XentBackward)
MK_KERNEL(xent_in_place, XentInPlace)

namespace mk::binding {
namespace {

constexpr const char* kName = "cross_entropy";

void check_logits(const Tensor& logits, const Tensor& labels, int64_t columns) {
  STD_TORCH_CHECK(logits.dim() == 2 && (logits.size(1) < 2 || logits.stride(1) == 1), kName,
                  ": the logits are not rows of neighbouring numbers");
  STD_TORCH_CHECK(columns >= 0 && columns <= logits.size(1), kName, ": there are not ", columns, " columns of logits");
  STD_TORCH_CHECK(labels.scalar_type() == ScalarType::Long && labels.dim() == 1 && labels.size(0) == logits.size(0),
                  kName, ": the labels are not one int64 for every row of logits");
  check_contiguous(labels, kName, "the labels");
}

void check_per_row(const Tensor& values, const Tensor& logits, const char* name) {
  STD_TORCH_CHECK(values.scalar_type() == ScalarType::Float && values.dim() == 1 && values.size(0) == logits.size(0),
                  kName, ": ", name, " is not one fp32 number for every row of logits");
  check_contiguous(values, kName, name);
}

// Only on the CPU: a check on a device would need a host sync. There a label outside of the vocabulary makes the loss
// NaN.
template <class Backend>
void check_labels(const Tensor& labels, int64_t vocabulary) {
  if constexpr (!Backend::gpu) {
    const int64_t* values = static_cast<const int64_t*>(labels.const_data_ptr());
    for (int64_t i = 0; i < labels.size(0); ++i)
      STD_TORCH_CHECK(values[i] >= 0 && values[i] < vocabulary, kName, ": label ", values[i],
                      " is not in the vocabulary of ", vocabulary);
  }
}

Tensor per_row(const Tensor& logits, int64_t how_many) {
  const std::vector<int64_t> shape{how_many, logits.size(0)};
  return new_empty(logits, shape, ScalarType::Float);
}

const int64_t* labels_of(const Tensor& labels) { return static_cast<const int64_t*>(labels.const_data_ptr()); }
const float* floats_of(const Tensor& x) { return static_cast<const float*>(x.const_data_ptr()); }

template <class Backend>
Tensor xent_forward(const Tensor& logits, const Tensor& labels) {
  check_logits(logits, labels, logits.size(1));
  check_labels<Backend>(labels, logits.size(1));
  Tensor out = per_row(logits, 2);
  float* loss = static_cast<float*>(out.mutable_data_ptr());
  const int64_t rows = logits.size(0), columns = logits.size(1);
  const XentForward args{logits.const_data_ptr(), labels_of(labels), nullptr, nullptr, nullptr, loss, loss + rows, rows,
                         columns, logits.stride(0), 0, columns, dtype_of(logits, kName)};
  MK_RUN(Backend, xent_forward, args, logits);
  return out;
}

template <class Backend>
Tensor xent_statistics(const Tensor& logits, const Tensor& labels, int64_t first, int64_t columns,
                       int64_t vocabulary) {
  check_logits(logits, labels, columns);
  check_labels<Backend>(labels, vocabulary);
  Tensor out = per_row(logits, 3);
  float* peak = static_cast<float*>(out.mutable_data_ptr());
  const int64_t rows = logits.size(0);
  const XentForward args{logits.const_data_ptr(), labels_of(labels), peak, peak + rows, peak + 2 * rows, nullptr,
                         nullptr, rows, columns, logits.stride(0), first, vocabulary, dtype_of(logits, kName)};
  MK_RUN(Backend, xent_forward, args, logits);
  return out;
}

template <class Backend>
void run_backward(const Tensor& logits, Tensor& out, const Tensor& labels, const Tensor& log_sum_exp,
                  const Tensor& grad, int64_t first, int64_t columns) {
  check_logits(logits, labels, columns);
  check_per_row(log_sum_exp, logits, "log_sum_exp");
  check_per_row(grad, logits, "the gradient");
  const XentBackward args{logits.const_data_ptr(), out.mutable_data_ptr(), labels_of(labels), floats_of(log_sum_exp),
                          floats_of(grad), logits.size(0), columns, logits.stride(0), first, logits.size(1),
                          out.stride(0), dtype_of(logits, kName)};
  MK_RUN(Backend, xent_backward, args, logits);
}

template <class Backend>
Tensor xent_backward(const Tensor& grad, const Tensor& logits, const Tensor& labels, const Tensor& log_sum_exp) {
  const std::vector<int64_t> shape{logits.size(0), logits.size(1)};
  Tensor out = new_empty(logits, shape);
  run_backward<Backend>(logits, out, labels, log_sum_exp, grad, 0, logits.size(1));
  return out;
}

template <class Backend>
void xent_gradient_(Tensor logits, const Tensor& labels, const Tensor& log_sum_exp, const Tensor& grad, int64_t first,
                    int64_t columns) {
  run_backward<Backend>(logits, logits, labels, log_sum_exp, grad, first, columns);
}

template <class Backend>
Tensor xent_in_place_(Tensor logits, const Tensor& labels, int64_t columns) {
  check_logits(logits, labels, columns);
  check_labels<Backend>(labels, columns);
  const std::vector<int64_t> shape{logits.size(0)};
  Tensor loss = new_empty(logits, shape, ScalarType::Float);
  const XentInPlace args{logits.mutable_data_ptr(), labels_of(labels), static_cast<float*>(loss.mutable_data_ptr()),
                         logits.size(0), columns, logits.size(1), logits.stride(0), dtype_of(logits, kName)};
  MK_RUN(Backend, xent_in_place, args, logits);
  return loss;
}

template <class Backend>
void implement(stable::Library& library) {
  library.impl("xent_forward", TORCH_BOX(&xent_forward<Backend>));
  library.impl("xent_backward", TORCH_BOX(&xent_backward<Backend>));
  library.impl("xent_statistics", TORCH_BOX(&xent_statistics<Backend>));
  library.impl("xent_gradient_", TORCH_BOX(&xent_gradient_<Backend>));
  library.impl("xent_in_place_", TORCH_BOX(&xent_in_place_<Backend>));
}

}  // namespace
}  // namespace mk::binding

STABLE_TORCH_LIBRARY_FRAGMENT(MK_LIBRARY, library) {
  library.def("xent_forward(Tensor logits, Tensor labels) -> Tensor");
  library.def("xent_backward(Tensor grad, Tensor logits, Tensor labels, Tensor log_sum_exp) -> Tensor");
  library.def("xent_statistics(Tensor logits, Tensor labels, int first, int columns, int vocabulary) -> Tensor");
  library.def(
      "xent_gradient_(Tensor(a!) logits, Tensor labels, Tensor log_sum_exp, Tensor grad, int first, int columns) -> ()");
  library.def("xent_in_place_(Tensor(a!) logits, Tensor labels, int columns) -> Tensor");
}

MK_REGISTER(mk::binding::implement)
