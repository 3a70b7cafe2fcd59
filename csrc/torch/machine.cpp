// What megatron/ops/library.py asks before it uses anything: which of the compiled instruction sets this machine has.
#include "../cpu/tiers.h"

extern "C" __attribute__((visibility("default"))) int mk_cpu_tier() { return int(mk::cpu::tier()); }
