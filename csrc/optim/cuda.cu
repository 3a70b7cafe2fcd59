// The optimizer on flat buffers: one launch for all parameters, every number read and written once.
#include <type_traits>

#include "../common/launch.h"
#include "math.h"

namespace mk::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRounds = 4;  // packs that a thread of the update takes, one block's width apart
constexpr int kPack = 4;    // numbers in a pack: 16 bytes of fp32, 8 of bf16
constexpr int64_t kBlock = int64_t(kThreads) * kPack * kRounds;

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Numbers {
  T at[kCount];
};

template <int kCount>
using Count = std::integral_constant<int, kCount>;

template <int kCount, class T>
__device__ Numbers<T, kCount> load_pack(const T* from, Count<kCount>) {
  return *reinterpret_cast<const Numbers<T, kCount>*>(from);
}

// One access: nvcc would split an assignment into its members.
template <int kCount, class T>
__device__ void store_pack(T* to, const Numbers<T, kCount>& numbers) {
#if defined(__CUDA_ARCH__)
  constexpr int kBytes = int(sizeof numbers);
  if constexpr (kBytes == 16) {
    uint4 words;
    memcpy(&words, &numbers, sizeof words);
    __stwb(reinterpret_cast<uint4*>(to), words);
  } else if constexpr (kBytes == 8) {
    uint2 words;
    memcpy(&words, &numbers, sizeof words);
    __stwb(reinterpret_cast<uint2*>(to), words);
  } else {
    *reinterpret_cast<Numbers<T, kCount>*>(to) = numbers;
  }
#else
  *reinterpret_cast<Numbers<T, kCount>*>(to) = numbers;
#endif
}

// The first segment that ends after `at`.
__device__ int64_t segment_of(const Segments& segments, int64_t at) {
  int64_t low = 0, high = segments.count - 1;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (segments.ends[middle] <= at)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

template <class Grad, class Moment, Weights kKept, int kCount>
__device__ void adamw_pack(const AdamW& a, const StepControl& control, int64_t at, int64_t& segment, AdamStep& step) {
  using Copy = std::conditional_t<kKept == Weights::f16_copy, f16, bf16>;
  Copy* copy = static_cast<Copy*>(a.copy) + at;
  Moment *exp_avg = static_cast<Moment*>(a.exp_avg) + at, *exp_avg_sq = static_cast<Moment*>(a.exp_avg_sq) + at;
  constexpr Count<kCount> kAll;
  const auto grads = load_pack(static_cast<const Grad*>(a.grad) + at, kAll);
  auto ms = load_pack(exp_avg, kAll);
  auto vs = load_pack(exp_avg_sq, kAll);
  Numbers<float, kCount> weights;
  Numbers<Copy, kCount> copies;
  Numbers<int16_t, kCount> remainders;
  if constexpr (kKept == Weights::remainder) {
    copies = load_pack(copy, kAll);
    remainders = load_pack(a.remainder + at, kAll);
  } else {
    weights = load_pack(a.weights + at, kAll);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (at + i >= a.segments.ends[segment]) {
      do ++segment;
      while (at + i >= a.segments.ends[segment]);
      step = adam_step(a, control, segment);
    }
    if constexpr (kKept == Weights::remainder) weights.at[i] = joined(copies.at[i], remainders.at[i]);
    float m = load(ms.at[i]), v = load(vs.at[i]);
    weights.at[i] = adam_update(step, weights.at[i], load(grads.at[i]), m, v);
    ms.at[i] = store<Moment>(m);
    vs.at[i] = store<Moment>(v);
    if constexpr (kKept == Weights::remainder)
      copies.at[i] = split(weights.at[i], remainders.at[i]);
    else if constexpr (kKept != Weights::in_place)
      copies.at[i] = store<Copy>(weights.at[i]);
  }
  store_pack(exp_avg, ms);
  store_pack(exp_avg_sq, vs);
  if constexpr (kKept == Weights::remainder)
    store_pack(a.remainder + at, remainders);
  else
    store_pack(a.weights + at, weights);
  if constexpr (kKept != Weights::in_place) store_pack(copy, copies);
}

template <class Grad, class Moment, Weights kKept, int kCount>
__global__ void __launch_bounds__(kThreads) adamw_kernel(AdamW a) {
  const StepControl control = *a.control;
  if (control.applied == 0.0f) return;
  const int64_t first = int64_t(blockIdx.x) * kBlock, end = first + kBlock < a.size ? first + kBlock : a.size;
  MK_SHARED(int64_t, segment_of_block, 1);
  if (threadIdx.x == 0) segment_of_block[0] = segment_of(a.segments, first);
  __syncthreads();
  int64_t segment = segment_of_block[0];
  AdamStep step = adam_step(a, control, segment);
  int64_t at = first + int64_t(threadIdx.x) * kCount;
  for (; at + kCount <= end; at += int64_t(kThreads) * kCount)
    adamw_pack<Grad, Moment, kKept, kCount>(a, control, at, segment, step);
  for (; at < end; ++at) adamw_pack<Grad, Moment, kKept, 1>(a, control, at, segment, step);  // the end, by one thread
}

template <class T>
bool packs_fit(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % (kPack * sizeof(T)) == 0;
}

template <class Grad, class Moment>
bool packs_fit(const AdamW& a) {
  return packs_fit<Grad>(a.grad) && packs_fit<Moment>(a.exp_avg) && packs_fit<Moment>(a.exp_avg_sq) &&
         packs_fit<float>(a.weights) && packs_fit<bf16>(a.copy) && packs_fit<int16_t>(a.remainder);
}

// In a fixed order: the same input gives the same bits. Thread 0 has the result.
__device__ double sum_of_block(double value) {
  MK_SHARED(double, of_warp, kThreads / 32);
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(~0u, value, mask);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0.0;
  if (threadIdx.x == 0)
    for (int warp = 0; warp < kThreads / 32; ++warp) sum += of_warp[warp];
  return sum;
}

template <class T, bool kPacked>
__global__ void __launch_bounds__(kThreads) square_sum_kernel(SquareSum a) {
  constexpr int kCount = kPacked ? 16 / int(sizeof(T)) : 1;
  const T* x = static_cast<const T*>(a.x);
  const int64_t first = int64_t(blockIdx.x) * kSquareSumPart;
  const int64_t end = first + kSquareSumPart < a.size ? first + kSquareSumPart : a.size;
  double sum = 0.0;
  int64_t at = first + int64_t(threadIdx.x) * kCount;
  for (; at + kCount <= end; at += int64_t(kThreads) * kCount) {
    const auto numbers = load_pack(x + at, Count<kCount>{});
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += double(load(numbers.at[i])) * double(load(numbers.at[i]));
  }
  for (; at < end; ++at) sum += double(load(x[at])) * double(load(x[at]));  // the end, by one thread
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) a.partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) add_partial_kernel(SquareSum a, int64_t parts) {
  double sum = 0.0;
  for (int64_t part = threadIdx.x; part < parts; part += kThreads) sum += a.partial[part];
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) *a.out = sum;
}

}  // namespace

int adamw(const AdamW& a, void* stream) {
  if (a.size == 0) return 0;
  const dim3 grid(unsigned((a.size + kBlock - 1) / kBlock));
  MK_FOR_ADAM(a, Grad, Moment, kKept, {
    if (packs_fit<Grad, Moment>(a)) {
      MK_LAUNCH((adamw_kernel<Grad, Moment, kKept, kPack>), grid, kThreads, stream)(a);
    } else {
      MK_LAUNCH((adamw_kernel<Grad, Moment, kKept, 1>), grid, kThreads, stream)(a);
    }
  })
  return launch_result();
}

int square_sum(const SquareSum& a, void* stream) {
  const int64_t parts = square_sum_parts(a.size);
  if (parts > 0) {
    MK_FOR_DTYPE(a.dtype, T, {
      if (reinterpret_cast<uintptr_t>(a.x) % 16 == 0) {
        MK_LAUNCH((square_sum_kernel<T, true>), dim3(unsigned(parts)), kThreads, stream)(a);
      } else {
        MK_LAUNCH((square_sum_kernel<T, false>), dim3(unsigned(parts)), kThreads, stream)(a);
      }
    })
  }
  MK_LAUNCH(add_partial_kernel, dim3(1), kThreads, stream)(a, parts);
  return launch_result();
}

}  // namespace mk::cuda
