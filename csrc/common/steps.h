// A step is what one thread reads at once: a pack of 16 bytes where all rows are aligned to 16 bytes, else one number.
#pragma once

#include "launch.h"
#include "vec.h"

namespace mk::cuda {

template <class T, bool kPacked>
constexpr int kStepOf = kPacked ? Pack<T>::size : 1;

template <int kStep, class T>
__device__ void load_step(const T* from, float (&to)[kStep]) {
  if constexpr (kStep == 1) {
    to[0] = load(*from);
  } else {
    constexpr int kPack = Pack<T>::size;
    static_assert(kStep % kPack == 0);
#pragma unroll
    for (int i = 0; i < kStep; i += kPack) {
      const Pack<T> pack = load_pack(from + i);
#pragma unroll
      for (int j = 0; j < kPack; ++j) to[i + j] = load(pack.at[j]);
    }
  }
}

template <int kStep, class T>
__device__ void store_step(T* to, const float (&from)[kStep]) {
  if constexpr (kStep == 1) {
    *to = store<T>(from[0]);
  } else {
    constexpr int kPack = Pack<T>::size;
    static_assert(kStep % kPack == 0);
#pragma unroll
    for (int i = 0; i < kStep; i += kPack) {
      Pack<T> pack;
#pragma unroll
      for (int j = 0; j < kPack; ++j) pack.at[j] = store<T>(from[i + j]);
      store_pack(to + i, pack);
    }
  }
}

// A weight or bias of the rows' own type T, or in float.
template <int kStep, class T>
__device__ void load_weight(const void* weight, DType dtype, int64_t at, float (&to)[kStep]) {
  if (dtype == DType::f32)
    load_step(static_cast<const float*>(weight) + at, to);
  else
    load_step(static_cast<const T*>(weight) + at, to);
}

// Whether rows of `width` numbers at these addresses can be read in packs; null pointers do not count.
template <class T, class... Pointers>
bool packs_fit(int64_t width, const Pointers*... rows) {
  return width % Pack<T>::size == 0 && (aligned(rows) && ...);
}

}  // namespace mk::cuda
