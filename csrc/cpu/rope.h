#pragma once

#include "../common/rope.h"
#include "tiers.h"

MK_CPU_KERNEL(rope, Rope)
