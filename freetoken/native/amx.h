// What the tier `amx` adds to avx512_bf16's table of formats.
#pragma once
#include "kernels.h"

struct DigitCodes;

namespace ft_amx {

// Few rows of four-bit codes (digits.cpp); the first `rows` of the job's are those that count.
void run_digits(const DigitCodes& codes, const TileJob& job, int rows);

// Both int8 and 16-bit formats; from the tables of avx512_bf16 and of avx512, which decodes.
const TileFormat* const* formats(const TileFormat* const* below, const TileFormat* const* floats);

}  // namespace ft_amx
