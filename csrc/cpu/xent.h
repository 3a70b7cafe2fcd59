#pragma once

#include "../common/xent.h"
#include "tiers.h"

MK_CPU_KERNEL(xent_forward, XentForward)
MK_CPU_KERNEL(xent_backward, XentBackward)
MK_CPU_KERNEL(xent_in_place, XentInPlace)
