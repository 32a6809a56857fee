// IQ3_XXS: 256 points; a four-bit scale for 32 elements, a float16 factor for 256:
// weight = d (sc + 1/2) / 2 sign magnitude.
#include "../grid.h"

namespace FT_NS {

struct Iq3Xxs {
  static constexpr int POINTS = 256;
  static constexpr uint8_t MAGNITUDES[8] = {4, 12, 20, 28, 36, 44, 52, 62};
  template <class Number>
  FT_INLINE Number factor(Number sc) {
    return 0.5f * (0.5f + sc);
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
