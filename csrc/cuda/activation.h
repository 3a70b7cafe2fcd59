#pragma once

#include "../common/activation.h"

namespace mk::cuda {

int swiglu_forward(const SwigluForward& args, void* stream);
int swiglu_backward(const SwigluBackward& args, void* stream);

}  // namespace mk::cuda
