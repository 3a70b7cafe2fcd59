// Index builders of megatron.data: loops that are slow in numpy. Each has an equal in numpy, in
// megatron/data/index_builders.py or indexed/index_file.py, and tests compare their results. No torch, no state.
// A thread never reads what another one writes, so the number of threads changes no result.
//
// The interface is plain C, called by megatron/data/helpers.py, which checks types and sizes: one library for every
// Python. Functions return 0 or a negative Failure.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// Raised when a signature or a meaning changes, so that a stale build is never used with newer Python.
constexpr int kInterface = 3;

enum Failure : int64_t { kTooFew = -2, kOutside = -3, kOutOfMemory = -4 };

// The result of work(), or the failure that it threw: no exception leaves a C function.
template <typename Work>
int64_t guarded(const Work& work) {
  try {
    return work();
  } catch (const std::length_error&) {
    return kTooFew;
  } catch (const std::domain_error&) {
    return kOutside;
  } catch (const std::exception&) {
    return kOutOfMemory;
  }
}

#if defined(__GNUC__)
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) ((void)0)
#endif

constexpr int64_t kAhead = 32;  // how far ahead of its use a random access is started

// A number of a mapped file: not aligned there.
template <typename T>
T load(const void* table, int64_t place) {
  T value;
  std::memcpy(&value, static_cast<const char*>(table) + place * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

// work(part, start, stop) for `threads` consecutive ranges of [0, count). It must not throw.
template <typename Work>
void in_parts(int64_t count, int threads, const Work& work) {
  const auto part = [&](int number) { work(number, count * number / threads, count * (number + 1) / threads); };
  std::vector<std::thread> others;
  int started = 1;
  try {
    for (; started < threads; ++started) others.emplace_back(part, started);
  } catch (const std::system_error&) {  // no more threads are allowed here: the rest is done in this one
  }
  part(0);
  for (int number = started; number < threads; ++number) part(number);
  for (std::thread& other : others) other.join();
}

// ---- checks of an .idx file -----------------------------------------------------------------------------------

// The bytes that the sequences take, or -1: a length is negative or an offset is not the sum of the lengths before.
int64_t sequence_bytes(const void* length_data, const void* offset_data, int64_t count, int64_t itemsize, int threads) {
  if (count == 0) return 0;
  const int64_t last = count - 1;
  std::vector<char> bad(threads, 0);
  if (load<int64_t>(offset_data, 0) != 0) return -1;
  in_parts(last, threads, [&](int part, int64_t start, int64_t stop) {
    uint64_t wrong = 0;  // unsigned: then the sum of any content of the file is defined
    for (int64_t i = start; i < stop; ++i) {
      const int32_t length = load<int32_t>(length_data, i);
      const uint64_t end = load<uint64_t>(offset_data, i) + static_cast<uint64_t>(length * itemsize);
      wrong |= (end ^ load<uint64_t>(offset_data, i + 1)) | (length < 0);
    }
    bad[part] = wrong != 0;
  });
  const int32_t length = load<int32_t>(length_data, last);
  if (length < 0 || std::count(bad.begin(), bad.end(), 0) != threads) return -1;
  return load<int64_t>(offset_data, last) + length * itemsize;  // both are sums of lengths, so not negative
}

bool never_falls(const void* data, int64_t count, int threads) {
  const int64_t steps = std::max<int64_t>(count - 1, 0);
  std::vector<char> bad(threads, 0);
  in_parts(steps, threads, [&](int part, int64_t start, int64_t stop) {
    bool falls = false;
    for (int64_t i = start; i < stop; ++i) falls |= load<int64_t>(data, i + 1) < load<int64_t>(data, i);
    bad[part] = falls;
  });
  return std::count(bad.begin(), bad.end(), 0) == threads;
}

// ---- sample index -------------------------------------------------------------------------------------------
// Sample k is the tokens from bound k to bound k + 1 inclusive; a bound is (place in `documents`, token offset).
// The lengths lie scattered in memory, so the threads fetch them, round by round; one thread walks along them then.

template <typename Doc>
void fetch_lengths(const int32_t* lengths, int64_t sequences, const Doc* documents, int64_t count, int32_t* fetched,
                   int threads) {
  std::vector<char> bad(threads, 0);
  in_parts(count, threads, [&](int part, int64_t start, int64_t stop) {
    const char* table = reinterpret_cast<const char*>(lengths);
    for (int64_t i = start; i < stop; ++i) {
      if (i + kAhead < stop) PREFETCH(table + static_cast<int64_t>(documents[i + kAhead]) * int64_t{sizeof(int32_t)});
      const int64_t document = documents[i];
      if (document < 0 || document >= sequences) {
        bad[part] = 1;
        return;
      }
      fetched[i] = load<int32_t>(table, document);
    }
  });
  if (std::count(bad.begin(), bad.end(), 0) != threads) throw std::domain_error("document number outside the dataset");
}

template <typename Doc, typename Out>
void sample_index(const int32_t* lengths, int64_t sequences, const Doc* documents, int64_t count, int64_t seq_length,
                  int64_t samples, Out* out, int threads) {
  constexpr int64_t kRound = 1 << 20;
  std::vector<int32_t> fetched(std::min(count, kRound));
  out[0] = out[1] = 0;
  int64_t sample = 1;
  int64_t begin = 0;          // number of the first token of this document in the whole epoch(s)
  int64_t next = seq_length;  // number of the token on which the next bound lies
  for (int64_t start = 0; start < count && sample <= samples; start += kRound) {
    const int64_t size = std::min(count - start, kRound);
    fetch_lengths(lengths, sequences, documents + start, size, fetched.data(), threads);
    for (int64_t i = 0; i < size && sample <= samples; ++i) {
      const int64_t end = begin + fetched[i];
      for (; next < end && sample <= samples; ++sample, next += seq_length) {
        out[2 * sample] = static_cast<Out>(start + i);
        out[2 * sample + 1] = static_cast<Out>(next - begin);
      }
      begin = end;
    }
  }
  if (sample <= samples) throw std::length_error("the documents have fewer tokens than the samples need");
}

// ---- shuffle ------------------------------------------------------------------------------------------------
// numpy.random.RandomState.shuffle of a one-dimensional array, draw for draw: MT19937, then for i from the last
// index down to 1 the rejection-sampled j <= i. The draws do not depend on the data, so they run ahead of the swaps
// and the memory is there when it is needed. A rejected draw costs no branch: it is written, and written over.

class MersenneTwister {
 public:
  static constexpr int kWords = 624;

  MersenneTwister(uint32_t* key, int position) : key_(key), position_(position) { temper(); }
  int position() const { return position_; }

  // The next `count` of the draws that are accepted: the first at most `limit`, the second at most limit - 1, ...
  void below_or_equal(uint32_t limit, uint32_t mask, int count, uint32_t* out) {
    for (int got = 0; got < count;) {
      if (position_ >= kWords) refill();
      const int stop = std::min(kWords, position_ + count - got);
      for (; position_ < stop; ++position_) {
        const uint32_t value = words_[position_] & mask;
        out[got] = value;
        got += value <= limit - static_cast<uint32_t>(got);
      }
    }
  }

 private:
  static constexpr int kShift = 397;
  static uint32_t mix(uint32_t high, uint32_t low, uint32_t far) {
    const uint32_t y = (high & 0x80000000U) | (low & 0x7fffffffU);
    return far ^ (y >> 1) ^ ((0U - (y & 1U)) & 0x9908b0dfU);
  }

  void refill() {
    int i = 0;
    for (; i < kWords - kShift; ++i) key_[i] = mix(key_[i], key_[i + 1], key_[i + kShift]);
    for (; i < kWords - 1; ++i) key_[i] = mix(key_[i], key_[i + 1], key_[i + kShift - kWords]);
    key_[kWords - 1] = mix(key_[kWords - 1], key_[0], key_[kShift - 1]);
    position_ = 0;
    temper();
  }

  void temper() {
    for (int i = 0; i < kWords; ++i) {
      uint32_t y = key_[i];
      y ^= y >> 11;
      y ^= (y << 7) & 0x9d2c5680U;
      y ^= (y << 15) & 0xefc60000U;
      words_[i] = y ^ (y >> 18);
    }
  }

  uint32_t* key_;
  int position_;
  uint32_t words_[kWords];
};

template <typename T>
class Shuffle {
 public:
  Shuffle(T* data, int64_t count, MersenneTwister& random) : data_(data), next_(count - 1), random_(random) {}

  void run() {
    int64_t i = next_;
    draw(drawn_[0]);
    for (int now = 0; i >= 1; now ^= 1) {
      draw(drawn_[now ^ 1]);
      const Chunk& chunk = drawn_[now];
      for (int k = 0; k < chunk.size; ++k, --i) std::swap(data_[i], data_[chunk.places[k]]);
    }
  }

 private:
  static constexpr int64_t kChunk = 64;
  struct Chunk {
    int size;
    uint32_t places[kChunk];
  };

  // Places for the indices from next_ down, all of which are drawn under the same mask.
  void draw(Chunk& chunk) {
    chunk.size = 0;
    if (next_ < 1) return;
    while ((mask_ >> 1) >= static_cast<uint32_t>(next_)) mask_ >>= 1;  // the smallest 2^k - 1 that is not below next_
    chunk.size = static_cast<int>(std::min(kChunk, next_ - static_cast<int64_t>(mask_ >> 1)));
    random_.below_or_equal(static_cast<uint32_t>(next_), mask_, chunk.size, chunk.places);
    for (int k = 0; k < chunk.size; ++k) PREFETCH(data_ + chunk.places[k]);
    next_ -= chunk.size;
  }

  T* data_;
  int64_t next_;  // the largest index that has no place yet
  MersenneTwister& random_;
  uint32_t mask_ = 0xffffffffU;
  Chunk drawn_[2];
};

template <typename T>
int shuffle(void* values, int64_t count, uint32_t* key, int position) {
  MersenneTwister random(key, position);
  Shuffle<T>(static_cast<T*>(values), count, random).run();
  return random.position();
}

// ---- blend --------------------------------------------------------------------------------------------------
// For sample i the dataset with the largest weight * max(i, 1) - taken, ties to the lowest number.
//
// With thousands of datasets, a full scan per sample would be slow. Over the next n samples, the value of at most n
// datasets falls, and all others rise. So the value of the dataset that is n + 1st now is a lower bound of the maximum
// at each of these samples. A dataset that cannot reach this bound by the last sample is not examined. Rounding is
// monotone, so this is exact. Blocks are nested: a small block examines only the datasets that its large block kept.

class Blend {
 public:
  Blend(const double* weights, int64_t datasets, const int64_t* limits)
      : weights_(weights), limits_(limits), taken_(datasets, 0.0) {
    for (int64_t d = 0; d < datasets; ++d) close_if_used_up(d);
  }

  void run(int64_t size, int16_t* dataset_index, int64_t* sample_index) {
    dataset_index_ = dataset_index;
    sample_index_ = sample_index;
    std::vector<int64_t> all(taken_.size());
    std::iota(all.begin(), all.end(), 0);
    choose_from(all, 0, size, kLargest, 0);
  }

 private:
  static constexpr int64_t kLargest = 4096, kSmallest = 64, kTimes = 8;  // samples of a block, and of how many smaller
  static constexpr int kLevels = 3;                                      // 4096, 512, 64
  static constexpr double kNever = -std::numeric_limits<double>::infinity();
  double error(int64_t dataset, int64_t sample) const {
    return weights_[dataset] * static_cast<double>(std::max<int64_t>(sample, 1)) - taken_[dataset];
  }

  void close_if_used_up(int64_t dataset) {
    if (limits_ != nullptr && taken_[dataset] >= static_cast<double>(limits_[dataset])) taken_[dataset] = -kNever;
  }

  // Samples start .. stop in blocks of this many, from these datasets (in ascending order).
  void choose_from(const std::vector<int64_t>& among, int64_t start, int64_t stop, int64_t block, int level) {
    for (int64_t first = start; first < stop; first += block) {
      const int64_t end = std::min(stop, first + block);
      keep_those_in_reach(among, first, end, kept_[level]);
      if (block > kSmallest) {
        choose_from(kept_[level], first, end, block / kTimes, level + 1);
      } else {
        for (int64_t sample = first; sample < end; ++sample) choose(kept_[level], sample);
      }
    }
  }

  void keep_those_in_reach(const std::vector<int64_t>& among, int64_t first, int64_t end, std::vector<int64_t>& kept) {
    const int64_t size = end - first;
    if (static_cast<int64_t>(among.size()) <= 2 * size) {
      kept = among;
      return;
    }
    errors_.clear();
    for (const int64_t d : among) errors_.push_back(error(d, first));
    std::nth_element(errors_.begin(), errors_.begin() + size, errors_.end(), std::greater<double>());
    kept.clear();
    for (const int64_t d : among)
      if (error(d, end - 1) >= errors_[size]) kept.push_back(d);
  }

  void choose(const std::vector<int64_t>& among, int64_t sample) {
    int64_t best = -1;
    double largest = kNever;
    for (const int64_t d : among) {
      const double e = error(d, sample);
      if (e > largest) {
        best = d;
        largest = e;
      }
    }
    if (best < 0) throw std::length_error("the datasets have fewer samples than the blend needs");
    dataset_index_[sample] = static_cast<int16_t>(best);
    sample_index_[sample] = static_cast<int64_t>(taken_[best]);
    taken_[best] += 1;
    close_if_used_up(best);
  }

  const double* weights_;
  const int64_t* limits_;
  std::vector<double> taken_;  // infinity once a dataset is used up; exact, for no array has 2^53 entries
  std::vector<double> errors_;
  std::vector<int64_t> kept_[kLevels];
  int16_t* dataset_index_ = nullptr;
  int64_t* sample_index_ = nullptr;
};

// ---- the interface ------------------------------------------------------------------------------------------------

template <typename Doc, typename Out>
int64_t sample_index_of(const int32_t* lengths, int64_t sequences, const void* documents, int64_t count,
                        int64_t seq_length, int64_t samples, void* out, int threads) {
  return guarded([&] {
    sample_index(lengths, sequences, static_cast<const Doc*>(documents), count, seq_length, samples,
                 static_cast<Out*>(out), threads);
    return 0;
  });
}

}  // namespace

EXPORT int mk_data_interface() { return kInterface; }

EXPORT int64_t mk_sequence_bytes(const void* lengths, const void* offsets, int64_t count, int64_t itemsize,
                                 int threads) {
  return guarded([&] { return sequence_bytes(lengths, offsets, count, itemsize, threads); });
}

EXPORT int64_t mk_never_falls(const void* values, int64_t count, int threads) {
  return guarded([&] { return int64_t{never_falls(values, count, threads)}; });
}

// `documents` and `out` have entries of 4 or 8 bytes, as the sizes say.
EXPORT int64_t mk_sample_index(const int32_t* lengths, int64_t sequences, const void* documents, int document_size,
                               int64_t count, int64_t seq_length, int64_t samples, void* out, int out_size,
                               int threads) {
  using Build = int64_t (*)(const int32_t*, int64_t, const void*, int64_t, int64_t, int64_t, void*, int);
  const Build build = document_size == 4 ? (out_size == 4 ? Build{sample_index_of<int32_t, int32_t>}
                                                          : Build{sample_index_of<int32_t, int64_t>})
                                         : (out_size == 4 ? Build{sample_index_of<int64_t, int32_t>}
                                                          : Build{sample_index_of<int64_t, int64_t>});
  return build(lengths, sequences, documents, count, seq_length, samples, out, threads);
}

// Returns the new position in the key.
EXPORT int64_t mk_shuffle(void* values, int size, int64_t count, uint32_t* key, int position) {
  return size == 4 ? shuffle<uint32_t>(values, count, key, position) : shuffle<uint64_t>(values, count, key, position);
}

// `limits` may be null.
EXPORT int64_t mk_blend(const double* weights, int64_t datasets, const int64_t* limits, int16_t* dataset_index,
                        int64_t* sample_index, int64_t size) {
  return guarded([&] {
    Blend(weights, datasets, limits).run(size, dataset_index, sample_index);
    return 0;
  });
}
