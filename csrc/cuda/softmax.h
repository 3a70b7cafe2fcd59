#pragma once

#include "../common/softmax.h"

namespace mk::cuda {

int softmax_forward(const SoftmaxForward& args, void* stream);
int softmax_backward(const SoftmaxBackward& args, void* stream);

}  // namespace mk::cuda
