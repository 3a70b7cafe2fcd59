// The CUDA runtime is linked in statically, so it is another one than torch's, with a current device of its own.
#include "device.h"

#if !defined(MK_EMULATED)
#include <cuda_runtime.h>
#endif

namespace mk::cuda {

int use_device(int index) {
#if defined(MK_EMULATED)
  return 0 * index;
#else
  return int(cudaSetDevice(index));
#endif
}

}  // namespace mk::cuda
