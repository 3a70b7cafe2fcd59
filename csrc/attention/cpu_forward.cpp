// The forward pass, an online softmax: what was summed is rescaled whenever a further block of keys has a larger score.
#include "blocks.h"

namespace mk::cpu::MK_TIER {
namespace {

template <class Math, class T>
class Forward {
 public:
  using Unit = typename Math::Unit;
  static constexpr int64_t kUnits = units<Math>(kBlock);

  explicit Forward(const AttentionForward& a)
      : a_(a),
        shape_(a.shape),
        depth_(units<Math>(shape_.width)),
        columns_(filled_up(shape_.width, kRegister)),
        keys_(filled_up(shape_.keys, kBlock) * depth_),
        values_(units<Math>(filled_up(shape_.keys, kBlock)) * columns_),
        query_(kBlock * depth_),
        rows_laid_(kBlock * filled_up(depth_, kRegister)),
        weights_(kBlock * kUnits),
        scores_(kBlock * kBlock),
        out_(kBlock * columns_) {}

  void run(int64_t batch, int64_t group) {
    for (int64_t first = 0; first < shape_.keys; first += kBlock) {
      const int64_t count = std::min(kBlock, shape_.keys - first);
      const T* key = a_.key.at<T>(batch, first, group);
      const T* value = a_.value.at<T>(batch, first, group);
      lay_columns<Math>(key, a_.key.row_stride, count, shape_.width, rows_laid_, keys_ + first * depth_);
      lay_right<Math>(value, a_.value.row_stride, count, shape_.width, values_of(first), columns_);
    }
    const int64_t of_group = shape_.heads / shape_.groups;
    for (int64_t head = group * of_group; head < (group + 1) * of_group; ++head)
      for (int64_t first = 0; first < shape_.queries; first += kBlock) run_block(batch, head, first);
  }

 private:
  Unit* values_of(int64_t first) { return values_ + units<Math>(first) * columns_; }

  void run_block(int64_t batch, int64_t head, int64_t first) {
    const int64_t rows = std::min(kBlock, shape_.queries - first);
    lay_left<Math>(a_.query.at<T>(batch, first, head), a_.query.row_stride, rows, shape_.width, query_,
                   filled_up(rows, kRowsAtOnce), depth_);
    std::fill(out_ + 0, out_ + kBlock * columns_, 0.0f);
    std::fill(peak_, peak_ + kBlock, -INFINITY);
    std::fill(sum_, sum_ + kBlock, Floats(0.0f));
    const int64_t seen = keys_seen_up_to(shape_, first + rows - 1);
    for (int64_t key = first_key_block(shape_, batch, first, rows); key < seen; key += kBlock) {
      const Pair pair{first, rows, key, std::min(kBlock, shape_.keys - key), shape_.diagonal};
      if (any_visible(shape_, pair, batch, head)) run_pair(pair, batch, head);
    }
    float* log_sum_exp = a_.log_sum_exp + (batch * shape_.heads + head) * shape_.queries + first;
    for (int64_t row = 0; row < rows; ++row) {
      const float sum = sum_of(sum_[row]), factor = sum > 0.0f ? 1.0f / sum : NAN;
      log_sum_exp[row] = peak_[row] + std::log2(sum);
      write_row(out_ + row * columns_, factor, a_.out.at<T>(batch, first + row, head), shape_.width);
    }
  }

  void run_pair(const Pair& pair, int64_t batch, int64_t head) {
    const Right<Unit> keys{keys_ + pair.first_key * depth_, kBlock}, values{values_of(pair.first_key), columns_};
    for (int64_t row = 0; row < pair.queries; row += kRowsAtOnce) {
      const int64_t end = std::min(row + kRowsAtOnce, pair.queries), seen = pair.seen_by(end - 1);
      const Result scores{scores_ + row * kBlock, kBlock, false}, out{out_ + row * columns_, columns_, true};
      product_rows<Math>({query_ + row * depth_, depth_, 1}, keys, depth_, scores, divided_up(seen, kRegister));
      for (int64_t i = row; i < end; ++i) weigh(pair, batch, head, i);
      product_rows<Math>({row_of_weights(row), kUnits, 1}, values, units<Math>(seen), out, columns_ / kRegister);
    }
  }

  // Turns the scores of a row into weights of the values; what was summed before is rescaled to the largest score so
  // far.
  void weigh(const Pair& pair, int64_t batch, int64_t head, int64_t row) {
    const Visible sees = visible(shape_, pair, batch, head, row);
    float* scores = scores_ + row * kBlock;
    Floats x[kParts], most = peak_[row];
    for (int64_t i = 0; i < kParts; ++i) {
      x[i] = sees.or_else(i, load_lanes(scores + i * kLanes) * (shape_.scale * kLog2E), -INFINITY);
      most = larger(x[i], most);  // NaN reaches the result through the sum
    }
    const float peak = largest_of(most), shift = peak == -INFINITY ? 0.0f : peak;
    if (peak != peak_[row] && peak_[row] != -INFINITY) scale_back(row, std::exp2(peak_[row] - shift));
    peak_[row] = peak;
    for (int64_t i = 0; i < kParts; ++i) {
      x[i] = exp2_of<T>(x[i] - shift);
      sum_[row] += x[i];
    }
    if (shape_.dropout.probability > 0.0f) {
      const Keep keep(shape_.dropout, batch * shape_.heads + head, pair.first_query + row);
      for (int64_t i = 0; i < kParts; ++i) x[i] = x[i] * keep(pair.first_key + i * kLanes);
    }
    Math::write(x, row_of_weights(row));
  }

  void scale_back(int64_t row, float factor) {
    sum_[row] = sum_[row] * factor;
    float* out = out_ + row * columns_;
#pragma omp simd
    for (int64_t i = 0; i < columns_; ++i) out[i] *= factor;
  }

  Unit* row_of_weights(int64_t row) { return weights_ + row * kUnits; }

  const AttentionForward& a_;
  const AttentionShape& shape_;
  const int64_t depth_, columns_;
  Buffer<Unit> keys_, values_, query_, rows_laid_, weights_;
  Buffer<float> scores_, out_;
  float peak_[kBlock];
  Floats sum_[kBlock];  // of each lane
};

}  // namespace

void attention_forward(const AttentionForward& a) {
  MK_FOR_MATH(a.shape.dtype, Math, T, { run_groups<Forward<Math, T>>(a); })
}

}  // namespace mk::cpu::MK_TIER
