#pragma once

#include "../common/rope.h"

namespace mk::cuda {

int rope(const Rope& args, void* stream);

}  // namespace mk::cuda
