// Every CPU kernel is compiled once per instruction set ("tier"); the best one that this machine runs is called.
// MK_TIER is given by the build: v3 (AVX2) and v4 (AVX-512) on x86-64, base elsewhere.
#pragma once

namespace mk::cpu {

enum class Tier { none, base, v3, v4 };

// `none`: this machine has no instruction set that the kernels were built for.
inline Tier tier() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  return v4 && v3 ? Tier::v4 : (v3 ? Tier::v3 : Tier::none);
#else
  return Tier::base;
#endif
}

}  // namespace mk::cpu

// MK_CPU_KERNEL(name, Args) declares mk::cpu::name(const Args&), which calls the tier's own.
#if defined(__x86_64__)
#define MK_CPU_KERNEL(name, Args)                             \
  namespace mk::cpu {                                         \
  namespace v3 {                                              \
  void name(const Args&);                                     \
  }                                                           \
  namespace v4 {                                              \
  void name(const Args&);                                     \
  }                                                           \
  inline void name(const Args& args) {                        \
    static const bool wide = tier() == Tier::v4;              \
    wide ? v4::name(args) : v3::name(args);                   \
  }                                                           \
  }
#else
#define MK_CPU_KERNEL(name, Args)                             \
  namespace mk::cpu {                                         \
  namespace base {                                            \
  void name(const Args&);                                     \
  }                                                           \
  inline void name(const Args& args) { base::name(args); }    \
  }
#endif
