// MK_LAUNCH(kernel, grid, block, stream)(arguments...) is kernel<<<grid, block, 0, stream>>>(arguments...) under nvcc,
// and a run of every thread on the CPU under the emulator. MK_SHARED(T, name, count) is __shared__ T name[count]:
// static shared memory only.
#pragma once

#if defined(MK_EMULATED)
#include "emulator.h"
#else

#include <cuda_runtime.h>

#define MK_SHARED(T, name, count) __shared__ T name[count]
#define MK_LAUNCH(kernel, grid, block, stream) kernel<<<(grid), (block), 0, static_cast<cudaStream_t>(stream)>>>

namespace mk {

// A launcher ends with this: 0, or the CUDA error of the launch.
inline int launch_result() { return int(cudaGetLastError()); }

}  // namespace mk

#endif
