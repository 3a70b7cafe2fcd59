// The backward pass: the probabilities are computed again from each row's log-sum-exp, which the forward pass kept.
#include "blocks.h"

namespace mk::cpu::MK_TIER {
namespace {

template <class Math, class T>
class Backward {
 public:
  using Unit = typename Math::Unit;
  static constexpr bool kPairs = Math::kDepth > 1;
  static constexpr int64_t kUnits = units<Math>(kBlock);

  explicit Backward(const AttentionBackward& a)
      : a_(a),
        shape_(a.shape),
        depth_(units<Math>(shape_.width)),
        columns_(filled_up(shape_.width, kRegister)),
        key_columns_(filled_up(shape_.keys, kBlock) * depth_),
        value_columns_(filled_up(shape_.keys, kBlock) * depth_),
        keys_(units<Math>(filled_up(shape_.keys, kBlock)) * columns_),
        query_left_(kBlock * depth_),
        grad_left_(kBlock * depth_),
        query_right_(kUnits * columns_),
        grad_right_(kUnits * columns_),
        rows_laid_(kBlock * filled_up(depth_, kRegister)),
        weights_(kUnits * kBlock),
        slopes_(kUnits * kBlock),
        slopes_left_(kPairs ? kBlock * kUnits : 0),
        scores_(kBlock * kBlock),
        grad_scores_(kBlock * kBlock),
        grad_query_(kBlock * columns_),
        grad_keys_(filled_up(shape_.keys, kBlock) * columns_),
        grad_values_(filled_up(shape_.keys, kBlock) * columns_) {}

  void run(int64_t batch, int64_t group) {
    const int64_t whole = filled_up(shape_.keys, kBlock) * columns_;
    std::fill(grad_keys_ + 0, grad_keys_ + whole, 0.0f);
    std::fill(grad_values_ + 0, grad_values_ + whole, 0.0f);
    for (int64_t first = 0; first < shape_.keys; first += kBlock) lay_keys(batch, group, first);
    const int64_t of_group = shape_.heads / shape_.groups;
    for (int64_t head = group * of_group; head < (group + 1) * of_group; ++head)
      for (int64_t first = 0; first < shape_.queries; first += kBlock) run_block(batch, head, first);
    for (int64_t key = 0; key < shape_.keys; ++key) {
      write_row(grad_keys_ + key * columns_, 1.0f, a_.grad_key.at<T>(batch, key, group), shape_.width);
      write_row(grad_values_ + key * columns_, 1.0f, a_.grad_value.at<T>(batch, key, group), shape_.width);
    }
  }

 private:
  void lay_keys(int64_t batch, int64_t group, int64_t first) {
    const int64_t count = std::min(kBlock, shape_.keys - first), width = shape_.width;
    const T* key = a_.key.at<T>(batch, first, group);
    const T* value = a_.value.at<T>(batch, first, group);
    lay_columns<Math>(key, a_.key.row_stride, count, width, rows_laid_, key_columns_ + first * depth_);
    lay_columns<Math>(value, a_.value.row_stride, count, width, rows_laid_, value_columns_ + first * depth_);
    lay_right<Math>(key, a_.key.row_stride, count, width, keys_ + units<Math>(first) * columns_, columns_);
  }

  void run_block(int64_t batch, int64_t head, int64_t first) {
    const int64_t rows = std::min(kBlock, shape_.queries - first), width = shape_.width;
    const T* query = a_.query.at<T>(batch, first, head);
    const T* grad = a_.grad.at<T>(batch, first, head);
    const int64_t all_rows = filled_up(rows, kRowsAtOnce);
    lay_left<Math>(query, a_.query.row_stride, rows, width, query_left_, all_rows, depth_);
    lay_left<Math>(grad, a_.grad.row_stride, rows, width, grad_left_, all_rows, depth_);
    lay_right<Math>(query, a_.query.row_stride, rows, width, query_right_, columns_);
    lay_right<Math>(grad, a_.grad.row_stride, rows, width, grad_right_, columns_);
    for (int64_t row = 0; row < rows; ++row)
      mean_[row] = dot(a_.out.at<T>(batch, first + row, head), grad + row * a_.grad.row_stride);
    std::fill(grad_query_ + 0, grad_query_ + kBlock * columns_, 0.0f);
    const int64_t seen = keys_seen_up_to(shape_, first + rows - 1);
    for (int64_t key = first_key_block(shape_, batch, first, rows); key < seen; key += kBlock) {
      const Pair pair{first, rows, key, std::min(kBlock, shape_.keys - key), shape_.diagonal};
      if (any_visible(shape_, pair, batch, head)) run_pair(pair, batch, head);
    }
    for (int64_t row = 0; row < rows; ++row)
      write_row(grad_query_ + row * columns_, 1.0f, a_.grad_query.at<T>(batch, first + row, head), width);
  }

  float dot(const T* x, const T* y) const {
    Floats sum(0.0f);
    for_lanes(shape_.width, [&](auto place) { sum += get(x, place) * get(y, place); });
    return sum_of(sum);
  }

  void run_pair(const Pair& pair, int64_t batch, int64_t head) {
    const Right<Unit> keys{key_columns_ + pair.first_key * depth_, kBlock};
    const Right<Unit> values{value_columns_ + pair.first_key * depth_, kBlock};
    const Right<Unit> key_rows{keys_ + units<Math>(pair.first_key) * columns_, columns_};
    for (int64_t row = 0; row < pair.queries; row += kRowsAtOnce) {
      const int64_t end = std::min(row + kRowsAtOnce, pair.queries), seen = pair.seen_by(end - 1);
      const int64_t at = row * kBlock, registers = divided_up(seen, kRegister);
      product_rows<Math>({query_left_ + row * depth_, depth_, 1}, keys, depth_, {scores_ + at, kBlock, false}, registers);
      product_rows<Math>({grad_left_ + row * depth_, depth_, 1}, values, depth_, {grad_scores_ + at, kBlock, false},
                         registers);
      for (int64_t i = row; i < row + kRowsAtOnce; i += Math::kDepth) differentiate(pair, batch, head, i);
      const Unit* slopes = (kPairs ? slopes_left_ : slopes_) + row * kUnits;
      product_rows<Math>({slopes, kUnits, 1}, key_rows, units<Math>(seen),
                         {grad_query_ + row * columns_, columns_, true}, columns_ / kRegister);
    }
    for (int64_t key = 0; key < pair.keys; key += kRowsAtOnce) add_to_keys(pair, key);
  }

  // Transposed left factors: their rows are keys, their depth runs over queries.
  void add_to_keys(const Pair& pair, int64_t key) {
    const int64_t start = pair.first_to_see(key) / Math::kDepth, depth = units<Math>(pair.queries) - start;
    const int64_t from = start * kBlock + key, to = (pair.first_key + key) * columns_;
    const int64_t registers = columns_ / kRegister;
    product_rows<Math>({weights_ + from, 1, kBlock}, {grad_right_ + start * columns_, columns_}, depth,
                       {grad_values_ + to, columns_, true}, registers);
    product_rows<Math>({slopes_ + from, 1, kBlock}, {query_right_ + start * columns_, columns_}, depth,
                       {grad_keys_ + to, columns_, true}, registers);
  }

  // As many rows as a unit is deep: scores become weights of the values, gradients of weights those of scores.
  void differentiate(const Pair& pair, int64_t batch, int64_t head, int64_t first) {
    Floats weights[Math::kDepth][kParts], slopes[Math::kDepth][kParts];
#pragma GCC unroll 2
    for (int64_t i = 0; i < Math::kDepth; ++i)
      differentiate_row(pair, batch, head, first + i, weights[i], slopes[i]);
    const int64_t at = first / Math::kDepth * kBlock;
    Math::write_across(weights, weights_ + at);
    Math::write_across(slopes, slopes_ + at);
    for (int64_t i = 0; i < Math::kDepth && kPairs; ++i)
      Math::write(slopes[i], slopes_left_ + (first + i) * kUnits);
  }

  void differentiate_row(const Pair& pair, int64_t batch, int64_t head, int64_t row, Floats (&weights)[kParts],
                         Floats (&slopes)[kParts]) {
    if (row >= pair.queries) {  // padding behind the last query: products take kRowsAtOnce rows
      std::fill(weights, weights + kParts, Floats(0.0f)), std::fill(slopes, slopes + kParts, Floats(0.0f));
      return;
    }
    const int64_t query = pair.first_query + row, line = batch * shape_.heads + head;
    const Visible sees = visible(shape_, pair, batch, head, row);
    const float log_sum = a_.log_sum_exp[line * shape_.queries + query], mean = mean_[row], scale = shape_.scale;
    const Keep keep(shape_.dropout, line, query);
    const bool dropout = shape_.dropout.probability > 0.0f;
    for (int64_t i = 0; i < kParts; ++i) {
      const int64_t at = row * kBlock + i * kLanes;
      const Floats score = load_lanes(scores_ + at) * (scale * kLog2E);
      const Floats weight = sees.or_else(i, exp2_of<T>(score - log_sum), 0.0f);
      const Floats kept = dropout ? keep(pair.first_key + i * kLanes) : Floats(1.0f);
      const Floats grad = load_lanes(grad_scores_ + at) * kept - mean;
      slopes[i] = sees.or_else(i, weight * grad * scale, 0.0f);
      weights[i] = weight * kept;
    }
  }

  const AttentionBackward& a_;
  const AttentionShape& shape_;
  const int64_t depth_, columns_;
  Buffer<Unit> key_columns_, value_columns_, keys_, query_left_, grad_left_, query_right_, grad_right_;
  Buffer<Unit> rows_laid_, weights_, slopes_, slopes_left_;
  Buffer<float> scores_, grad_scores_, grad_query_, grad_keys_, grad_values_;
  float mean_[kBlock];
};

}  // namespace

void attention_backward(const AttentionBackward& a) {
  MK_FOR_MATH(a.shape.dtype, Math, T, { run_groups<Backward<Math, T>>(a); })
}

}  // namespace mk::cpu::MK_TIER
