// float32 weights.
#include "../engine.h"

namespace FT_NS {

static void f32_run(const TileJob& job) { run_tiles<Plain<float, from_f32>>(job); }

extern const TileFormat format_f32;
const TileFormat format_f32 = {"f32", f32_run, plain_bytes<float>, nullptr, nullptr, nullptr};

}  // namespace FT_NS
