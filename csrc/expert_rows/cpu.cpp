// Rows of a mixture-of-experts layer, one at a time; a row without a weight is copied.
#include <cstring>
#include <vector>

#include "../common/lanes.h"
#include "../common/rows.h"
#include "math.h"

namespace mk::cpu::MK_TIER {
namespace {

template <class T>
void copy_row(const T* row, T* out, int64_t width) {
  std::memcpy(static_cast<void*>(out), row, size_t(width) * sizeof(T));
}

template <class T>
void clear_row(T* out, int64_t width) {
  std::memset(static_cast<void*>(out), 0, size_t(width) * sizeof(T));
}

template <class T>
struct Term {
  const T* row;
  float weight;
};

template <class T>
void take_row(const TakeRows& a, int64_t row) {
  T* out = static_cast<T*>(a.out) + row * a.width;
  const int64_t choice = a.source[row];
  if (!exists(choice, a.choices)) return clear_row(out, a.width);
  const T* x = static_cast<const T*>(a.x) + choice / a.per * a.width;
  if (a.weights == nullptr) return copy_row(x, out, a.width);
  const float weight = weight_of<T>(a.weights, choice);
  for_lanes(a.width, [=](auto at) { put(out, at, get(x, at) * weight); });
}

// The rows of a token's choices and their weights.
template <class T>
void find_terms(const SumRows& a, int64_t token, std::vector<Term<T>>& terms) {
  terms.clear();
  for (int64_t choice = token * a.per; choice < (token + 1) * a.per; ++choice) {
    const int64_t row = a.place[choice];
    if (!exists(row, a.count)) continue;
    terms.push_back({static_cast<const T*>(a.rows) + row * a.width, weight_of<T>(a.weights, choice)});
  }
}

template <class T>
void add_terms(const std::vector<Term<T>>& terms, bool weighted, T* out, int64_t width) {
  if (terms.empty()) return clear_row(out, width);
  if (terms.size() == 1 && !weighted) return copy_row(terms[0].row, out, width);
  for_lanes(width, [&](auto at) {
    Floats sum = 0.0f;
    for (const Term<T>& term : terms) sum += get(term.row, at) * term.weight;
    put(out, at, sum);
  });
}

template <class T>
float product_of_rows(const T* one, const T* other, int64_t width) {
  Floats sum = 0.0f;  // lanes beyond the row are 0
  for_lanes(width, [&](auto at) { sum += get(one, at) * get(other, at); });
  return sum_of(sum);
}

}  // namespace

void take_rows(const TakeRows& a) {
  MK_FOR_DTYPE(a.dtype, T, {
    parallel_for(a.rows, rows_worth_a_thread(a.width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) take_row<T>(a, row);
    });
  })
}

void sum_rows(const SumRows& a) {
  MK_FOR_DTYPE(a.dtype, T, {
    T* out = static_cast<T*>(a.out);
    parallel_for(a.tokens, rows_worth_a_thread(a.width * a.per), [&](int64_t begin, int64_t end) {
      std::vector<Term<T>> terms;
      for (int64_t token = begin; token < end; ++token) {
        find_terms(a, token, terms);
        add_terms(terms, a.weights != nullptr, out + token * a.width, a.width);
      }
    });
  })
}

void row_products(const RowProducts& a) {
  MK_FOR_DTYPE(a.dtype, T, {
    const T *rows = static_cast<const T*>(a.rows), *dy = static_cast<const T*>(a.dy);
    T* out = static_cast<T*>(a.out);
    parallel_for(a.choices, rows_worth_a_thread(a.width), [&](int64_t begin, int64_t end) {
      for (int64_t choice = begin; choice < end; ++choice) {
        const int64_t row = a.place[choice];
        const T* of_token = dy + choice / a.per * a.width;
        out[choice] = store<T>(exists(row, a.count) ? product_of_rows(rows + row * a.width, of_token, a.width) : 0.0f);
      }
    });
  })
}

}  // namespace mk::cpu::MK_TIER
