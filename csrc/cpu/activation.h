#pragma once

#include "../common/activation.h"
#include "tiers.h"

MK_CPU_KERNEL(activation_forward, ActivationForward)
MK_CPU_KERNEL(activation_backward, ActivationBackward)
MK_CPU_KERNEL(gated_forward, GatedForward)
MK_CPU_KERNEL(gated_backward, GatedBackward)
