// What the tier `amx` adds to avx512_bf16's table of formats.
#pragma once
#include "kernels.h"

namespace ft_amx {

// Both int8 and 16-bit formats; from the tables of avx512_bf16 and of avx512, which decodes.
const TileFormat* const* formats(const TileFormat* const* below, const TileFormat* const* floats);

}  // namespace ft_amx
