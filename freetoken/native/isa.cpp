#include "isa.h"

#include "amx.h"

#if defined(__x86_64__) || defined(_M_X64)
#if defined(_MSC_VER)
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#endif

#define FT_DECLARE(ns) \
  namespace ns {       \
  extern const TierKernels kernels; \
  }
FT_DECLARE(ft_scalar)
#if defined(FT_HAVE_X86)
FT_DECLARE(ft_avx2)
namespace ft_avx2_vnni {
extern const TileFormat* const formats[];  // what it does better than avx2
}
FT_DECLARE(ft_avx512)
FT_DECLARE(ft_avx512_bf16)
#endif
#if defined(FT_HAVE_NEON)
FT_DECLARE(ft_neon)
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#endif

#if defined(FT_HAVE_AMX) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ft {

namespace {
#if defined(FT_HAVE_X86)
struct Words {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Words cpuid(unsigned leaf, unsigned sub) {
  Words w;
#if defined(_MSC_VER)
  int out[4];
  __cpuidex(out, (int)leaf, (int)sub);
  w = {(unsigned)out[0], (unsigned)out[1], (unsigned)out[2], (unsigned)out[3]};
#else
  __get_cpuid_count(leaf, sub, &w.a, &w.b, &w.c, &w.d);
#endif
  return w;
}

// What the operating system saves on a context switch.
uint64_t xcr0() {
#if defined(_MSC_VER)
  return _xgetbv(0);
#else
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t)high << 32 | low;
#endif
}

bool made_by_amd() {  // "AuthenticAMD", in this order of registers
  const Words w = cpuid(0, 0);
  return w.b == 0x68747541 && w.d == 0x69746E65 && w.c == 0x444D4163;
}

bool bit(unsigned word, int n) { return word >> n & 1; }

#if defined(FT_HAVE_AMX) && defined(__linux__)
// Linux gives a process room for the tile registers' 8 KiB when it asks, threads that run already included.
bool may_use_tiles() {
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}
#endif

void add_x86(std::vector<const TierKernels*>& out) {
  Words one = cpuid(1, 0), seven = cpuid(7, 0), more = cpuid(7, 1);
  if (cpuid(0, 0).a < 7 || !bit(one.c, 27)) return;  // no XGETBV
  const uint64_t saved = xcr0();
  const bool ymm = (saved & 6) == 6, zmm = (saved & 0xE6) == 0xE6;
  if (!(ymm && bit(one.c, 12) && bit(one.c, 29) && bit(seven.b, 5))) return;  // FMA, F16C, AVX2
  out.push_back(&ft_avx2::kernels);
  static TierKernels better = ft_avx2::kernels;
  better.name = "avx2_vnni";
  better.formats = ft_avx2_vnni::formats;
  if (seven.a >= 1 && bit(more.a, 4)) out.push_back(&better);  // AVX-VNNI
  // F, DQ, BW, VL
  if (!(zmm && bit(seven.b, 16) && bit(seven.b, 17) && bit(seven.b, 30) && bit(seven.b, 31))) return;
  out.push_back(&ft_avx512::kernels);
  if (!(seven.a >= 1 && bit(more.a, 5) && bit(seven.c, 11))) return;  // BF16, VNNI
  out.push_back(&ft_avx512_bf16::kernels);
#if defined(FT_HAVE_AMX) && defined(__linux__)
  // BF16, tiles, VBMI
  if (!(bit(seven.d, 22) && bit(seven.d, 24) && bit(seven.c, 1) && (saved >> 17 & 3) == 3 && may_use_tiles())) return;
  static TierKernels tiles = ft_avx512_bf16::kernels;
  tiles.name = "amx";
  tiles.formats = ft_amx::formats(ft_avx512_bf16::kernels.formats, ft_avx512::kernels.formats);
  out.push_back(&tiles);
#endif
}
#else
bool made_by_amd() { return false; }
#endif

#if defined(FT_HAVE_NEON)
bool has_neon() {
#if defined(__linux__)
  constexpr unsigned long ASIMD = 1 << 1;
  return getauxval(AT_HWCAP) & ASIMD;
#else
  return true;
#endif
}
#endif
}  // namespace
}  // namespace ft

const int ft_row_ahead = ft::made_by_amd() ? 0 : 4096, ft_row_near = ft::made_by_amd() ? 0 : 2048;

namespace ft {

const std::vector<const TierKernels*>& tiers() {
  static const std::vector<const TierKernels*> found = [] {
    std::vector<const TierKernels*> out;
#if defined(FT_HAVE_NEON)
    if (has_neon()) out.push_back(&ft_neon::kernels);  // computed in an emulator only: nobody gets it unasked
#endif
    out.push_back(&ft_scalar::kernels);
#if defined(FT_HAVE_X86)
    add_x86(out);
#endif
    return out;
  }();
  return found;
}

const TierKernels* tier_at(int index) {
  return index >= 0 && index < (int)tiers().size() ? tiers()[index] : nullptr;
}

std::string tier_names() {
  std::string names;
  for (const TierKernels* tier : tiers()) {
    if (!names.empty()) names.push_back(' ');
    names.append(tier->name);
  }
  return names;
}

}  // namespace ft
