#pragma once

#include "../common/optim.h"

namespace mk::cuda {

int adamw(const AdamW& args, void* stream);
int square_sum(const SquareSum& args, void* stream);

}  // namespace mk::cuda
