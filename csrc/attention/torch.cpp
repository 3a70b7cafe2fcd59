#if !defined(MK_EMULATED)  // there is no CUDA kernel to emulate

#include <optional>
#include <tuple>

#include "../common/binding.h"
#include "math.h"

MK_CPU_PRODUCTS(attention_forward, AttentionForward)
MK_CPU_PRODUCTS(attention_backward, AttentionBackward)

namespace mk::binding {
namespace {

constexpr const char* kName = "attention";

// Also for tensors that are only read: `Heads` is one type for both.
Heads heads_of(const Tensor& x, int64_t batch, int64_t rows, int64_t heads, const AttentionShape& shape) {
  STD_TORCH_CHECK(x.dim() == 4 && x.size(0) == batch && x.size(1) == rows && x.size(2) == heads &&
                      x.size(3) == shape.width && dtype_of(x, kName) == shape.dtype,
                  kName, ": the tensors are not of one type and [batch, positions, heads or groups, width]");
  STD_TORCH_CHECK(shape.width < 2 || x.stride(3) == 1, kName, ": the numbers of a head must be contiguous");
  return {const_cast<void*>(x.const_data_ptr()), x.stride(0), x.stride(1), x.stride(2)};
}

Heads of_queries(const Tensor& x, const AttentionShape& s) { return heads_of(x, s.batch, s.queries, s.heads, s); }
Heads of_keys(const Tensor& x, const AttentionShape& s) { return heads_of(x, s.batch, s.keys, s.groups, s); }

void take_mask(const Tensor& mask, AttentionShape& shape) {
  STD_TORCH_CHECK(mask.scalar_type() == ScalarType::Bool && mask.dim() == 4 && mask.size(3) == shape.keys &&
                      (shape.keys < 2 || mask.stride(3) == 1),
                  kName, ": the mask is not 4 dimensions of bool with a value for every key side by side");
  const int64_t sizes[] = {shape.batch, shape.heads, shape.queries};
  for (int64_t i = 0; i < 3; ++i)
    STD_TORCH_CHECK(mask.size(i) == 1 || mask.size(i) == sizes[i], kName, ": the mask does not fit dimension ", i);
  shape.mask = static_cast<const bool*>(mask.const_data_ptr());
  shape.mask_batch = mask.size(0) == 1 ? 0 : mask.stride(0);
  shape.mask_head = mask.size(1) == 1 ? 0 : mask.stride(1);
  shape.mask_query = mask.size(2) == 1 ? 0 : mask.stride(2);
}

void take_first_keys(const Tensor& from, AttentionShape& shape) {
  STD_TORCH_CHECK(from.scalar_type() == ScalarType::Long && from.dim() == 2 && from.size(1) == shape.queries &&
                      (shape.queries < 2 || from.stride(1) == 1) && (from.size(0) == 1 || from.size(0) == shape.batch),
                  kName, ": the first keys are not int64 [batch or 1, queries]");
  shape.from = static_cast<const int64_t*>(from.const_data_ptr());
  shape.from_batch = from.size(0) == 1 ? 0 : from.stride(0);
}

struct Options {
  const std::optional<Tensor>&mask, &from;
  int64_t diagonal;
  double scale, dropout;
  const std::optional<Tensor>& seed;
};

AttentionShape shape_of(const Tensor& query, const Tensor& key, const Options& options) {
  STD_TORCH_CHECK(query.dim() == 4 && key.dim() == 4 && key.size(2) > 0 && query.size(2) % key.size(2) == 0, kName,
                  ": query and key are not [batch, positions, heads, width] with a multiple of the key's heads");
  AttentionShape shape{};
  shape.batch = query.size(0), shape.queries = query.size(1), shape.heads = query.size(2), shape.width = query.size(3);
  shape.keys = key.size(1), shape.groups = key.size(2);
  shape.diagonal = options.diagonal, shape.scale = float(options.scale), shape.dtype = dtype_of(query, kName);
  if (options.mask.has_value()) take_mask(*options.mask, shape);
  if (options.from.has_value()) take_first_keys(*options.from, shape);
  shape.dropout.probability = float(options.dropout);
  if (options.dropout > 0.0) {
    STD_TORCH_CHECK(options.seed.has_value() && options.seed->scalar_type() == ScalarType::Long &&
                        options.seed->numel() == 1,
                    kName, ": dropout needs a seed, one int64");
    shape.dropout.seed = uint64_t(*static_cast<const int64_t*>(options.seed->const_data_ptr()));
  }
  return shape;
}

std::tuple<Tensor, Tensor> attention_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                             const std::optional<Tensor>& mask, const std::optional<Tensor>& from,
                                             int64_t diagonal, double scale, double dropout,
                                             const std::optional<Tensor>& seed) {
  AttentionForward args{.shape = shape_of(query, key, Options{mask, from, diagonal, scale, dropout, seed})};
  const AttentionShape& shape = args.shape;
  Tensor out = new_empty(query, {shape.batch, shape.queries, shape.heads, shape.width});
  Tensor log_sum_exp = new_empty(query, {shape.batch, shape.heads, shape.queries}, ScalarType::Float);
  args.query = of_queries(query, shape), args.key = of_keys(key, shape), args.value = of_keys(value, shape);
  args.out = of_queries(out, shape), args.log_sum_exp = static_cast<float*>(log_sum_exp.mutable_data_ptr());
  cpu::attention_forward(args);
  return {out, log_sum_exp};
}

// Where the gradients of query, key and value lie: interleaved by head as in a fused projection (thirds), or one after
// the other.
void place_gradients(Tensor& grads, bool thirds, AttentionBackward& args) {
  const AttentionShape& s = args.shape;
  const int64_t size = grads.element_size(), queries = s.batch * s.queries * s.heads * s.width;
  const int64_t keys = s.batch * s.keys * s.groups * s.width;
  char* data = static_cast<char*>(grads.mutable_data_ptr());
  const auto heads = [&](int64_t offset, int64_t rows, int64_t count, int64_t width) {
    return Heads{data + offset * size, rows * count * width, count * width, width};
  };
  if (thirds) {
    args.grad_query = heads(0, s.queries, s.heads, 3 * s.width);
    args.grad_key = heads(s.width, s.keys, s.heads, 3 * s.width);
    args.grad_value = heads(2 * s.width, s.keys, s.heads, 3 * s.width);
  } else {
    args.grad_query = heads(0, s.queries, s.heads, s.width);
    args.grad_key = heads(queries, s.keys, s.groups, s.width);
    args.grad_value = heads(queries + keys, s.keys, s.groups, s.width);
  }
}

Tensor attention_backward(const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value,
                          const Tensor& out, const Tensor& log_sum_exp, const std::optional<Tensor>& mask,
                          const std::optional<Tensor>& from, int64_t diagonal, double scale, double dropout,
                          const std::optional<Tensor>& seed, bool thirds) {
  AttentionBackward args{.shape = shape_of(query, key, Options{mask, from, diagonal, scale, dropout, seed})};
  const AttentionShape& shape = args.shape;
  check_contiguous(log_sum_exp, kName, "the log-sum-exp");
  STD_TORCH_CHECK(log_sum_exp.scalar_type() == ScalarType::Float &&
                      log_sum_exp.numel() == shape.batch * shape.heads * shape.queries,
                  kName, ": the log-sum-exp is not a float for every row");
  STD_TORCH_CHECK(!thirds || (shape.heads == shape.groups && shape.queries == shape.keys), kName,
                  ": only equal shapes can be thirds");
  args.query = of_queries(query, shape), args.key = of_keys(key, shape), args.value = of_keys(value, shape);
  args.out = of_queries(out, shape), args.grad = of_queries(grad, shape);
  args.log_sum_exp = static_cast<const float*>(log_sum_exp.const_data_ptr());
  Tensor grads = new_empty(query, {query.numel() + 2 * key.numel()});
  place_gradients(grads, thirds, args);
  cpu::attention_backward(args);
  return grads;
}

}  // namespace
}  // namespace mk::binding

STABLE_TORCH_LIBRARY_FRAGMENT(MK_LIBRARY, library) {
  library.def(
      "attention_forward(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? first_keys,"
      " int diagonal, float scale, float dropout, Tensor? seed) -> (Tensor, Tensor)");
  library.def(
      "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor log_sum_exp,"
      " Tensor? mask, Tensor? first_keys, int diagonal, float scale, float dropout, Tensor? seed, bool thirds)"
      " -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(MK_LIBRARY, CPU, library) {
  library.impl("attention_forward", TORCH_BOX(&mk::binding::attention_forward));
  library.impl("attention_backward", TORCH_BOX(&mk::binding::attention_backward));
}

#endif
