// The sixteen uneven levels of IQ4 codes.
#pragma once
#include "blocks.h"

namespace FT_NS {

struct Uneven {
  static constexpr int LOW = 4, HIGH = 0;
  static constexpr bool OFFSET = false;
  static constexpr float number(int code) {
    constexpr float levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    return levels[code];
  }
#if defined(FT_AVX512)
  FT_INLINE F value(I codes) {
    const F levels = _mm512_setr_ps(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113);
    return _mm512_permutexvar_ps(codes, levels);  // the low four bits count
  }
#elif defined(FT_AVX2)
  FT_INLINE F value(I codes) {
    const F low = _mm256_permutevar8x32_ps(_mm256_setr_ps(-127, -104, -83, -65, -49, -35, -22, -10), codes);
    const F high = _mm256_permutevar8x32_ps(_mm256_setr_ps(1, 13, 25, 38, 53, 69, 89, 113), codes);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
  }
#elif defined(FT_NEON)
  FT_INLINE F value(I codes) {  // levels plus 128 as bytes; indices beyond a table give zeros
    const uint8x16_t levels{1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
    const I index = either(masked(codes, 15), vdupq_n_u32(0xFFFFFF00));
    return sub(to_float(vreinterpretq_u32_u8(vqtbl1q_u8(levels, vreinterpretq_u8_u32(index)))), set1(128.0f));
  }
#else
  FT_INLINE F value(I codes) { return number((int)masked(codes, 15)); }
#endif
};

}  // namespace FT_NS
