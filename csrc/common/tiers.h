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

#define MK_OF_TIER(tier, name, Args) \
  namespace mk::cpu::tier {          \
  void name(const Args&);            \
  }

// MK_CPU_KERNEL(name, Args) declares mk::cpu::name(const Args&), which calls the tier's own; so does MK_CPU_PRODUCTS.
#if defined(__x86_64__)
#define MK_CPU_KERNEL(name, Args)                 \
  MK_OF_TIER(v3, name, Args)                      \
  MK_OF_TIER(v4, name, Args)                      \
  namespace mk::cpu {                             \
  inline void name(const Args& args) {            \
    static const bool wide = tier() >= Tier::v4;  \
    wide ? v4::name(args) : v3::name(args);       \
  }                                               \
  }
#define MK_CPU_PRODUCTS(name, Args)                                                                    \
  MK_OF_TIER(v3, name, Args)                                                                           \
  MK_OF_TIER(v4, name, Args)                                                                           \
  MK_OF_TIER(v4_bf16, name, Args)                                                                      \
  namespace mk::cpu {                                                                                  \
  inline void name(const Args& args) {                                                                 \
    static const Tier best = tier();                                                                   \
    best == Tier::v4_bf16 ? v4_bf16::name(args) : best == Tier::v4 ? v4::name(args) : v3::name(args);  \
  }                                                                                                    \
  }
#else
#define MK_CPU_KERNEL(name, Args)                           \
  MK_OF_TIER(base, name, Args)                              \
  namespace mk::cpu {                                       \
  inline void name(const Args& args) { base::name(args); }  \
  }
#define MK_CPU_PRODUCTS MK_CPU_KERNEL
#endif
