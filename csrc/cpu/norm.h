#pragma once

#include "../common/norm.h"
#include "tiers.h"

MK_CPU_KERNEL(norm_forward, NormForward)
MK_CPU_KERNEL(norm_backward, NormBackward)
