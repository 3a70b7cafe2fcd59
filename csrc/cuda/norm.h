#pragma once

#include "../common/norm.h"

namespace mk::cuda {

int norm_forward(const NormForward& args, void* stream);
int norm_backward(const NormBackward& args, void* stream);

}  // namespace mk::cuda
