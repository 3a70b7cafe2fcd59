#pragma once

#include "../common/softmax.h"
#include "tiers.h"

MK_CPU_KERNEL(softmax_forward, SoftmaxForward)
MK_CPU_KERNEL(softmax_backward, SoftmaxBackward)
