// The function that megatron/model/random_values.py calls. Not an operation of torch: it takes no tensor and gives the
// bits of its numpy twin, so nothing chooses between the two.
#include <exception>

#include "../common/tiers.h"
#include "math.h"

#if !defined(MK_EMULATED)  // there is no CUDA kernel to emulate

MK_CPU_KERNEL(random_values, RandomValues)

// Returns 0, or 1 if memory or threads ran out.
extern "C" __attribute__((visibility("default"))) int mk_random_values(const int64_t* runs, int64_t number_of_runs,
                                                                       float* out, int64_t count, uint64_t key0,
                                                                       uint64_t key1, double scale, int normal) {
  try {
    const mk::RandomValues args{
        .runs = runs,
        .number_of_runs = number_of_runs,
        .out = out,
        .count = count,
        .key = {key0, key1},
        .scale = scale,
        .normal = normal != 0,
    };
    mk::cpu::random_values(args);
  } catch (const std::exception&) {
    return 1;
  }
  return 0;
}

#endif
