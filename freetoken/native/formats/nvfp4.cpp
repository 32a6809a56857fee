// NVFP4: four-bit e2m1 codes, an e4m3 scale for 16 elements along the summed dimension, a float32 scale for
// each matrix.
#include "../blocks.h"

namespace FT_NS {

struct Nvfp4 : E2m1 {
  static constexpr int SPAN = 16;
  Part<E4m3, 16> scale;
  Whole whole;
  FT_PARTS(scale, whole)
  template <class At>
  FT_INLINE_MEMBER auto step(At at) const {
    return at(scale) * at(whole);
  }
};

}  // namespace FT_NS

FT_BLOCKS(nvfp4, Nvfp4, 16, 32)
