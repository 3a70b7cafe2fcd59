#pragma once

#include "../common/optim.h"
#include "tiers.h"

MK_CPU_KERNEL(adamw, AdamW)
MK_CPU_KERNEL(square_sum, SquareSum)
