// CUDA kernels on a CPU: every thread of a block is a fiber, __syncthreads and the warp functions are barriers between
// fibers. Stricter than a GPU: shared memory starts as NaN, a lane reads NaN where CUDA leaves the value undefined,
// several orders of threads and blocks are tried, and the C++ sanitizer sees every access. It finds wrong indices, data
// races in shared memory, barriers that not all threads reach and misaligned packs. It does not find data races between
// blocks, and has no tensor cores.
#pragma once

#include <algorithm>
#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <ucontext.h>
#include <vector>

#include <math.h>

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
constexpr uint64_t kPoison = ~uint64_t(0);  // NaN in every floating-point type, -1 in integers

// What a thread waits for.
enum class Wait { nothing, warp, block, done };

struct Fiber {
  std::unique_ptr<char[]> stack;
  ucontext_t start;   // for its first step
  jmp_buf context;    // for all others: no system call in a switch
  bool started = false;
  dim3 thread;
  Wait wait = Wait::done;
  unsigned mask = 0;               // of the lanes that meet at a barrier of the warp
  int line = 0;                    // of the barrier of the block at which it waits
  long synced = 0;                 // how many barriers of the warp it has passed in this block
  uint64_t offered = kPoison;      // to the lanes of the next exchange
  uint64_t published = kPoison;    // to the lanes of the last exchange, not all of which may have read it yet
  long meeting = -1;
};

// One per process, kept between launches: creating fibers is expensive.
struct Machine {
  std::mutex launching;
  std::vector<std::unique_ptr<Fiber>> fibers;
  jmp_buf scheduler;
  std::function<void()> body;
  const char* kernel = "";
  int current = 0, threads = 0;
  dim3 grid, index, size;
  long epoch = 0;  // a new one for every block: shared memory is poisoned again
  long meetings = 0;
  long interval = 0;  // a new one from every barrier of a block on
  std::string fault;  // the first undefined behaviour: the launch fails with it
  int order = 0;      // 0: threads and blocks in order, 1: in reverse, 2: odd ones first, others: shuffled by it
};

inline Machine& machine() {
  static Machine only;
  return only;
}

inline Fiber& current() { return *machine().fibers[machine().current]; }

// Reported when the block has ended: an exception cannot cross fibers.
inline void fault(const std::string& what) {
  if (machine().fault.empty()) machine().fault = what;
}

// ---------------------------------------------------------------- switching

inline void yield(Wait wait) {
  Fiber& fiber = current();
  fiber.wait = wait;
  if (_setjmp(fiber.context) == 0) _longjmp(machine().scheduler, 1);
}

// A fiber never ends: it runs the same thread of the next block.
inline void enter() {
  for (;;) {
    machine().body();
    yield(Wait::done);
  }
}

inline void resume(int index) {
  machine().current = index;
  Fiber& fiber = current();
  if (_setjmp(machine().scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.context, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

inline std::unique_ptr<Fiber> new_fiber() {
  auto fiber = std::make_unique<Fiber>();
  fiber->stack.reset(new char[kStack]);
  getcontext(&fiber->start);
  fiber->start.uc_stack.ss_sp = fiber->stack.get();
  fiber->start.uc_stack.ss_size = kStack;
  fiber->start.uc_link = nullptr;
  makecontext(&fiber->start, enter, 0);
  return fiber;
}

// ---------------------------------------------------------------- what a thread may call

inline int lane() { return machine().current % kWarp; }

inline void warp_barrier(unsigned mask) {
  if ((mask >> lane() & 1u) == 0u) fault("thread " + std::to_string(machine().current) + " is not in its own mask");
  current().mask = mask;
  yield(Wait::warp);
}

inline void sync_warp(unsigned mask) {
  warp_barrier(mask);
  ++current().synced;
}

inline void block_barrier(int line) {
  current().line = line;
  yield(Wait::block);
}

inline void offer(uint64_t value, unsigned mask) {
  current().offered = value;
  warp_barrier(mask);
}

// What a lane offered to this exchange; poison for a lane that has ended or is not in the mask, which CUDA leaves
// undefined.
inline uint64_t offered_by(int source) {
  const Machine& m = machine();
  const int index = m.current / kWarp * kWarp + source;
  if (index >= m.threads || m.fibers[index]->meeting != m.fibers[m.current]->meeting) return kPoison;
  return m.fibers[index]->published;
}

// Lanes beyond the warp give the caller its own value back, as in CUDA.
template <class T>
T exchange(unsigned mask, T value, int source) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  offer(bits, mask);
  if (source < 0 || source >= kWarp) return value;
  bits = offered_by(source);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline unsigned ballot(unsigned mask, bool vote) {
  offer(vote, mask);
  unsigned votes = 0;
  for (int i = 0; i < kWarp; ++i) votes |= unsigned(offered_by(i) == 1) << i;
  return votes;
}

// ---------------------------------------------------------------- scheduling

inline std::vector<int> in_order(int count) {
  std::vector<int> result;
  const int kind = machine().order;
  if (kind != 2) {
    for (int i = 0; i < count; ++i) result.push_back(kind == 1 ? count - 1 - i : i);
    if (kind > 2) std::shuffle(result.begin(), result.end(), std::minstd_rand(unsigned(kind)));
    return result;
  }
  for (int first : {1, 0})
    for (int i = first; i < count; i += 2) result.push_back(i);
  return result;
}

// Releases the lanes of a warp that are all at their barrier; true if there were any.
inline bool release_warp(int begin, int end) {
  Machine& m = machine();
  const auto& fibers = m.fibers;
  bool released = false;
  for (int i = begin; i < end; ++i) {
    if (fibers[i]->wait != Wait::warp) continue;
    const unsigned mask = fibers[i]->mask;
    bool all = true;
    for (int j = begin; j < end; ++j) {
      const bool named = mask >> (j - begin) & 1u, here = fibers[j]->wait == Wait::warp && fibers[j]->mask == mask;
      all &= !named || here || fibers[j]->wait == Wait::done;
    }
    if (!all) continue;
    ++m.meetings;
    for (int j = begin; j < end; ++j) {
      if (fibers[j]->wait != Wait::warp || fibers[j]->mask != mask) continue;
      fibers[j]->wait = Wait::nothing;
      fibers[j]->published = fibers[j]->offered;
      fibers[j]->meeting = m.meetings;
    }
    released = true;
  }
  return released;
}

// Runs a warp as far as it gets without the others: the order that exposes missing barriers best.
inline void run_warp(int begin, const std::vector<int>& lanes) {
  const int end = begin + int(lanes.size());
  do {
    for (int lane : lanes)
      if (machine().fibers[begin + lane]->wait == Wait::nothing) resume(begin + lane);
  } while (release_warp(begin, end));
}

[[noreturn]] inline void report_deadlock() {
  Machine& m = machine();
  int at[4] = {};
  for (int i = 0; i < m.threads; ++i) ++at[int(m.fibers[i]->wait)];
  m.fibers.clear();  // suspended in a kernel that will not be resumed
  throw std::runtime_error(std::string(m.kernel) + ": deadlock in block (" + std::to_string(m.index.x) + ", " +
                           std::to_string(m.index.y) + ", " + std::to_string(m.index.z) + "): of " +
                           std::to_string(m.threads) + " threads " + std::to_string(at[int(Wait::block)]) +
                           " wait for the block, " + std::to_string(at[int(Wait::warp)]) + " for their warp, " +
                           std::to_string(at[int(Wait::done)]) + " have ended");
}

// True while there are threads to run. All must be at the same barrier: anything else is a deadlock or undefined.
inline bool release_block() {
  Machine& m = machine();
  int waiting = 0, done = 0, line = 0;
  for (int i = 0; i < m.threads; ++i) {
    const Fiber& fiber = *m.fibers[i];
    done += fiber.wait == Wait::done;
    if (fiber.wait != Wait::block) continue;
    if (++waiting > 1 && fiber.line != line) fault("threads of a block meet at different barriers");
    line = fiber.line;
  }
  if (waiting + done != m.threads) report_deadlock();
  if (waiting > 0 && done > 0) fault("a barrier of the block after some of its threads have ended");
  for (int i = 0; i < m.threads; ++i)
    if (m.fibers[i]->wait == Wait::block) m.fibers[i]->wait = Wait::nothing;
  ++m.interval;
  return waiting > 0;
}

struct Warp {
  int begin;
  std::vector<int> lanes;
};

inline std::vector<Warp> warps_of(int threads) {
  std::vector<Warp> result;
  for (int warp : in_order((threads + kWarp - 1) / kWarp)) {
    const int begin = warp * kWarp;
    result.push_back({begin, in_order(threads - begin < kWarp ? threads - begin : kWarp)});
  }
  return result;
}

inline void run_block(dim3 index, const std::vector<Warp>& warps) {
  Machine& m = machine();
  m.index = index;
  ++m.epoch;
  for (int i = 0; i < m.threads; ++i) m.fibers[i]->wait = Wait::nothing, m.fibers[i]->synced = 0;
  do {
    for (const Warp& warp : warps) run_warp(warp.begin, warp.lanes);
  } while (release_block());
  if (!m.fault.empty()) throw std::runtime_error(std::string(m.kernel) + ": " + m.fault);
}

inline void run_grid(const char* kernel, dim3 grid, dim3 size, std::function<void()> body) {
  Machine& m = machine();
  const std::lock_guard<std::mutex> alone(m.launching);
  m.kernel = kernel, m.grid = grid, m.size = size, m.body = std::move(body);
  m.threads = int(size.x * size.y * size.z), m.fault.clear();
  const bool empty = grid.x == 0 || grid.y == 0 || grid.z == 0;
  if (m.threads < 1 || m.threads > 1024 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535 || empty)
    throw std::runtime_error(std::string(kernel) + ": a GPU rejects this grid or block");
  while (int(m.fibers.size()) < m.threads) m.fibers.push_back(new_fiber());
  for (int i = 0; i < m.threads; ++i)
    m.fibers[i]->thread = dim3(i % size.x, i / size.x % size.y, i / (size.x * size.y));
  const std::vector<Warp> warps = warps_of(m.threads);
  for (int z : in_order(int(grid.z)))
    for (int y : in_order(int(grid.y)))
      for (int x : in_order(int(grid.x))) run_block(dim3(x, y, z), warps);
}

template <class Kernel>
struct Launch {
  const char* name;
  Kernel kernel;
  dim3 grid, block;
  template <class... Args>
  void operator()(Args... args) const {
    run_grid(name, grid, block, [=, this] { kernel(args...); });
  }
};

template <class Kernel>
Launch<Kernel> launch(const char* name, Kernel kernel, dim3 grid, dim3 block) {
  return {name, kernel, grid, block};
}

}  // namespace mk::emulator

#include "emulator_shared.h"

// Called by the tests: see Machine::order.
extern "C" __attribute__((visibility("default"), used)) inline void mk_emulator_order(int order) {
  ::mk::emulator::machine().order = order;
}

// The sanitizer aborts, so that Python's faulthandler prints the test's name.
extern "C" __attribute__((visibility("default"), used)) inline const char* __ubsan_default_options() {
  return "abort_on_error=1:print_stacktrace=1";
}

#define threadIdx (::mk::emulator::current().thread)
#define blockIdx (::mk::emulator::machine().index)
#define blockDim (::mk::emulator::machine().size)
#define gridDim (::mk::emulator::machine().grid)

#define __syncthreads() ::mk::emulator::block_barrier(__LINE__)
inline void __syncwarp(unsigned mask = ~0u) { ::mk::emulator::sync_warp(mask); }
inline void __threadfence() {}

template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
  return ::mk::emulator::exchange(mask, value, source & 31);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return ::mk::emulator::exchange(mask, value, ::mk::emulator::lane() ^ lanes);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta) {
  return ::mk::emulator::exchange(mask, value, ::mk::emulator::lane() + int(delta));
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta) {
  return ::mk::emulator::exchange(mask, value, ::mk::emulator::lane() - int(delta));
}
inline unsigned __ballot_sync(unsigned mask, int vote) { return ::mk::emulator::ballot(mask, vote != 0); }
inline int __any_sync(unsigned mask, int vote) { return ::mk::emulator::ballot(mask, vote != 0) != 0; }
inline int __all_sync(unsigned mask, int vote) { return ::mk::emulator::ballot(mask, vote == 0) == 0; }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

// Fibers run one at a time, so every operation is atomic.
template <class T>
T atomicAdd(T* address, T value) {
  const T before = *address;
  *address = before + value;
  return before;
}
template <class T>
T atomicMax(T* address, T value) {
  const T before = *address;
  if (value > before) *address = value;
  return before;
}

template <class T>
T __ldg(const T* address) {
  return *address;
}

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

#define MK_LAUNCH(kernel, grid, block, stream) ::mk::emulator::launch(#kernel, kernel, grid, block)

namespace mk {

inline int launch_result() { return 0; }

}  // namespace mk
