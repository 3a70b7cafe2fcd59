// torch's current CUDA stream. The function is looked up when it is first needed: a torch without CUDA lacks it, and
// the same shared object must load there. (The stable ABI has a call for it from 2.13 on.)
#include <dlfcn.h>

#include "binding.h"

namespace mk::binding {

void* current_stream(int32_t device_index) {
  using Get = int32_t (*)(int32_t device_index, void** stream);
  static const Get get = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_NOW);
    return library ? reinterpret_cast<Get>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  void* stream = nullptr;
  STD_TORCH_CHECK(get != nullptr && get(device_index, &stream) == 0, "torch gave no CUDA stream");
  return stream;
}

}  // namespace mk::binding
