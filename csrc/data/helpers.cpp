// Index builders of megatron.data: loops that numpy cannot say quickly. Each has an exactly equal numpy twin in
// megatron/data/index_builders.py, which the tests hold against it. No torch, no threads, no state.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <vector>

namespace py = pybind11;

namespace {

// Raised when a signature or a meaning changes, so that a stale build is never used with newer Python.
constexpr int kInterface = 1;

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

#if defined(__GNUC__)
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) ((void)0)
#endif

constexpr int64_t kAhead = 32;  // how far ahead of its use a random access is started

// ---- sample index -------------------------------------------------------------------------------------------
// Sample k is the tokens from bound k to bound k + 1 inclusive; a bound is (place in `documents`, token offset).

template <typename Doc, typename Out>
void sample_index(const int32_t* lengths, int64_t sequences, const Doc* documents, int64_t count, int64_t seq_length,
                  int64_t samples, Out* out) {
  out[0] = out[1] = 0;
  const char* table = reinterpret_cast<const char*>(lengths);  // a mapped file: its integers are not aligned
  int64_t sample = 1;
  int64_t begin = 0;          // number of the first token of this document in the whole epoch(s)
  int64_t next = seq_length;  // number of the token on which the next bound lies
  for (int64_t place = 0; place < count && sample <= samples; ++place) {
    if (place + kAhead < count) PREFETCH(table + documents[place + kAhead] * sizeof(int32_t));
    const int64_t document = documents[place];
    if (document < 0 || document >= sequences) throw std::out_of_range("document number outside the dataset");
    int32_t length;
    std::memcpy(&length, table + document * static_cast<int64_t>(sizeof(length)), sizeof(length));
    const int64_t end = begin + length;
    for (; next < end && sample <= samples; ++sample, next += seq_length) {
      out[2 * sample] = static_cast<Out>(place);
      out[2 * sample + 1] = static_cast<Out>(next - begin);
    }
    begin = end;
  }
  if (sample <= samples) throw std::out_of_range("the documents have fewer tokens than the samples need");
}

template <typename Doc, typename Out>
void sample_index_into(Array<int32_t> lengths, Array<Doc> documents, int64_t seq_length, Array<Out> out) {
  if (out.ndim() != 2 || out.shape(1) != 2 || out.shape(0) < 1) throw std::invalid_argument("out must be [samples + 1, 2]");
  if (seq_length < 1) throw std::invalid_argument("seq_length must be positive");
  const int32_t* lengths_data = lengths.data();
  const Doc* documents_data = documents.data();
  Out* out_data = out.mutable_data();
  const int64_t sequences = lengths.size(), count = documents.size(), samples = out.shape(0) - 1;
  py::gil_scoped_release release;
  sample_index(lengths_data, sequences, documents_data, count, seq_length, samples, out_data);
}

// ---- shuffle ------------------------------------------------------------------------------------------------
// numpy.random.RandomState.shuffle of a one-dimensional array, draw for draw: MT19937, then for i from the last
// index down to 1 the rejection-sampled j <= i. The draws do not depend on the data, so they run ahead of the swaps
// and the memory is there when it is needed.

struct MersenneTwister {
  static constexpr int kWords = 624, kShift = 397;
  uint32_t* key;
  int position;

  uint32_t next() {
    if (position >= kWords) refill();
    uint32_t y = key[position++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680U;
    y ^= (y << 15) & 0xefc60000U;
    return y ^ (y >> 18);
  }

  static uint32_t mix(uint32_t high, uint32_t low, uint32_t far) {
    const uint32_t y = (high & 0x80000000U) | (low & 0x7fffffffU);
    return far ^ (y >> 1) ^ ((y & 1U) ? 0x9908b0dfU : 0U);
  }

  void refill() {
    int i = 0;
    for (; i < kWords - kShift; ++i) key[i] = mix(key[i], key[i + 1], key[i + kShift]);
    for (; i < kWords - 1; ++i) key[i] = mix(key[i], key[i + 1], key[i + kShift - kWords]);
    key[kWords - 1] = mix(key[kWords - 1], key[0], key[kShift - 1]);
    position = 0;
  }

  uint32_t below_or_equal(uint32_t limit, uint32_t mask) {
    uint32_t value;
    do value = next() & mask;
    while (value > limit);
    return value;
  }
};

template <typename T>
void shuffle(T* data, int64_t count, MersenneTwister& random) {
  uint32_t ring[kAhead];
  uint32_t mask = 0xffffffffU;
  const int64_t last = count - 1;
  const auto draw = [&](int64_t i) {
    const uint32_t limit = static_cast<uint32_t>(i);
    while ((mask >> 1) >= limit) mask >>= 1;  // the smallest 2^k - 1 that is not below the limit
    const uint32_t j = random.below_or_equal(limit, mask);
    PREFETCH(data + j);
    ring[i % kAhead] = j;
  };
  int64_t drawn = last;
  for (int64_t i = last; i >= 1; --i) {
    for (; drawn >= 1 && drawn > i - kAhead; --drawn) draw(drawn);
    std::swap(data[i], data[ring[i % kAhead]]);
  }
}

template <typename T>
int shuffle_array(Array<T> values, Array<uint32_t> key, int position) {
  if (key.size() != MersenneTwister::kWords) throw std::invalid_argument("key must have 624 words");
  if (values.size() > (int64_t{1} << 32)) throw std::invalid_argument("more than 2^32 entries");
  T* data = values.mutable_data();
  MersenneTwister random{key.mutable_data(), position};
  const int64_t count = values.size();
  py::gil_scoped_release release;
  shuffle(data, count, random);
  return random.position;
}

// ---- blend --------------------------------------------------------------------------------------------------
// For sample i the dataset with the largest weight * max(i, 1) - taken, ties to the lowest number.
//
// With thousands of datasets the full scan is the cost. Over the next `block` samples at most `block` datasets lose
// ground, and all others only gain. So the dataset that ranks block + 1 now is a lower bound of every maximum in the
// block, and whoever cannot reach it by the end of the block need not be looked at. Rounding is monotone, so this
// is exact.

class Blend {
 public:
  Blend(const double* weights, int64_t datasets, const int64_t* limits)
      : weights_(weights), datasets_(datasets), limits_(limits), taken_(datasets, 0) {}

  void run(int64_t size, int16_t* dataset_index, int64_t* sample_index) {
    for (int64_t start = 0; start < size; start += kBlock) {
      const int64_t stop = std::min(size, start + kBlock);
      gather(start, stop - 1);
      for (int64_t i = start; i < stop; ++i) {
        const int64_t best = choose(i);
        dataset_index[i] = static_cast<int16_t>(best);
        sample_index[i] = taken_[best]++;
      }
    }
  }

 private:
  static constexpr int64_t kBlock = 64;

  double error(int64_t dataset, int64_t sample) const {
    const double scaled = weights_[dataset] * static_cast<double>(std::max<int64_t>(sample, 1));
    return scaled - static_cast<double>(taken_[dataset]);
  }

  bool open(int64_t dataset) const { return limits_ == nullptr || taken_[dataset] < limits_[dataset]; }

  void gather(int64_t first, int64_t last) {
    candidates_.clear();
    errors_.clear();
    for (int64_t d = 0; d < datasets_; ++d)
      if (open(d)) errors_.push_back(error(d, first));
    if (errors_.empty()) throw std::out_of_range("the datasets have fewer samples than the blend needs");
    const bool prune = static_cast<int64_t>(errors_.size()) > 2 * kBlock;
    double bound = 0;
    if (prune) {
      std::nth_element(errors_.begin(), errors_.begin() + kBlock, errors_.end(), std::greater<double>());
      bound = errors_[kBlock];
    }
    for (int64_t d = 0; d < datasets_; ++d)
      if (open(d) && (!prune || error(d, last) >= bound)) candidates_.push_back(d);
  }

  int64_t choose(int64_t sample) const {
    int64_t best = -1;
    double largest = 0;
    for (const int64_t d : candidates_) {
      if (!open(d)) continue;
      const double e = error(d, sample);
      if (best < 0 || e > largest) {
        best = d;
        largest = e;
      }
    }
    if (best < 0) throw std::out_of_range("the datasets have fewer samples than the blend needs");
    return best;
  }

  const double* weights_;
  const int64_t datasets_;
  const int64_t* limits_;
  std::vector<int64_t> taken_, candidates_;
  std::vector<double> errors_;
};

void blend(Array<double> weights, py::object limits, Array<int16_t> dataset_index, Array<int64_t> sample_index) {
  if (weights.size() < 1 || weights.size() > 32767) throw std::invalid_argument("1 to 32767 datasets");
  if (dataset_index.size() != sample_index.size()) throw std::invalid_argument("outputs differ in length");
  Array<int64_t> limit_array;
  if (!limits.is_none()) {
    limit_array = limits.cast<Array<int64_t>>();
    if (limit_array.size() != weights.size()) throw std::invalid_argument("one limit per weight");
  }
  Blend blender(weights.data(), weights.size(), limits.is_none() ? nullptr : limit_array.data());
  int16_t* dataset_data = dataset_index.mutable_data();
  int64_t* sample_data = sample_index.mutable_data();
  const int64_t size = dataset_index.size();
  py::gil_scoped_release release;
  blender.run(size, dataset_data, sample_data);
}

}  // namespace

PYBIND11_MODULE(_helpers, module) {
  module.doc() = "Index builders of megatron.data; use megatron.data.index_builders.";
  module.attr("interface") = kInterface;
  // noconvert: a silently made copy of an output would throw the result away
  const auto in = [](const char* name) { return py::arg(name).noconvert(); };
  module.def("sample_index", &sample_index_into<int32_t, int32_t>, in("lengths"), in("documents"), py::arg("seq_length"), in("out"));
  module.def("sample_index", &sample_index_into<int32_t, int64_t>, in("lengths"), in("documents"), py::arg("seq_length"), in("out"));
  module.def("sample_index", &sample_index_into<int64_t, int64_t>, in("lengths"), in("documents"), py::arg("seq_length"), in("out"));
  module.def("shuffle", &shuffle_array<int32_t>, in("values"), in("key"), py::arg("position"));
  module.def("shuffle", &shuffle_array<uint32_t>, in("values"), in("key"), py::arg("position"));
  module.def("shuffle", &shuffle_array<int64_t>, in("values"), in("key"), py::arg("position"));
  module.def("blend", &blend, in("weights"), py::arg("limits").none(true), in("dataset_index"), in("sample_index"));
}
