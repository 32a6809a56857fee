// IQ4_NL: four-bit codes of uneven levels, a float16 step for 32 elements: weight = d level[code].
#include "../uneven.h"

namespace FT_NS {

struct Iq4Nl : Uneven {
  static constexpr int SPAN = 32;
  Part<Half, 32> d;
  FT_PARTS(d)
  template <class At>
  FT_INLINE_MEMBER auto step(At at) const {
    return at(d);
  }
};

}  // namespace FT_NS

FT_BLOCKS(iq4_nl, Iq4Nl, 32, 32)
