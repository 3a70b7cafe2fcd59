// Random values by index, a part of the result per thread: first words, then the values of them.
#include <algorithm>
#include <cstring>
#include <vector>

#include "../common/parallel.h"
#include "math.h"
#include "philox.h"

namespace mk::cpu::MK_TIER {
namespace {

constexpr int64_t kWords = 480;  // worked on at a time, whole groups: words and values stay in the first cache
static_assert(kWords % (kGroup * kPerBlock) == 0);
constexpr int64_t kValues = 2 * kWords;
constexpr int64_t kWorthAThread = 1 << 15;  // values

// The values of `words` words from the beginning of a block on.
void draw(const RandomValues& a, int64_t block, int64_t words, float* __restrict values) {
  alignas(64) uint64_t made[kWords];
  // numpy counts before it computes: word i is one of the four of counter i / 4 + 1.
  const auto counter = [&](int64_t word) { return uint64_t(block + word / kPerBlock) + 1; };
  int64_t at = 0;
  for (; at + kGroup * kPerBlock <= words; at += kGroup * kPerBlock) philox_group(counter(at), a.key, made + at);
  for (; at < words; at += kPerBlock) philox_block(counter(at), a.key, made + at);
  const double scale = a.scale;
  if (a.normal) {
#pragma omp simd
    for (int64_t i = 0; i < words; ++i) random::normal_pair(made[i], scale, values[2 * i], values[2 * i + 1]);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < words; ++i) random::uniform_pair(made[i], scale, values[2 * i], values[2 * i + 1]);
  }
}

// Elements [first, first + count) of the tensor.
void draw_run(const RandomValues& a, int64_t first, int64_t count, float* out) {
  constexpr int64_t kBlock = 2 * kPerBlock;  // values
  alignas(64) float values[kValues];
  while (count > 0) {
    const int64_t block = first / kBlock, skipped = first - block * kBlock;
    const int64_t taken = std::min(count, kValues - skipped);
    const int64_t words = (skipped + taken + kBlock - 1) / kBlock * kPerBlock;
    if (skipped == 0 && taken == kValues) {
      draw(a, block, words, out);
    } else {
      draw(a, block, words, values);
      std::memcpy(out, values + skipped, size_t(taken) * sizeof(float));
    }
    first += taken, count -= taken, out += taken;
  }
}

}  // namespace

void random_values(const RandomValues& a) {
  std::vector<int64_t> ends(size_t(a.number_of_runs));  // of each run, in the result
  for (int64_t run = 0, end = 0; run < a.number_of_runs; ++run) ends[size_t(run)] = end += a.runs[2 * run + 1];
  parallel_for(a.count, kWorthAThread, [&](int64_t begin, int64_t end) {
    auto run = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    for (int64_t at = begin; at < end; ++run) {
      const int64_t taken = std::min(ends[size_t(run)], end) - at;
      const int64_t before = at - (ends[size_t(run)] - a.runs[2 * run + 1]);
      draw_run(a, a.runs[2 * run] + before, taken, a.out + at);
      at += taken;
    }
  });
}

}  // namespace mk::cpu::MK_TIER
