// float16 weights.
#include "../engine.h"

namespace FT_NS {

static void f16_run(const TileJob& job) { run_tiles<Plain<uint16_t, from_f16>>(job); }

extern const TileFormat format_f16;
const TileFormat format_f16 = {"f16", f16_run, plain_bytes<uint16_t>, nullptr, nullptr, nullptr};

}  // namespace FT_NS
