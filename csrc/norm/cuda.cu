// RMSNorm and LayerNorm. Forward: a block takes a row; what it reads again it finds in its cache. Backward: a group of
// threads takes a part of the rows and keeps its columns of the weight's gradient in registers meanwhile.
#include "../common/reduce.h"
#include "../common/steps.h"
#include "../common/sum_parts.h"
#include "math.h"

namespace mk::cuda {
namespace {

// The sum over a row of term(column, step), for the kGroup threads of a warp or of a block.
template <int kGroup>
__device__ float reduce_group(float value) {
  if constexpr (kGroup == 32)
    return reduce_warp<Sum>(value);
  else
    return reduce_block<Sum, kGroup>(value);
}

template <class T, int kStep, int kThreads>
__device__ void add_row(const T* x, const T* residual, T* sum, int64_t width) {
  for (int64_t at = int64_t(threadIdx.x) * kStep; at < width; at += kThreads * kStep) {
    float a[kStep], b[kStep];
    load_step(x + at, a);
    load_step(residual + at, b);
#pragma unroll
    for (int i = 0; i < kStep; ++i) a[i] += b[i];
    store_step(sum + at, a);  // each thread reads again only what it has written
  }
}

// The sum of (x - shift) to the power of kPower.
template <int kPower, class T, int kStep, int kThreads>
__device__ float sum_of_row(const T* x, float shift, int64_t width) {
  float sum = 0.0f;
  for (int64_t at = int64_t(threadIdx.x) * kStep; at < width; at += kThreads * kStep) {
    float v[kStep];
    load_step(x + at, v);
#pragma unroll
    for (int i = 0; i < kStep; ++i) sum += kPower == 1 ? v[i] - shift : (v[i] - shift) * (v[i] - shift);
  }
  return reduce_group<kThreads>(sum);
}

template <class T, int kStep, int kThreads>
__device__ void write_row(const NormForward& a, const T* x, float mean, float rstd, T* out) {
#pragma unroll 1  // more steps at once would not fit into the registers
  for (int64_t at = int64_t(threadIdx.x) * kStep; at < a.width; at += kThreads * kStep) {
    float v[kStep], weight[kStep], bias[kStep] = {};
    load_step(x + at, v);
    load_weight<kStep, T>(a.weight, a.weight_dtype, at, weight);
    if (a.bias != nullptr) load_weight<kStep, T>(a.bias, a.weight_dtype, at, bias);
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      const float normed = (v[i] - mean) * rstd;
      // RMSNorm is rounded before the gain, as the plain formula does.
      v[i] = (a.mean == nullptr ? rounded<T>(normed) : normed) * weight[i] + bias[i];
    }
    store_step(out + at, v);
  }
}

template <class T, bool kPacked, int kThreads>
__global__ void __launch_bounds__(kThreads) norm_forward_kernel(NormForward a) {
  constexpr int kStep = kStepOf<T, kPacked>;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* x = static_cast<const T*>(a.x) + row * a.width;
    if (a.residual != nullptr) {
      T* sum = static_cast<T*>(a.sum) + row * a.width;
      add_row<T, kStep, kThreads>(x, static_cast<const T*>(a.residual) + row * a.width, sum, a.width);
      x = sum;
    }
    const bool centred = a.mean != nullptr;
    const float mean = centred ? sum_of_row<1, T, kStep, kThreads>(x, 0.0f, a.width) / float(a.width) : 0.0f;
    const float squares = sum_of_row<2, T, kStep, kThreads>(x, mean, a.width);
    const float rstd = 1.0f / sqrtf(squares / float(a.width) + a.eps);
    write_row<T, kStep, kThreads>(a, x, mean, rstd, static_cast<T*>(a.out) + row * a.width);
    if (threadIdx.x == 0) {
      a.rstd[row] = rstd;
      if (centred) a.mean[row] = mean;
    }
  }
}

struct Means {
  float b, c;
};

// A thread's part of a row as it is stored, held in registers until the means of the row are known.
template <class T, int kStep>
struct alignas(sizeof(T) * kStep) Read {
  T at[kStep];

  __device__ static Read from(const T* row) { return *reinterpret_cast<const Read*>(row); }
};

// One step of the backward pass of a row, at column `at`. Names and formula: cpu.cpp.
template <class T, int kStep>
struct BackwardStep {
  float grad[kStep], normed[kStep], scaled[kStep];  // scaled: grad * weight

  __device__ BackwardStep(const NormBackward& a, const Read<T, kStep>& g, const Read<T, kStep>& x, int64_t at,
                          float mean, float rstd) {
    load_weight<kStep, T>(a.weight, a.weight_dtype, at, scaled);
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      grad[i] = load(g.at[i]);
      normed[i] = (load(x.at[i]) - mean) * rstd;
      scaled[i] *= grad[i];
    }
  }

  __device__ void add_to(Means& sums) const {
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      sums.b += scaled[i];
      sums.c += scaled[i] * normed[i];
    }
  }

  // `beside`: gradient of the sum that does not come through the norm, or zeros.
  __device__ void write(const NormBackward& a, int64_t row, int64_t at, const Read<T, kStep>& beside, float rstd,
                        const Means& means) const {
    float out[kStep];
#pragma unroll
    for (int i = 0; i < kStep; ++i)
      out[i] = load(beside.at[i]) + (scaled[i] - normed[i] * means.c - means.b) * rstd;
    store_step(static_cast<T*>(a.grad_x) + row * a.width + at, out);
  }
};

constexpr int kBlock = 256;  // threads of the backward pass
constexpr int kHeld = 32;    // columns of a thread, whose sums it holds in registers

// Adds the sums over the columns of the same row that other blocks have (blockIdx.y).
template <class T, int kStep, int kGroup>
__device__ void add_other_columns(const NormBackward& a, int64_t row, int lane, float mean, float rstd, Means& sums) {
  const T *grad = static_cast<const T*>(a.grad) + row * a.width, *x = static_cast<const T*>(a.x) + row * a.width;
  for (int64_t at = int64_t(lane) * kStep; at < a.width; at += kGroup * kStep) {
    if (at / (kGroup * kHeld) == blockIdx.y) continue;
    using One = Read<T, kStep>;
    BackwardStep<T, kStep>(a, One::from(grad + at), One::from(x + at), at, mean, rstd).add_to(sums);
  }
}

// kGroup threads, a warp or the block, take a part of the rows. blockIdx.y: which kGroup * kHeld columns of them, each
// read once: all loads of a row are in flight before the first one is used.
template <class T, bool kPacked, int kGroup, bool kBias>
__global__ void __launch_bounds__(kBlock) norm_backward_kernel(NormBackward a, RowParts parts) {
  constexpr int kStep = kStepOf<T, kPacked>, kSteps = kHeld / kStep;
  const int64_t part = (int64_t(blockIdx.x) * kBlock + threadIdx.x) / kGroup;
  if (part >= parts.count) return;  // a whole warp, or the whole block
  const int lane = threadIdx.x % kGroup;
  const int64_t first = int64_t(blockIdx.y) * kGroup * kHeld + int64_t(lane) * kStep;
  float of_weight[kSteps][kStep] = {}, of_bias[kSteps][kStep] = {};
  const int64_t end = parts.end(part, a.rows);
  for (int64_t row = parts.begin(part); row < end; ++row) {
    using Step = BackwardStep<T, kStep>;
    using Numbers = Read<T, kStep>;
    const T* grad_row = static_cast<const T*>(a.grad) + row * a.width;
    const T* x_row = static_cast<const T*>(a.x) + row * a.width;
    const T* sum_row = a.grad_sum == nullptr ? nullptr : static_cast<const T*>(a.grad_sum) + row * a.width;
    Numbers grad[kSteps], x[kSteps], beside[kSteps] = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int64_t at = first + s * kGroup * kStep;
      if (at >= a.width) break;
      grad[s] = Numbers::from(grad_row + at), x[s] = Numbers::from(x_row + at);
      if (sum_row != nullptr) beside[s] = Numbers::from(sum_row + at);
    }
    const float rstd = a.rstd[row], mean = a.mean == nullptr ? 0.0f : a.mean[row];
    Means means{0.0f, 0.0f};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int64_t at = first + s * kGroup * kStep;
      if (at < a.width) Step(a, grad[s], x[s], at, mean, rstd).add_to(means);
    }
    if (gridDim.y > 1) add_other_columns<T, kStep, kGroup>(a, row, lane, mean, rstd, means);
    means.c = reduce_group<kGroup>(means.c) / float(a.width);
    means.b = a.mean == nullptr ? 0.0f : reduce_group<kGroup>(means.b) / float(a.width);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int64_t at = first + s * kGroup * kStep;
      if (at >= a.width) break;
      const Step step(a, grad[s], x[s], at, mean, rstd);
      step.write(a, row, at, beside[s], rstd, means);
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        of_weight[s][i] += step.grad[i] * step.normed[i];
        if constexpr (kBias) of_bias[s][i] += step.grad[i];
      }
    }
  }
  float* partial = a.partial + part * a.width * (kBias ? 2 : 1);
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int64_t at = first + s * kGroup * kStep;
    if (at >= a.width) break;
    store_step(partial + at, of_weight[s]);
    if constexpr (kBias) store_step(partial + a.width + at, of_bias[s]);
  }
}

template <class T, bool kPacked>
void launch_forward(const NormForward& a, void* stream) {
  const unsigned blocks = unsigned(a.rows < (1 << 20) ? a.rows : 1 << 20);
  const int64_t steps = a.width / kStepOf<T, kPacked>;
  if (steps <= 128)
    MK_LAUNCH((norm_forward_kernel<T, kPacked, 32>), blocks, 32, stream)(a);
  else if (steps <= 512)
    MK_LAUNCH((norm_forward_kernel<T, kPacked, 128>), blocks, 128, stream)(a);
  else
    MK_LAUNCH((norm_forward_kernel<T, kPacked, 512>), blocks, 512, stream)(a);
}

template <class T, bool kPacked, int kGroup>
void launch_backward(const NormBackward& a, const RowParts& parts, void* stream) {
  constexpr int64_t kPartsOfBlock = kBlock / kGroup, kTile = kGroup * kHeld;
  const dim3 grid(unsigned((parts.count + kPartsOfBlock - 1) / kPartsOfBlock), unsigned((a.width + kTile - 1) / kTile));
  if (a.grad_bias == nullptr)
    MK_LAUNCH((norm_backward_kernel<T, kPacked, kGroup, false>), grid, kBlock, stream)(a, parts);
  else
    MK_LAUNCH((norm_backward_kernel<T, kPacked, kGroup, true>), grid, kBlock, stream)(a, parts);
}

template <class T, bool kPacked>
void launch_backward(const NormBackward& a, const RowParts& parts, void* stream) {
  if (a.width <= 32 * kHeld)
    launch_backward<T, kPacked, 32>(a, parts, stream);
  else
    launch_backward<T, kPacked, kBlock>(a, parts, stream);
}

}  // namespace

int norm_forward(const NormForward& a, void* stream) {
  if (a.rows == 0 || a.width == 0) return 0;
  MK_FOR_DTYPE(a.dtype, T, {
    if (packs_fit<T>(a.width, a.x, a.residual, a.weight, a.bias, a.sum, a.out))
      launch_forward<T, true>(a, stream);
    else
      launch_forward<T, false>(a, stream);
  })
  return launch_result();
}

int norm_backward(const NormBackward& a, void* stream) {
  if (a.width == 0) return 0;
  const RowParts parts = row_parts_of_gpu(a.rows, a.width);
  if (a.rows > 0) {
    MK_FOR_DTYPE(a.dtype, T, {
      if (packs_fit<T>(a.width, a.grad, a.grad_sum, a.x, a.weight, a.grad_x, a.partial))
        launch_backward<T, true>(a, parts, stream);
      else
        launch_backward<T, false>(a, parts, stream);
    })
  }
  const int64_t stride = a.grad_bias == nullptr ? a.width : 2 * a.width;
  sum_parts(a.weight_dtype, a.partial, parts.count, stride, a.grad_weight, a.width, stream);
  if (a.grad_bias != nullptr)
    sum_parts(a.weight_dtype, a.partial + a.width, parts.count, stride, a.grad_bias, a.width, stream);
  return launch_result();
}

}  // namespace mk::cuda
