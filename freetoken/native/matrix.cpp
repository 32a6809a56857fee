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

struct Rows : Job {
  Rows(const TileFormat& f, const MatrixJob& j, int64_t row_bytes, int64_t from, int64_t to)
      : format(f), job(j), next(from), end(to) {
    step = std::max<int64_t>(2, PIECE_BYTES / std::max<int64_t>(row_bytes, 1) / 2 * 2);
    scratch = (size_t)scratch_bytes(job.k, 64);
  }
  virtual void rows(int64_t first, int64_t last, int worker) = 0;
  void work(int worker) override {
    for (int64_t i; (i = next.fetch_add(step, std::memory_order_relaxed)) < end;)
      rows(i, std::min(end, i + step), worker);
  }
  void run() {
    Pool& pool = Pool::instance();
    if (next + step < end && pool.threads() > 1 && pool.acquire()) {
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
  std::atomic<int64_t> next;
  int64_t end, step = 0;
  size_t scratch = 0;
  bool pooled = false;
};

struct Product : Rows {
  using Rows::Rows;
  void rows(int64_t first, int64_t last, int worker) override {
    uint8_t* memory;
    if (pooled) {
      memory = Pool::instance().scratch(worker, scratch);
    } else {
      own.resize(scratch + 64);
      memory = (uint8_t*)ft_align((uint64_t)own.data(), 64);
    }
    format.matrix(job, first, last, memory);
  }
  std::vector<uint8_t> own;
};

struct Numbers : Rows {
  using Rows::Rows;
  void rows(int64_t first, int64_t last, int) override { format.numbers(job, first, last); }
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
  Product(*f, job, (int64_t)(bytes / n), 0, n).run();
  return FT_OK;
}

int ft_coded_numbers(int tier, int format, const void* w, float* y, int64_t n, int64_t k, int64_t first,
                     int64_t last) {
  const TileFormat* f = coded(tier, format);
  const uint64_t bytes = ft_matrix_bytes(format, n, k);
  if (!f || !bytes || first < 0 || last > n) return FT_FAILED;
  const MatrixJob job{nullptr, w, nullptr, y - first * k, 0, n, k, FT_F32};
  Numbers(*f, job, (int64_t)(bytes / n), first, last).run();
  return FT_OK;
}

}  // extern "C"
