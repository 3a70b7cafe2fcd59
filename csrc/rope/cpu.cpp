// Rotary embedding, a head at a time; the angles of a position are read once for all its heads.
#include <cstring>

#include "../common/rows.h"
#include "math.h"

namespace mk::cpu::MK_TIER {
namespace {

template <class T>
void turn_head(const T* __restrict x, const float* __restrict cos, const float* __restrict sin, T* __restrict out,
               int64_t half) {
  const T* __restrict second = x + half;
  T* __restrict out_second = out + half;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float a = load(x[i]), b = load(second[i]);
    out[i] = store<T>(a * cos[i] - b * sin[i]);
    out_second[i] = store<T>(b * cos[i] + a * sin[i]);
  }
}

template <class T>
void turn_position(const Rope& a, const T* x, const float* cos, const float* sin, T* out) {
  const int64_t rest = a.head_dim - 2 * a.half;
  for (int64_t head = 0; head < a.heads; ++head) {
    const T* from = x + head * a.head_stride;
    T* to = out + head * a.head_dim;
    turn_head(from, cos, sin, to, a.half);
    if (rest > 0) std::memcpy(to + 2 * a.half, from + 2 * a.half, size_t(rest) * sizeof(T));
  }
}

template <class Table>
void read_angles(const Rope& a, int64_t at, float* __restrict cos, float* __restrict sin) {
  widen(static_cast<const Table*>(a.cos) + at, cos, a.half);
  widen(static_cast<const Table*>(a.sin) + at, sin, a.half);
#pragma omp simd
  for (int64_t i = 0; i < a.half; ++i) sin[i] *= a.direction;
}

}  // namespace

void rope(const Rope& a) {
  const int64_t width = a.heads * a.head_dim;
  MK_FOR_DTYPE(a.dtype, T, {
    const T* x = static_cast<const T*>(a.x);
    T* out = static_cast<T*>(a.out);
    parallel_for(a.batch * a.seq, rows_worth_a_thread(width), [&](int64_t begin, int64_t end) {
      std::vector<float> angles(size_t(2 * a.half));
      float *cos = angles.data(), *sin = cos + a.half;
      for (int64_t position = begin; position < end; ++position) {
        const int64_t batch = position / a.seq, seq = position % a.seq;
        const int64_t at = batch * a.table_stride + seq * a.half;
        MK_FOR_DTYPE(a.table_dtype, Table, { read_angles<Table>(a, at, cos, sin); })
        turn_position(a, x + batch * a.batch_stride + seq * a.seq_stride, cos, sin, out + position * width);
      }
    });
  })
}

}  // namespace mk::cpu::MK_TIER
