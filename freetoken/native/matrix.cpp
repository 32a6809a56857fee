// Dense products with coded matrices: rows of W cut into pieces that the pool's threads take.
#include "matrix_api.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "isa.h"
#include "pool.h"

using namespace ft;

namespace {

constexpr int64_t PIECE_BYTES = 64 << 10;  // of codes: small matrices have pieces for every thread

struct Product : Job {
  Product(const TileFormat& f, const MatrixJob& j, int64_t row_bytes) : format(f), job(j) {
    step = std::max<int64_t>(2, PIECE_BYTES / std::max<int64_t>(row_bytes, 1) / 2 * 2);
    count = (job.n + step - 1) / step;
    scratch = (size_t)scratch_bytes(job.k, 64);
  }
  void work(int worker) override {
    uint8_t* memory = nullptr;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      if (!memory) memory = place(worker);
      format.matrix(job, i * step, std::min(job.n, (i + 1) * step), memory);
    }
  }
  uint8_t* place(int worker) {
    if (pooled) return Pool::instance().scratch(worker, scratch);
    own.resize(scratch + 64);
    return (uint8_t*)ft_align((uint64_t)own.data(), 64);
  }
  void run() {
    Pool& pool = Pool::instance();
    if (count > 1 && pool.threads() > 1 && pool.acquire()) {
      pooled = true;
      if (!pool.run(*this, 1000))
        while (!pool.quiet(1000)) {
        }
      pool.release();
    } else {
      work(0);
    }
  }
  const TileFormat& format;
  const MatrixJob& job;
  int64_t step = 0, count = 0;
  size_t scratch = 0;
  bool pooled = false;
  std::atomic<int64_t> next{0};
  std::vector<uint8_t> own;
};

// Null if there is no such tier or format, or the format is plain.
const TileFormat* coded(int tier, int format) {
  if (tier < 0 || tier >= (int)tiers().size() || format < 0) return nullptr;
  const TileFormat* const* formats = tiers()[tier]->formats;  // a null ends them
  for (int i = 0; i < format; i++)
    if (!formats[i]) return nullptr;
  return formats[format] && formats[format]->matrix ? formats[format] : nullptr;
}

}  // namespace

extern "C" {

uint64_t ft_matrix_bytes(int format, int64_t rows, int64_t columns) {
  const TileFormat* f = coded(0, format);
  // Tiles of 256 columns are something that every coded format has, if its rows may be so long.
  if (!f || rows < 1 || columns < 1 || columns > INT32_MAX || !f->tile_bytes(256, (uint32_t)columns)) return 0;
  return f->matrix_bytes(rows, columns);
}

int ft_coded_linear(int tier, int format, int dtype, const void* x, const void* w, const void* bias, void* y,
                    int64_t rows, int64_t n, int64_t k) {
  const TileFormat* f = coded(tier, format);
  const uint64_t bytes = ft_matrix_bytes(format, n, k);
  if (!f || !bytes || rows > FT_ROWS || dtype < FT_BF16 || dtype > FT_F32) return FT_FAILED;
  if (rows < 1) return FT_OK;
  const MatrixJob job{x, w, bias, y, rows, n, k, dtype};
  Product(*f, job, (int64_t)(bytes / n)).run();
  return FT_OK;
}

}  // extern "C"
