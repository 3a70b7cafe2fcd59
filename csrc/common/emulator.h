// CUDA kernels on a CPU: every thread of a block is a fiber, __syncthreads and the shuffles are barriers between
// fibers. Slow, exact, and stricter than a GPU: shared memory starts as NaN, out-of-order schedules are tried, and
// the C++ sanitizers see every access. It finds wrong indices, missing barriers and misaligned packs; it cannot find
// every race, and it knows no tensor cores.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#define __global__ static
#define __device__ inline
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace mk::emulator {

constexpr size_t kStack = 64 << 10;
constexpr int kWarp = 32;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  dim3 thread;
  bool done = false;
  bool waiting = false;        // at a barrier of the whole block
  bool warp_waiting = false;   // at a barrier of its warp
  uint64_t exchanged = 0;      // what it offers to its warp
  uint64_t received = 0;
};

struct Block {
  std::vector<Fiber> fibers;
  ucontext_t scheduler;
  std::function<void()> body;
  int current = 0;
  dim3 grid, index, size;
  int epoch = 0;  // a new one for every block: static shared memory is poisoned again
};

inline Block*& running() {
  static thread_local Block* block = nullptr;
  return block;
}

// 0: threads in order, 1: in reverse, 2: odd ones first. The answer must not depend on it.
inline int order() {
  const char* chosen = std::getenv("MK_EMULATOR_ORDER");
  return chosen == nullptr ? 0 : std::atoi(chosen);
}

inline void yield_to_scheduler() {
  Block* block = running();
  Fiber& fiber = block->fibers[block->current];
  swapcontext(&fiber.context, &block->scheduler);
}

inline void enter() {
  Block* block = running();
  block->body();
  block->fibers[block->current].done = true;
  yield_to_scheduler();
}

inline void barrier() {
  Block* block = running();
  block->fibers[block->current].waiting = true;
  yield_to_scheduler();
}

inline void warp_barrier() {
  Block* block = running();
  block->fibers[block->current].warp_waiting = true;
  yield_to_scheduler();
}

inline int lane() { return running()->current % kWarp; }

template <class T>
T exchange(T value, int source_lane) {
  static_assert(sizeof(T) <= 8);
  Block* block = running();
  Fiber& mine = block->fibers[block->current];
  std::memcpy(&mine.exchanged, &value, sizeof value);
  warp_barrier();
  const int warp = block->current / kWarp, source = warp * kWarp + source_lane;
  T result = value;
  if (source_lane >= 0 && source_lane < kWarp && source < int(block->fibers.size()))
    std::memcpy(&result, &block->fibers[source].exchanged, sizeof result);
  warp_barrier();
  return result;
}

inline std::vector<int> schedule(int count) {
  std::vector<int> result;
  const int kind = order();
  for (int i = 0; i < count; ++i) result.push_back(kind == 1 ? count - 1 - i : i);
  if (kind == 2) {
    result.clear();
    for (int first : {1, 0})
      for (int i = first; i < count; i += 2) result.push_back(i);
  }
  return result;
}

// True when every live fiber of [begin, end) stands at the barrier.
template <class Waits>
bool all_wait(const Block& block, int begin, int end, Waits waits) {
  bool any = false;
  for (int i = begin; i < end; ++i) {
    if (block.fibers[i].done) continue;
    if (!waits(block.fibers[i])) return false;
    any = true;
  }
  return any;
}

inline void run_block(Block& block, const std::vector<int>& order) {
  const int count = int(block.fibers.size());
  for (;;) {
    bool alive = false, moved = false;
    for (int i : order) {
      Fiber& fiber = block.fibers[i];
      if (fiber.done) continue;
      alive = true;
      if (fiber.waiting || fiber.warp_waiting) continue;
      block.current = i;
      moved = true;
      swapcontext(&block.scheduler, &fiber.context);
    }
    if (!alive) return;
    for (int begin = 0; begin < count; begin += kWarp) {
      const int end = begin + kWarp < count ? begin + kWarp : count;
      if (all_wait(block, begin, end, [](const Fiber& f) { return f.warp_waiting; })) {
        for (int i = begin; i < end; ++i) block.fibers[i].warp_waiting = false;
        moved = true;
      }
    }
    if (all_wait(block, 0, count, [](const Fiber& f) { return f.waiting; })) {
      for (Fiber& fiber : block.fibers) fiber.waiting = false;
      moved = true;
    }
    if (!moved) std::abort();  // some threads wait at a barrier that the others have passed or never reach
  }
}

template <class Kernel>
void run_grid(dim3 grid, dim3 size, const Kernel& kernel) {
  const int count = int(size.x * size.y * size.z);
  const std::vector<int> order = schedule(count);
  static int epochs = 0;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        Block block;
        block.grid = grid, block.index = dim3(x, y, z), block.size = size, block.body = kernel;
        block.epoch = ++epochs;
        block.fibers = std::vector<Fiber>(count);
        running() = &block;
        for (int i = 0; i < count; ++i) {
          Fiber& fiber = block.fibers[i];
          fiber.thread = dim3(i % size.x, i / size.x % size.y, i / (size.x * size.y));
          fiber.stack = std::make_unique<char[]>(kStack);
          getcontext(&fiber.context);
          fiber.context.uc_stack.ss_sp = fiber.stack.get();
          fiber.context.uc_stack.ss_size = kStack;
          fiber.context.uc_link = nullptr;
          makecontext(&fiber.context, enter, 0);
        }
        run_block(block, order);
        running() = nullptr;
      }
}

// Static shared memory: one for the block that runs, filled with NaN when a block first comes to it.
template <class T>
struct Shared {
  T value;
  int epoch = -1;
  T& get() {
    if (epoch != running()->epoch) {
      epoch = running()->epoch;
      std::memset(static_cast<void*>(&value), 0xff, sizeof value);
    }
    return value;
  }
};

template <class Kernel>
struct Launch {
  Kernel kernel;
  dim3 grid, block;
  template <class... Args>
  void operator()(Args... args) const {
    run_grid(grid, block, [=, this] { kernel(args...); });
  }
};

template <class Kernel>
Launch<Kernel> launch(Kernel kernel, dim3 grid, dim3 block) {
  return {kernel, grid, block};
}

}  // namespace mk::emulator

#define threadIdx (::mk::emulator::running()->fibers[::mk::emulator::running()->current].thread)
#define blockIdx (::mk::emulator::running()->index)
#define blockDim (::mk::emulator::running()->size)
#define gridDim (::mk::emulator::running()->grid)

inline void __syncthreads() { ::mk::emulator::barrier(); }
inline void __syncwarp(unsigned = ~0u) { ::mk::emulator::warp_barrier(); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return ::mk::emulator::exchange(value, ::mk::emulator::lane() ^ mask);
}
template <class T>
T __shfl_down_sync(unsigned, T value, int delta) {
  return ::mk::emulator::exchange(value, ::mk::emulator::lane() + delta);
}
template <class T>
T __shfl_sync(unsigned, T value, int source) {
  return ::mk::emulator::exchange(value, source);
}

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

#define MK_LAUNCH(kernel, grid, block, stream) ::mk::emulator::launch(kernel, grid, block)
#define MK_SHARED(T, name, count)                          \
  static ::mk::emulator::Shared<T[count]> name##_of_block; \
  T(&name)[count] = name##_of_block.get()

namespace mk {

inline int launch_result() { return 0; }

}  // namespace mk
