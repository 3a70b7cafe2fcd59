#include <optional>

#include "../common/binding.h"
#include "math.h"

MK_KERNEL(take_rows, TakeRows)
MK_KERNEL(sum_rows, SumRows)
MK_KERNEL(row_products, RowProducts)

namespace mk::binding {
namespace {

constexpr const char* kName = "expert_rows";

using OptionalTensor = std::optional<Tensor>;

void check_rows(const Tensor& rows, const char* name) {
  STD_TORCH_CHECK(rows.dim() == 2, kName, ": ", name, " must have two dimensions");
  check_contiguous(rows, kName, name);
}

// Only on the CPU: a check on a device would need a host sync.
template <class Backend>
const int64_t* checked_indices(const Tensor& indices, int64_t count, const char* name) {
  STD_TORCH_CHECK(indices.dim() == 1 && indices.scalar_type() == ScalarType::Long, kName, ": ", name,
                  " is not one row of int64");
  check_contiguous(indices, kName, name);
  const int64_t* values = static_cast<const int64_t*>(indices.const_data_ptr());
  if constexpr (!Backend::gpu) {
    for (int64_t i = 0; i < indices.size(0); ++i)
      STD_TORCH_CHECK(values[i] >= -1 && values[i] < count, kName, ": ", name, " has ", values[i], ", beyond ", count);
  }
  return values;
}

const void* checked_weights(const OptionalTensor& weights, int64_t choices, const Tensor& rows) {
  if (!weights.has_value()) return nullptr;
  STD_TORCH_CHECK(weights->numel() == choices && weights->scalar_type() == rows.scalar_type(), kName,
                  ": the weights are not one number of the rows' type for every choice");
  check_contiguous(*weights, kName, "the weights");
  return weights->const_data_ptr();
}

// The number of tokens that have these choices.
int64_t tokens_of(const Tensor& choices, int64_t per) {
  STD_TORCH_CHECK(per > 0 && choices.size(0) % per == 0, kName, ": ", choices.size(0), " choices, ", per,
                  " for each token");
  return choices.size(0) / per;
}

template <class Backend>
Tensor take_rows(const Tensor& x, const Tensor& source, int64_t per, const OptionalTensor& weights) {
  check_rows(x, "x");
  STD_TORCH_CHECK(per > 0, kName, ": ", per, " choices for each token");
  const int64_t choices = x.size(0) * per;
  const int64_t* of_rows = checked_indices<Backend>(source, choices, "source");
  Tensor out = new_empty(x, {source.size(0), x.size(1)});
  const TakeRows args{
      .x = x.const_data_ptr(),
      .source = of_rows,
      .weights = checked_weights(weights, choices, x),
      .out = out.mutable_data_ptr(),
      .rows = source.size(0),
      .choices = choices,
      .width = x.size(1),
      .per = per,
      .dtype = dtype_of(x, kName),
  };
  MK_RUN(Backend, take_rows, args, x);
  return out;
}

template <class Backend>
Tensor sum_rows(const Tensor& rows, const Tensor& place, int64_t per, const OptionalTensor& weights) {
  check_rows(rows, "rows");
  const int64_t* of_choices = checked_indices<Backend>(place, rows.size(0), "place");
  const int64_t tokens = tokens_of(place, per);
  Tensor out = new_empty(rows, {tokens, rows.size(1)});
  const SumRows args{
      .rows = rows.const_data_ptr(),
      .place = of_choices,
      .weights = checked_weights(weights, place.size(0), rows),
      .out = out.mutable_data_ptr(),
      .tokens = tokens,
      .count = rows.size(0),
      .width = rows.size(1),
      .per = per,
      .dtype = dtype_of(rows, kName),
  };
  MK_RUN(Backend, sum_rows, args, rows);
  return out;
}

template <class Backend>
Tensor row_products(const Tensor& rows, const Tensor& place, const Tensor& dy, int64_t per) {
  check_rows(rows, "rows");
  check_rows(dy, "dy");
  const int64_t* of_choices = checked_indices<Backend>(place, rows.size(0), "place");
  STD_TORCH_CHECK(dy.size(0) == tokens_of(place, per) && dy.size(1) == rows.size(1) &&
                      dy.scalar_type() == rows.scalar_type(),
                  kName, ": dy is not one row of the rows' width and type for every token");
  Tensor out = new_empty(rows, {place.size(0)});
  const RowProducts args{
      .rows = rows.const_data_ptr(),
      .place = of_choices,
      .dy = dy.const_data_ptr(),
      .out = out.mutable_data_ptr(),
      .choices = place.size(0),
      .count = rows.size(0),
      .width = rows.size(1),
      .per = per,
      .dtype = dtype_of(rows, kName),
  };
  MK_RUN(Backend, row_products, args, rows);
  return out;
}

template <class Backend>
void implement(stable::Library& library) {
  library.impl("take_rows", TORCH_BOX(&take_rows<Backend>));
  library.impl("sum_rows", TORCH_BOX(&sum_rows<Backend>));
  library.impl("row_products", TORCH_BOX(&row_products<Backend>));
}

}  // namespace
}  // namespace mk::binding

STABLE_TORCH_LIBRARY_FRAGMENT(MK_LIBRARY, library) {
  library.def("take_rows(Tensor x, Tensor source, int per, Tensor? weights) -> Tensor");
  library.def("sum_rows(Tensor rows, Tensor place, int per, Tensor? weights) -> Tensor");
  library.def("row_products(Tensor rows, Tensor place, Tensor dy, int per) -> Tensor");
}

MK_REGISTER(mk::binding::implement)
