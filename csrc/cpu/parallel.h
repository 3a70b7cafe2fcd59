// Loops over torch's own pool of threads, so that --threads means what it says.
#pragma once

#include <cstdint>

// From torch's stable C interface (torch/csrc/stable/c/shim.h), declared here to keep torch's headers out of kernels.
extern "C" int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain,
                                      void (*body)(int64_t begin, int64_t end, void* context), void* context);

namespace mk {

// Calls body(begin, end) for parts of [0, count), each of `grain` or more. How the parts fall depends on the number of
// threads: what is summed across them must be cut into parts of a fixed size by the caller, or runs would differ.
template <class Body>
inline void parallel_for(int64_t count, int64_t grain, const Body& body) {
  if (count <= 0) return;
  if (count <= grain) return body(int64_t(0), count);
  torch_parallel_for(
      0, count, grain,
      [](int64_t begin, int64_t end, void* context) { (*static_cast<const Body*>(context))(begin, end); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace mk
