#pragma once

#include "../common/activation.h"
#include "tiers.h"

MK_CPU_KERNEL(swiglu_forward, SwigluForward)
MK_CPU_KERNEL(swiglu_backward, SwigluBackward)
