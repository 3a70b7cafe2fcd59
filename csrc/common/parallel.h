// Loops on torch's own thread pool, so that torch's setting for the number of threads applies.
#pragma once

#include <atomic>
#include <cstdint>
#include <new>
#include <stdexcept>

// From torch's stable C interface (torch/csrc/stable/c/shim.h), declared here to keep torch's headers out of kernels.
extern "C" int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain,
                                      void (*body)(int64_t begin, int64_t end, void* context), void* context);

namespace mk {

// Calls body(begin, end) for parts of [0, count), each of `grain` or more. The parts depend on the number of threads:
// a caller that sums across parts must use parts of a fixed size, or its result depends on that number too.
template <class Body>
inline void parallel_for(int64_t count, int64_t grain, const Body& body) {
  if (count <= 0) return;
  if (count <= grain) return body(int64_t(0), count);
  // An exception cannot leave a thread, so a flag reports it.
  struct Run {
    const Body& body;
    std::atomic<bool> out_of_memory{false};
  } run{body};
  const auto part = [](int64_t begin, int64_t end, void* context) {
    Run& run = *static_cast<Run*>(context);
    try {
      run.body(begin, end);
    } catch (const std::bad_alloc&) {
      run.out_of_memory = true;
    }
  };
  const int32_t code = torch_parallel_for(0, count, grain, part, &run);
  if (run.out_of_memory) throw std::bad_alloc();
  if (code != 0) throw std::runtime_error("torch could not run a loop in parallel");
}

}  // namespace mk
