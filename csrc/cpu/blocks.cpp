// As many positions at a time as a block has queries: all their gradients, which may stand side by side in one tensor,
// are written while that piece of it is in the cache.
#include "blocks.h"

#include <algorithm>
#include <cstring>

#include "rows.h"

namespace mk::cpu::MK_TIER {
namespace {

template <class T>
T* row_of(const Heads& to, int64_t batch, int64_t head, int64_t row) {
  return static_cast<T*>(to.data) + batch * to.batch_stride + head * to.head_stride + row * to.row_stride;
}

template <class T>
void add_run(const T* __restrict part, float* __restrict total, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) total[i] += load(part[i]);
}

template <class T>
void store_row(const float* __restrict total, T* __restrict out, int64_t width) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) out[i] = store<T>(total[i]);
}

template <class T>
void copy_queries(const BlockGradients& a, int64_t batch, int64_t head, int64_t which) {
  const int64_t heads = a.query.heads, before = a.batch * heads * which * a.block;
  const int64_t first = before + (batch * heads + head) * a.queries_of(which);
  const T* part = static_cast<const T*>(a.query_parts) + first * a.width;
  for (int64_t row = which * a.block; row < a.end_of(which); ++row, part += a.width)
    std::memcpy(static_cast<void*>(row_of<T>(a.query, batch, head, row)), part, size_t(a.width) * sizeof(T));
}

// The keys, or values, that stand where block `which` of the queries does.
template <class T>
void sum_keys(const BlockGradients& a, const void* parts, const Heads& to, int64_t batch, int64_t head, int64_t which,
              float* total) {
  const int64_t first = which * a.block, count = a.queries_of(which) * a.width;
  std::fill(total, total + count, 0.0f);
  const T* part = static_cast<const T*>(parts);
  for (int64_t i = 0; i < a.blocks(); part += a.batch * to.heads * a.keys_of(i) * a.width, ++i)
    if (first < a.keys_of(i)) add_run(part + ((batch * to.heads + head) * a.keys_of(i) + first) * a.width, total, count);
  for (int64_t row = first; row < a.end_of(which); ++row, total += a.width)
    store_row(total, row_of<T>(to, batch, head, row), a.width);
}

}  // namespace

void block_gradients(const BlockGradients& a) {
  const int64_t blocks = a.blocks();
  MK_FOR_DTYPE(a.dtype, T, {
    parallel_for(a.batch * blocks, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> total(size_t(a.block * a.width));
      for (int64_t run = begin; run < end; ++run) {
        const int64_t batch = run / blocks, which = run % blocks;
        for (int64_t head = 0; head < a.query.heads; ++head) copy_queries<T>(a, batch, head, which);
        for (int64_t head = 0; head < a.key.heads; ++head) {
          sum_keys<T>(a, a.key_parts, a.key, batch, head, which, total.data());
          sum_keys<T>(a, a.value_parts, a.value, batch, head, which, total.data());
        }
      }
    });
  })
}

}  // namespace mk::cpu::MK_TIER
