// Shared memory of the emulator: NaN when a block begins, and every access is recorded. Two threads that access the
// same number, at least one writing, with no barrier between them are a data race, even if the order in which the
// fibers ran hides it. Included by emulator.h alone, which defines Fiber and Machine.
#pragma once

namespace mk::emulator {

// One access since the block's last barrier; `synced`: how many barriers its warp had passed in the block.
struct Access {
  int thread;
  long synced;
  bool write;
};

template <class T>
struct Cell {
  T value;
  long interval = -1;
  std::vector<Access> seen;
};

// A barrier of the warp orders its memory; a shuffle, which only exchanges values, does not.
inline bool in_order_with(const Access& earlier, int thread, long synced) {
  return earlier.thread == thread || (earlier.thread / kWarp == thread / kWarp && earlier.synced < synced);
}

template <class T>
void touch(Cell<T>& cell, const char* name, size_t at, bool write) {
  Machine& m = machine();
  const long synced = current().synced;
  if (cell.interval != m.interval) cell.interval = m.interval, cell.seen.clear();
  for (const Access& earlier : cell.seen)
    if ((write || earlier.write) && !in_order_with(earlier, m.current, synced))
      fault("race of threads " + std::to_string(earlier.thread) + " and " + std::to_string(m.current) + " at " + name +
            "[" + std::to_string(at) + "]: no barrier between them");
  const Access now{m.current, synced, write};
  const auto same = [&](const Access& a) { return a.thread == now.thread && a.synced == synced && a.write == write; };
  for (const Access& earlier : cell.seen)
    if (same(earlier)) return;
  cell.seen.push_back(now);
}

// What a kernel sees of a number in shared memory.
template <class T>
struct Reference {
  Cell<T>& cell;
  const char* name;
  size_t at;

  operator T() const {
    touch(cell, name, at, false);
    return cell.value;
  }
  Reference& operator=(T value) {
    touch(cell, name, at, true);
    cell.value = value;
    return *this;
  }
  Reference& operator=(const Reference& other) { return *this = T(other); }
  Reference& operator+=(T value) { return *this = T(*this) + value; }
};

// Static: blocks run one at a time.
template <class T, size_t kCount>
struct Shared {
  const char* name;
  long epoch = -1;
  Cell<T> cells[kCount + 1];  // the last one for accesses that lie outside

  explicit Shared(const char* name_) : name(name_) {}

  Shared& of_this_block() {
    if (epoch == machine().epoch) return *this;
    epoch = machine().epoch;
    for (Cell<T>& cell : cells) std::memset(static_cast<void*>(&cell.value), 0xff, sizeof cell.value);
    return *this;
  }

  Reference<T> operator[](size_t at) {
    if (at >= kCount) fault("access to " + std::string(name) + "[" + std::to_string(int64_t(at)) + "], beyond its end");
    return {cells[at < kCount ? at : kCount], name, at};
  }
};

}  // namespace mk::emulator

#define MK_SHARED(T, name, count)                                 \
  static ::mk::emulator::Shared<T, (count)> name##_of_block(#name); \
  auto& name = name##_of_block.of_this_block()
