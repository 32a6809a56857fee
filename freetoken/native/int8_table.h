// What a tier offers for int8 activations: a second table of formats, behind the first one's null in the same order;
// null where a format computes with 16 bits always.
#pragma once
#include "kernels.h"

// `matrix` takes job.x as int8_rows leaves it, and any number of rows. There is no `numbers`.
struct Int8Format : TileFormat {
  uint64_t (*row_bytes)(int64_t k);
  // Rows [first, last) of job.x, quantised, into `to`, where all rows lie one after the other.
  void (*rows)(const MatrixJob& job, int64_t first, int64_t last, uint8_t* to, uint8_t* scratch);
};
