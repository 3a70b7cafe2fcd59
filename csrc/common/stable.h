// Our side of torch's stable ABI: the C functions of libtorch_cpu.so that csrc/ calls, and the C++ around them. torch
// 2.10 has them all and every later torch keeps them, so one shared object loads in each.
//
// A value crosses as a word of 64 bits: a number, the bits of a double, or a pointer. Whoever receives a word owns what
// it points to. An optional is 0, or points to a word from `new`, which the receiver deletes.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

struct TorchTensor;
struct TorchList;
struct TorchLibrary;
struct TorchDeviceGuard;

extern "C" {
// Each returns 0, or 1 after it has printed what went wrong.
int32_t aoti_torch_new_tensor_handle(TorchTensor* shared, TorchTensor** owned);
int32_t aoti_torch_delete_tensor_object(TorchTensor* owned);
int32_t aoti_torch_get_dim(TorchTensor*, int64_t*);
int32_t aoti_torch_get_numel(TorchTensor*, int64_t*);
int32_t aoti_torch_get_sizes(TorchTensor*, int64_t** borrowed);
int32_t aoti_torch_get_size(TorchTensor*, int64_t dimension, int64_t*);
int32_t aoti_torch_get_stride(TorchTensor*, int64_t dimension, int64_t*);
int32_t aoti_torch_get_dtype(TorchTensor*, int32_t*);
int32_t aoti_torch_get_device_index(TorchTensor*, int32_t*);
int32_t aoti_torch_is_contiguous(TorchTensor*, bool*);
int32_t torch_get_const_data_ptr(TorchTensor*, const void** borrowed);
int32_t torch_get_mutable_data_ptr(TorchTensor*, void** borrowed);

int32_t torch_new_list_reserve_size(size_t, TorchList** owned);
int32_t torch_list_push_back(TorchList*, uint64_t word);
int32_t torch_call_dispatcher(const char* name, const char* overload, uint64_t* words, uint64_t version);

int32_t aoti_torch_create_device_guard(int32_t index, TorchDeviceGuard** owned);
int32_t aoti_torch_delete_device_guard(TorchDeviceGuard* owned);

int32_t aoti_torch_library_init_fragment(const char* space, const char* file, uint32_t line, TorchLibrary** owned);
int32_t aoti_torch_library_init_impl(const char* space, const char* key, const char* file, uint32_t line,
                                     TorchLibrary** owned);
int32_t aoti_torch_library_def(TorchLibrary*, const char* schema);
int32_t torch_library_impl(TorchLibrary*, const char* name, void (*)(uint64_t* words, uint64_t arguments, uint64_t results),
                           uint64_t version);
int32_t aoti_torch_delete_library_object(TorchLibrary* owned);

// These return the code of a type, and the bytes of a code.
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float64();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_int16();
int32_t aoti_torch_dtype_int64();
int32_t aoti_torch_dtype_bool();
size_t aoti_torch_dtype_element_size(int32_t code);
}

namespace mk::stable {

// Calls below pass the arguments of torch 2.10, and this version: a later torch adds defaults for its new arguments.
constexpr uint64_t kVersion = uint64_t(2) << 56 | uint64_t(10) << 48;

inline std::string text_of(const char* text) { return text; }
template <class Number>
std::string text_of(Number number) {
  return std::to_string(number);
}

template <class... Parts>
[[noreturn, gnu::cold]] void fail(const char* function, const char* file, int line, Parts... parts) {
  std::string text = function;
  const auto add = [&text](const std::string& part) { text += part; };
  (add(", "), add(file), add(":"), add(std::to_string(line)), add(", "), (add(text_of(parts)), ...));
  throw std::runtime_error(text);
}

#define STD_TORCH_CHECK(condition, ...)                                               \
  do {                                                                                \
    if (!(condition)) ::mk::stable::fail(__func__, __FILE__, __LINE__, __VA_ARGS__);  \
  } while (false)

[[noreturn, gnu::cold]] inline void torch_failed(const char* what) {
  throw std::runtime_error(what + std::string(" failed in torch, which has printed why"));
}

inline void succeed(int32_t code, const char* what) {
  if (code != 0) torch_failed(what);
}

// ---------------------------------------------------------------- tensors

// Any other type is a negative value of its own.
enum class ScalarType : int32_t { Float, Double, Half, BFloat16, Short, Long, Bool };

constexpr int32_t (*kCodes[])() = {  // in that order
    aoti_torch_dtype_float32, aoti_torch_dtype_float64, aoti_torch_dtype_float16, aoti_torch_dtype_bfloat16,
    aoti_torch_dtype_int16,   aoti_torch_dtype_int64,   aoti_torch_dtype_bool,
};

inline int32_t code_of(ScalarType type) { return kCodes[int32_t(type)](); }

inline ScalarType type_of(int32_t code) {
  for (int32_t type = 0; type < int32_t(std::size(kCodes)); ++type)
    if (kCodes[type]() == code) return ScalarType(type);
  return ScalarType(~code);
}

// One reference to a tensor of torch's.
class Tensor {
 public:
  explicit Tensor(TorchTensor* owned) : handle_(owned) {}
  Tensor(const Tensor& other) {
    succeed(aoti_torch_new_tensor_handle(other.handle_, &handle_), "another reference to a tensor");
  }
  Tensor(Tensor&& other) noexcept : handle_(other.release()) {}
  Tensor& operator=(Tensor other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Tensor() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }
  // The handle, which the caller owns from then on.
  TorchTensor* release() { return std::exchange(handle_, nullptr); }

  int64_t dim() const { return ask(aoti_torch_get_dim); }
  int64_t numel() const { return ask(aoti_torch_get_numel); }
  int64_t size(int64_t dimension) const { return ask(aoti_torch_get_size, dimension); }
  int64_t stride(int64_t dimension) const { return ask(aoti_torch_get_stride, dimension); }
  std::vector<int64_t> sizes() const {
    const int64_t* first = ask(aoti_torch_get_sizes);
    return std::vector<int64_t>(first, first + dim());
  }
  bool is_contiguous() const { return ask(aoti_torch_is_contiguous); }
  int32_t get_device_index() const { return ask(aoti_torch_get_device_index); }
  ScalarType scalar_type() const { return type_of(ask(aoti_torch_get_dtype)); }
  size_t element_size() const { return aoti_torch_dtype_element_size(ask(aoti_torch_get_dtype)); }
  const void* const_data_ptr() const { return ask(torch_get_const_data_ptr); }
  void* mutable_data_ptr() const { return ask(torch_get_mutable_data_ptr); }

 private:
  template <class Answer>
  Answer ask(int32_t (*question)(TorchTensor*, Answer*)) const {
    Answer answer{};
    succeed(question(handle_, &answer), "a question about a tensor");
    return answer;
  }
  template <class Answer>
  Answer ask(int32_t (*question)(TorchTensor*, int64_t, Answer*), int64_t dimension) const {
    Answer answer{};
    succeed(question(handle_, dimension, &answer), "a question about a dimension of a tensor");
    return answer;
  }

  TorchTensor* handle_ = nullptr;
};

// ---------------------------------------------------------------- words

using Word = uint64_t;

template <class T>
T take(Word word);
template <>
inline int64_t take(Word word) { return int64_t(word); }
template <>
inline bool take(Word word) { return word != 0; }
template <>
inline double take(Word word) {
  double number;
  std::memcpy(&number, &word, sizeof number);
  return number;
}
template <>
inline Tensor take(Word word) { return Tensor(reinterpret_cast<TorchTensor*>(word)); }
template <>
inline std::optional<Tensor> take(Word word) {
  if (word == 0) return std::nullopt;
  Word* const inner = reinterpret_cast<Word*>(word);
  Tensor tensor = take<Tensor>(*inner);
  delete inner;
  return tensor;
}

inline Word give(Tensor tensor) { return reinterpret_cast<Word>(tensor.release()); }

inline Word give(const std::vector<int64_t>& numbers) {
  TorchList* list = nullptr;
  succeed(torch_new_list_reserve_size(numbers.size(), &list), "a list");
  for (const int64_t number : numbers) succeed(torch_list_push_back(list, Word(number)), "a list");
  return reinterpret_cast<Word>(list);
}

inline Word give(std::optional<ScalarType> type) {
  return type.has_value() ? reinterpret_cast<Word>(new Word(code_of(*type))) : 0;
}

// ---------------------------------------------------------------- torch's operations

// Calls an operation that returns a tensor; `words` holds all of its arguments.
inline Tensor call(const char* name, Word* words) {
  succeed(torch_call_dispatcher(name, "", words, kVersion), name);
  return take<Tensor>(words[0]);
}

inline Tensor empty_like(const Tensor& like) {
  Word words[] = {give(like), 0, 0, 0, 0, 0};  // dtype, layout, device, pinned, format of memory: as `like` has them
  return call("aten::empty_like", words);
}

inline Tensor new_empty(const Tensor& like, const std::vector<int64_t>& sizes,
                        std::optional<ScalarType> type = std::nullopt) {
  Word words[] = {give(like), give(sizes), give(type), 0, 0, 0};  // layout, device, pinned
  return call("aten::new_empty", words);
}

// torch's current device, put back at the end.
class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t index) { succeed(aoti_torch_create_device_guard(index, &handle_), "a change of device"); }
  DeviceGuard(const DeviceGuard&) = delete;
  ~DeviceGuard() { aoti_torch_delete_device_guard(handle_); }

 private:
  TorchDeviceGuard* handle_ = nullptr;
};

// ---------------------------------------------------------------- our operations

// TORCH_BOX(&function) is what torch calls: it takes the arguments from words and leaves the results there.
#define TORCH_BOX(function) (&::mk::stable::Boxed<function>::call)

template <auto function>
struct Boxed;

template <class Result, class... Given, Result (*function)(Given...)>
struct Boxed<function> {
  static void call(Word* words, uint64_t arguments, uint64_t results) {
    STD_TORCH_CHECK(arguments == sizeof...(Given) && results == kResults, "the schema does not fit the function");
    run(words, std::index_sequence_for<Given...>());
  }

 private:
  template <class T>
  struct Count : std::integral_constant<size_t, 1> {};
  template <class... Parts>
  struct Count<std::tuple<Parts...>> : std::integral_constant<size_t, sizeof...(Parts)> {};
  static constexpr size_t kResults = std::is_void_v<Result> ? 0 : Count<Result>::value;

  template <size_t... i>
  static void run(Word* words, std::index_sequence<i...>) {
    std::tuple<std::decay_t<Given>...> given{take<std::decay_t<Given>>(words[i])...};
    if constexpr (kResults == 0)
      std::apply(function, std::move(given));
    else
      leave(words, std::apply(function, std::move(given)));
  }
  static void leave(Word* words, Tensor result) { words[0] = give(std::move(result)); }
  template <class... Parts>
  static void leave(Word* words, std::tuple<Parts...> results) {
    std::apply([&](Parts&... part) { ((*words++ = give(std::move(part))), ...); }, results);
  }
};

// Schemas, or the functions for one kind of device, that torch knows while this object lives.
class Library {
 public:
  Library(const char* space, const char* key, const char* file, uint32_t line, void (*fill)(Library&)) {
    succeed(key == nullptr ? aoti_torch_library_init_fragment(space, file, line, &handle_)
                           : aoti_torch_library_init_impl(space, key, file, line, &handle_),
            space);
    fill(*this);
  }
  Library(const Library&) = delete;
  ~Library() { aoti_torch_delete_library_object(handle_); }

  void def(const char* schema) { succeed(aoti_torch_library_def(handle_, schema), schema); }
  void impl(const char* name, void (*boxed)(Word*, uint64_t, uint64_t)) {
    succeed(torch_library_impl(handle_, name, boxed, kVersion), name);
  }

 private:
  TorchLibrary* handle_ = nullptr;
};

}  // namespace mk::stable

// STABLE_TORCH_LIBRARY_FRAGMENT(namespace, library) { library.def(schema)... }, and the same with impl for a device.
#define MK_LIBRARY_PART(part, space, key, library)                                                       \
  static void fill_##part(mk::stable::Library& library);                                                 \
  static const mk::stable::Library library_of_##part(#space, key, __FILE__, __LINE__, fill_##part);      \
  static void fill_##part(mk::stable::Library& library)
#define STABLE_TORCH_LIBRARY_FRAGMENT(space, library) MK_LIBRARY_PART(fragment, space, nullptr, library)
#define STABLE_TORCH_LIBRARY_IMPL(space, key, library) MK_LIBRARY_PART(key, space, #key, library)
