// Rotary embedding: a thread takes a step (steps.h) of both halves of a head, or one of the channels behind them.
#include "../common/launch.h"
#include "../common/steps.h"
#include "math.h"

namespace mk::cuda {
namespace {

constexpr int kThreads = 64;  // about the steps of one position of a small model

template <class T, int kStep>
__device__ void turn(const Rope& a, const T* x, int64_t angle, T* out) {
  float first[kStep], second[kStep], cos[kStep], sin[kStep];
  load_step(x, first);
  load_step(x + a.half, second);
  load_weight<kStep, T>(a.cos, a.table_dtype, angle, cos);
  load_weight<kStep, T>(a.sin, a.table_dtype, angle, sin);
#pragma unroll
  for (int i = 0; i < kStep; ++i) {
    const float before = first[i], turned = sin[i] * a.direction;
    first[i] = before * cos[i] - second[i] * turned;
    second[i] = second[i] * cos[i] + before * turned;
  }
  store_step(out, first);
  store_step(out + a.half, second);
}

// Grid: x over the steps of a position, y over positions (strided, as y is limited to 65535).
template <class T, bool kPacked>
__global__ void __launch_bounds__(kThreads) rope_kernel(Rope a) {
  constexpr int kStep = kStepOf<T, kPacked>;
  const unsigned turned = unsigned(a.half / kStep), kept = unsigned((a.head_dim - 2 * a.half) / kStep);
  const unsigned unit = blockIdx.x * kThreads + threadIdx.x, head = unit / (turned + kept);
  const unsigned step = unit % (turned + kept);
  if (head >= a.heads) return;
  for (int64_t position = blockIdx.y; position < a.batch * a.seq; position += gridDim.y) {
    const int64_t batch = position / a.seq, seq = position % a.seq;
    const T* x = static_cast<const T*>(a.x) + batch * a.batch_stride + seq * a.seq_stride + head * a.head_stride;
    T* out = static_cast<T*>(a.out) + (position * a.heads + head) * a.head_dim;
    if (step < turned) {
      const int64_t channel = int64_t(step) * kStep;
      turn<T, kStep>(a, x + channel, batch * a.table_stride + seq * a.half + channel, out + channel);
    } else {
      const int64_t channel = 2 * a.half + int64_t(step - turned) * kStep;
      float values[kStep];
      load_step(x + channel, values);
      store_step(out + channel, values);
    }
  }
}

template <class T>
bool in_packs(const Rope& a) {
  constexpr int64_t kPack = Pack<T>::size;
  const bool strides = a.batch_stride % kPack == 0 && a.seq_stride % kPack == 0 && a.head_stride % kPack == 0;
  return strides && a.half % kPack == 0 && packs_fit<T>(a.head_dim, a.x, a.cos, a.sin, a.out);
}

template <class T, bool kPacked>
void launch(const Rope& a, void* stream) {
  const int64_t units = a.heads * ((a.head_dim - a.half) / kStepOf<T, kPacked>), positions = a.batch * a.seq;
  const dim3 grid(unsigned((units + kThreads - 1) / kThreads), unsigned(positions < 65535 ? positions : 65535));
  MK_LAUNCH((rope_kernel<T, kPacked>), grid, kThreads, stream)(a);
}

}  // namespace

int rope(const Rope& a, void* stream) {
  if (a.batch * a.seq * a.heads * a.head_dim == 0) return 0;
  MK_FOR_DTYPE(a.dtype, T, {
    if (in_packs<T>(a))
      launch<T, true>(a, stream);
    else
      launch<T, false>(a, stream);
  })
  return launch_result();
}

}  // namespace mk::cuda
