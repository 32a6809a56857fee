// IQ3_XXS: 256 points; a four-bit scale for 32 elements, a float16 factor for 256:
// weight = d (sc + 1/2) / 2 sign magnitude.
#include "../grid.h"

namespace FT_NS {

struct Iq3Xxs {
  static constexpr int POINTS = 256;
  static constexpr uint8_t MAGNITUDES[8] = {4, 12, 20, 28, 36, 44, 52, 62};
  Part<uint8_t, 4> index;
  Part<uint32_t, 32> words;  // four times seven signs, then the scale; an eighth sign makes minuses even
  Part<Half, 256> d;
  FT_PARTS(index, words, d)

  FT_INLINE_MEMBER uint32_t ninth(int, int, int64_t) const { return 0; }
  FT_INLINE_MEMBER uint32_t signs(int m, int i, int64_t k) const {
    const uint32_t word = *words.row(m, i, k);
    uint32_t all = 0;
    for (int j = 0; j < 4; j++) {
      const uint32_t seven = word >> 7 * j & 127;
      all |= (seven | (uint32_t)__builtin_parity(seven) << 7) << 8 * j;
    }
    return all;
  }
  FT_INLINE_MEMBER float scale(int m, int i, int64_t k) const {
    return 0.5f * (0.5f + (float)(*words.row(m, i, k) >> 28));
  }
  FT_INLINE_MEMBER I word(int i, int64_t h) const { return dwords_of((const uint8_t*)words.down(i, h)); }
  FT_INLINE_MEMBER I down_ninth(int, int64_t) const { return I(); }
  FT_INLINE_MEMBER I down_signs(int i, int64_t h) const {
    return with_parity(masked(shift_right(word(i, h), i % 32 / 8 * 7), 127));
  }
  FT_INLINE_MEMBER F down_scale(int i, int64_t h) const {
    return mul(set1(0.5f), add(set1(0.5f), to_float(shift_right(word(i, h), 28))));
  }
  static constexpr const char* gaps() {
    return
        "0225241279P2425274327BC822572724A6E4612BZJK5BC246JGpNK42LEG25272522B1O2772l25277Y62E9DGB4Ze4IJC@EW27"
        "252439V223277R41827612D1DK74i4XEOKAR*2BNS7272LD562E9B2R25DLGFIzFJ66CRVILeLKBE2C4@KF1G6HUVbBXEL@32EoN"
        "N86GNVEW8fTB4Z8N_iEoG2ETWUba6+XbneEo221IGiAgR5MDELXGV2I)";
  }
};

}  // namespace FT_NS

FT_POINTS(iq3_xxs, Iq3Xxs)
