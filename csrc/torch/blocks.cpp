#if !defined(MK_EMULATED)  // there is no CUDA kernel to emulate

#include "../cpu/blocks.h"

#include "binding.h"

namespace mk::binding {
namespace {

constexpr const char* kName = "block_gradients";

Heads heads_of(Tensor& x, const Tensor& query) {
  STD_TORCH_CHECK(x.dim() == 4 && (x.size(3) < 2 || x.stride(3) == 1), kName,
                  ": a gradient is not [batch, heads, seq, width], a row's numbers side by side");
  STD_TORCH_CHECK(x.size(0) == query.size(0) && x.size(2) == query.size(2) && x.size(3) == query.size(3) &&
                      x.scalar_type() == query.scalar_type(),
                  kName, ": the gradients differ in more than the number of heads");
  return {x.mutable_data_ptr(), x.size(1), x.stride(0), x.stride(1), x.stride(2)};
}

void check_parts(const Tensor& parts, const Heads& to, int64_t rows, const BlockGradients& args) {
  check_contiguous(parts, kName, "a tensor of parts");
  STD_TORCH_CHECK(parts.numel() == args.batch * to.heads * rows * args.width && dtype_of(parts, kName) == args.dtype,
                  kName, ": a tensor of parts has not the size and type of its blocks");
}

void block_gradients_(Tensor query, Tensor key, Tensor value, const Tensor& query_parts, const Tensor& key_parts,
                      const Tensor& value_parts, int64_t block, bool causal) {
  STD_TORCH_CHECK(block > 0, kName, ": a block has no queries");
  const BlockGradients args{
      .query_parts = query_parts.const_data_ptr(),
      .key_parts = key_parts.const_data_ptr(),
      .value_parts = value_parts.const_data_ptr(),
      .query = heads_of(query, query),
      .key = heads_of(key, query),
      .value = heads_of(value, query),
      .batch = query.size(0),
      .seq = query.size(2),
      .width = query.size(3),
      .block = block,
      .causal = causal,
      .dtype = dtype_of(query, kName),
  };
  int64_t seen = 0;
  for (int64_t i = 0; i < args.blocks(); ++i) seen += args.keys_of(i);
  STD_TORCH_CHECK(args.key.heads == args.value.heads, kName, ": keys and values differ in their number of heads");
  check_parts(query_parts, args.query, args.seq, args);
  check_parts(key_parts, args.key, seen, args);
  check_parts(value_parts, args.value, seen, args);
  cpu::block_gradients(args);
}

}  // namespace
}  // namespace mk::binding

STABLE_TORCH_LIBRARY_FRAGMENT(MK_LIBRARY, library) {
  library.def(
      "block_gradients_(Tensor(a!) query, Tensor(b!) key, Tensor(c!) value, Tensor query_parts, Tensor key_parts,"
      " Tensor value_parts, int block, bool causal) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(MK_LIBRARY, CPU, library) {
  library.impl("block_gradients_", TORCH_BOX(&mk::binding::block_gradients_));
}

#endif
