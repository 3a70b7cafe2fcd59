// Rows of a mixture-of-experts layer: a warp takes a row, kHeld columns for each lane at a time.
#include "../common/reduce.h"
#include "../common/steps.h"
#include "math.h"

namespace mk::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kHeld = 16;  // columns of a lane, all of whose loads are in flight at once

__device__ int64_t row_of_warp() { return int64_t(blockIdx.x) * kWarps + threadIdx.x / 32; }

// A lane's columns of a row, from the warp's column `first` on; 0 beyond the row's end.
template <class T, bool kPacked>
struct Columns {
  static constexpr int kStep = kStepOf<T, kPacked>, kSteps = kHeld / kStep;
  static constexpr int64_t kOfWarp = 32 * kHeld;

  int64_t first, width;
  float at[kSteps][kStep] = {};

  __device__ Columns(int64_t first_, int64_t width_) : first(first_), width(width_) {}

  __device__ int64_t column(int step) const { return first + (step * 32 + threadIdx.x % 32) * kStep; }

  __device__ void read(const T* row) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
      if (column(s) < width) load_step(row + column(s), at[s]);
  }

  __device__ void write(T* row) const {
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
      if (column(s) < width) store_step(row + column(s), at[s]);
  }

  __device__ void add(const Columns& other, float weight) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int i = 0; i < kStep; ++i) at[s][i] += other.at[s][i] * weight;
  }

  __device__ float product(const Columns& other) const {
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int i = 0; i < kStep; ++i) sum += at[s][i] * other.at[s][i];
    return sum;
  }
};

template <class T, bool kPacked>
__global__ void __launch_bounds__(kThreads) take_rows_kernel(TakeRows a) {
  using Part = Columns<T, kPacked>;
  const int64_t row = row_of_warp();
  if (row >= a.rows) return;
  const int64_t choice = a.source[row];
  const bool found = exists(choice, a.choices);
  const T* x = static_cast<const T*>(a.x) + (found ? choice / a.per * a.width : 0);
  const float weight = found ? weight_of<T>(a.weights, choice) : 0.0f;
  T* out = static_cast<T*>(a.out) + row * a.width;
  for (int64_t first = 0; first < a.width; first += Part::kOfWarp) {
    Part read(first, a.width), result(first, a.width);
    if (found) read.read(x);
    result.add(read, weight);
    result.write(out);
  }
}

template <class T, bool kPacked>
__global__ void __launch_bounds__(kThreads) sum_rows_kernel(SumRows a) {
  using Part = Columns<T, kPacked>;
  const int64_t token = row_of_warp();
  if (token >= a.tokens) return;
  for (int64_t first = 0; first < a.width; first += Part::kOfWarp) {
    Part sum(first, a.width);
#pragma unroll 2  // rows in flight
    for (int64_t choice = token * a.per; choice < (token + 1) * a.per; ++choice) {
      const int64_t row = a.place[choice];
      if (!exists(row, a.count)) continue;
      Part read(first, a.width);
      read.read(static_cast<const T*>(a.rows) + row * a.width);
      sum.add(read, weight_of<T>(a.weights, choice));
    }
    sum.write(static_cast<T*>(a.out) + token * a.width);
  }
}

template <class T, bool kPacked>
__global__ void __launch_bounds__(kThreads) row_products_kernel(RowProducts a) {
  using Part = Columns<T, kPacked>;
  const int64_t choice = row_of_warp();
  if (choice >= a.choices) return;
  const int64_t row = a.place[choice];
  const T* dy = static_cast<const T*>(a.dy) + choice / a.per * a.width;
  float sum = 0.0f;
  if (exists(row, a.count)) {
    for (int64_t first = 0; first < a.width; first += Part::kOfWarp) {
      Part one(first, a.width), other(first, a.width);
      one.read(static_cast<const T*>(a.rows) + row * a.width);
      other.read(dy);
      sum += one.product(other);
    }
  }
  sum = reduce_warp<Sum>(sum);
  if (threadIdx.x % 32 == 0) static_cast<T*>(a.out)[choice] = store<T>(sum);
}

dim3 grid_of(int64_t rows) { return dim3(unsigned((rows + kWarps - 1) / kWarps)); }

}  // namespace

int take_rows(const TakeRows& a, void* stream) {
  if (a.rows == 0 || a.width == 0) return 0;
  MK_FOR_DTYPE(a.dtype, T, {
    if (packs_fit<T>(a.width, a.x, a.out))
      MK_LAUNCH((take_rows_kernel<T, true>), grid_of(a.rows), kThreads, stream)(a);
    else
      MK_LAUNCH((take_rows_kernel<T, false>), grid_of(a.rows), kThreads, stream)(a);
  })
  return launch_result();
}

int sum_rows(const SumRows& a, void* stream) {
  if (a.tokens == 0 || a.width == 0) return 0;
  MK_FOR_DTYPE(a.dtype, T, {
    if (packs_fit<T>(a.width, a.rows, a.out))
      MK_LAUNCH((sum_rows_kernel<T, true>), grid_of(a.tokens), kThreads, stream)(a);
    else
      MK_LAUNCH((sum_rows_kernel<T, false>), grid_of(a.tokens), kThreads, stream)(a);
  })
  return launch_result();
}

int row_products(const RowProducts& a, void* stream) {
  if (a.choices == 0) return 0;
  MK_FOR_DTYPE(a.dtype, T, {
    if (packs_fit<T>(a.width, a.rows, a.dy))
      MK_LAUNCH((row_products_kernel<T, true>), grid_of(a.choices), kThreads, stream)(a);
    else
      MK_LAUNCH((row_products_kernel<T, false>), grid_of(a.choices), kThreads, stream)(a);
  })
  return launch_result();
}

}  // namespace mk::cuda
