// Every CPU kernel is compiled once per instruction set ("tier"), and the best one for this machine is called. The
// build defines MK_TIER: v3 (AVX2) and v4 (AVX-512) on x86-64, base elsewhere. Kernels that multiply matrices are also
// compiled for v4_bf16, whose instructions multiply pairs of bf16.
#pragma once

namespace mk::cpu {

enum class Tier { none, base, v3, v4, v4_bf16 };

// `none`: this machine has no instruction set that the kernels were built for.
inline Tier tier() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  if (v4 && v3) return __builtin_cpu_supports("avx512bf16") ? Tier::v4_bf16 : Tier::v4;
  return v3 ? Tier::v3 : Tier::none;
#else
  return Tier::base;
#endif
}

}  // namespace mk::cpu

#define MK_OF_TIER(tier, name, ...) \
  namespace mk::cpu::tier {         \
  void name(__VA_ARGS__);           \
  }

// MK_CPU_FUNCTION(name, types...) declares mk::cpu::name(types...), which calls the tier's own; MK_CPU_KERNEL(name, Args)
// one that takes a struct of arguments; MK_CPU_PRODUCTS is for kernels that multiply matrices. A definition with other
// types does not link. Templates, because the emulator has no CPU kernels: what is not called is not linked.
#define MK_CPU_CALL(name, best, ...)                  \
  namespace mk::cpu {                                 \
  template <class... Given>                           \
  void name(const Given&... given) {                  \
    static void (*const chosen)(__VA_ARGS__) = best;  \
    chosen(given...);                                 \
  }                                                   \
  }
#if defined(__x86_64__)
#define MK_CPU_FUNCTION(name, ...)   \
  MK_OF_TIER(v3, name, __VA_ARGS__)  \
  MK_OF_TIER(v4, name, __VA_ARGS__)  \
  MK_CPU_CALL(name, (tier() >= Tier::v4 ? &v4::name : &v3::name), __VA_ARGS__)
#define MK_CPU_PRODUCTS(name, Args)        \
  MK_OF_TIER(v3, name, const Args&)        \
  MK_OF_TIER(v4, name, const Args&)        \
  MK_OF_TIER(v4_bf16, name, const Args&)   \
  MK_CPU_CALL(name, (tier() == Tier::v4_bf16 ? &v4_bf16::name : tier() == Tier::v4 ? &v4::name : &v3::name), const Args&)
#else
#define MK_CPU_FUNCTION(name, ...)     \
  MK_OF_TIER(base, name, __VA_ARGS__)  \
  MK_CPU_CALL(name, &base::name, __VA_ARGS__)
#define MK_CPU_PRODUCTS MK_CPU_KERNEL
#endif
#define MK_CPU_KERNEL(name, Args) MK_CPU_FUNCTION(name, const Args&)
