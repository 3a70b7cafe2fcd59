#pragma once

#include "../common/xent.h"

namespace mk::cuda {

int xent_forward(const XentForward& args, void* stream);
int xent_backward(const XentBackward& args, void* stream);
int xent_in_place(const XentInPlace& args, void* stream);

}  // namespace mk::cuda
