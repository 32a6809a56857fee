// MXFP4: four-bit e2m1 codes, a power of two for 32 elements along the summed dimension.
#include "../blocks.h"

namespace FT_NS {

struct Mxfp4 : E2m1 {
  static constexpr int SPAN = 32;
  Part<E8m0, 32> scale;
  FT_PARTS(scale)
  template <class At>
  FT_INLINE_MEMBER auto step(At at) const {
    return at(scale);
  }
};

}  // namespace FT_NS

FT_BLOCKS(mxfp4, Mxfp4, 32, 32)
