// Which GPU the next launches of this thread go to.
#pragma once

namespace mk::cuda {

// Makes a GPU the current one of the CUDA runtime that our kernels are linked with. Returns 0, or a CUDA error.
int use_device(int index);

}  // namespace mk::cuda
