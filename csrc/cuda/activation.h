#pragma once

#include "../common/activation.h"

namespace mk::cuda {

int activation_forward(const ActivationForward& args, void* stream);
int activation_backward(const ActivationBackward& args, void* stream);
int gated_forward(const GatedForward& args, void* stream);
int gated_backward(const GatedBackward& args, void* stream);

}  // namespace mk::cuda
