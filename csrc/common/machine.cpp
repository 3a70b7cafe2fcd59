// Tells megatron/ops/library.py which of the compiled instruction sets this machine has.
#include "tiers.h"

extern "C" __attribute__((visibility("default"))) int mk_cpu_tier() { return int(mk::cpu::tier()); }
