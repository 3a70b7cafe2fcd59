// Packs of 16 bytes: one load or store instruction for 4 floats or 8 halves.
#pragma once

#include "dtype.h"

namespace mk {

template <class T>
struct alignas(16) Pack {
  static constexpr int size = 16 / int(sizeof(T));
  T at[size];
};

template <class T>
MK_HD bool aligned(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

template <class T>
MK_HD Pack<T> load_pack(const T* pointer) {
  return *reinterpret_cast<const Pack<T>*>(pointer);
}

template <class T>
MK_HD void store_pack(T* pointer, const Pack<T>& pack) {
#if defined(__CUDA_ARCH__)
  // An ordinary store, but as an intrinsic: nvcc splits an assignment into one store per member.
  uint32_t words[4];
  memcpy(words, &pack, sizeof words);
  __stwb(reinterpret_cast<uint4*>(pointer), make_uint4(words[0], words[1], words[2], words[3]));
#else
  *reinterpret_cast<Pack<T>*>(pointer) = pack;
#endif
}

}  // namespace mk
