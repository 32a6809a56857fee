// The C functions of api.h: arguments checked, then handed on.
#include "api.h"

#include <algorithm>
#include <string>
#include <vector>

#include "executor.h"
#include "formats/list.h"
#include "isa.h"
#include "ops.h"
#include "pieces.h"
#include "poller.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

using namespace ft;

struct ft_executor : Executor {
  using Executor::Executor;
};
struct ft_poller : Poller {
  using Poller::Poller;
};

namespace {

#define FT_COUNT(name) +1
constexpr int NUM_FORMATS = 0 FT_FORMATS(FT_COUNT);

struct Reading : Pieces {
  static constexpr uint64_t BYTES = 1 << 20;
  Reading(const TierKernels& t, const uint8_t* d, uint64_t n)
      : Pieces((int64_t)((n + BYTES - 1) / BYTES), 0), tier(t), data(d), size(n) {}
  void piece(int64_t index, uint8_t*) override {
    const uint64_t at = (uint64_t)index * BYTES;
    found.fetch_xor(tier.read(data + at, std::min(BYTES, size - at)), std::memory_order_relaxed);
  }
  const TierKernels& tier;
  const uint8_t* data;
  uint64_t size;
  std::atomic<uint64_t> found{0};
};

struct Ping : Pieces {
  explicit Ping(int64_t n) : Pieces(n, 0) {}
  void piece(int64_t, uint8_t*) override {}
};

}  // namespace

extern "C" {

int ft_api_version(void) { return FT_API_VERSION; }

const char* ft_tiers(void) {
  static const std::string names = tier_names();
  return names.c_str();
}

const char* ft_formats(void) {
#define FT_NAME(name) #name " "
  static const std::string names = [] {
    std::string all = FT_FORMATS(FT_NAME);
    all.pop_back();
    return all;
  }();
  return names.c_str();
}

uint64_t ft_tile_bytes(int format, uint32_t tile_width, uint32_t hidden) {
  if (format < 0 || format > 2 * NUM_FORMATS) return 0;
  const TileFormat* f = tiers()[0]->formats[format];  // NUM_FORMATS + 1 and up: int8 activations (int8_table.h)
  return f ? f->tile_bytes(tile_width, hidden) : 0;
}

void ft_pool_limit(int threads) { Pool::instance().limit(threads); }

int ft_pool_start(int threads, const int* cpus, int num_cpus) {
  Pool::instance().start(threads, cpus, num_cpus);
  return Pool::instance().threads();
}

int ft_pool_threads(void) { return Pool::instance().threads(); }

void ft_pool_fault(int worker, int percent, int stall_ms) { Pool::instance().fault(worker, percent, stall_ms); }

int ft_pool_ping(int count) {
  for (int i = 0; i < count; i++) Ping(Pool::instance().threads()).run();
  return count;
}

ft_executor* ft_executor_new(int tier, const ft_layer* layers, int num_layers) {
  const TierKernels* kernels = tier_at(tier);
  if (!kernels || !layers || num_layers < 1) return nullptr;
  for (int i = 0; i < num_layers; i++) {
    const ft_layer& l = layers[i];
    const uint64_t bytes = ft_tile_bytes((int)l.format, l.tile_width, l.hidden);
    if (!bytes || bytes > l.tile_bytes || !l.num_experts || l.activation > FT_RELU) return nullptr;
    if (l.bias_offset &&
        (l.bias_offset < bytes || l.bias_offset + 8ull * l.tile_width > l.tile_bytes ||
         l.tiles_offset < 4ull * l.hidden))
      return nullptr;
  }
  return new ft_executor(*kernels, layers, num_layers);
}

int ft_executor_serve(ft_executor* executor, const ft_io* io, float* out, uint32_t deadline_ms) {
  return executor->serve(*io, out, deadline_ms);
}

ft_poller* ft_poller_new(ft_executor* executor, const ft_device_block* block) {
  return executor && block ? new ft_poller(*executor, *block) : nullptr;
}
void ft_poller_wake(ft_poller* poller) { poller->wake(); }
void ft_poller_rest(ft_poller* poller, int all) { poller->rest(all != 0); }
void ft_poller_free(ft_poller* poller) { delete poller; }
int ft_executor_layer(ft_executor* executor, ft_moe* job, uint32_t deadline_ms) {
  return executor->layer(*job, deadline_ms);
}

void ft_executor_free(ft_executor* executor) {
  if (executor && executor->idle(1000)) delete executor;  // else a stalled worker still reads it: let it live
}

int ft_linear(int tier, int dtype, const void* x, const float* norm, float eps, const void* w, const void* bias,
              const void* residual, void* y, int64_t rows, int64_t n, int64_t k) {
  const TierKernels* kernels = tier_at(tier);
  if (!kernels || dtype < FT_BF16 || dtype > FT_F32) return FT_FAILED;
  if (rows < 1 || n < 1 || k < 1) return FT_OK;
  std::vector<uint8_t> normed;
  if (norm) {
    normed.resize((size_t)(rows * k * (dtype == FT_F32 ? 4 : 2)));
    const ft_norm job{x, norm, normed.data(), rows, k, eps, dtype};
    for (int64_t row = 0; row < rows; row++) kernels->ops->norm(job, row);
    x = normed.data();
  }
  const LinearJob job{x, w, bias, residual, y, rows, n, k, dtype};
  Linear(*kernels, job).run();
  return FT_OK;
}

uint64_t ft_read(int tier, const void* data, uint64_t num_bytes) {
  const TierKernels* kernels = tier_at(tier);
  if (!kernels) return 0;
  Reading reading(*kernels, (const uint8_t*)data, num_bytes);
  reading.run();
  return reading.found.load();
}

int ft_advise_huge(void* data, uint64_t num_bytes) {
#if defined(__linux__)
  const uint64_t page = 4096, first = ft_align((uint64_t)data, page);
  const uint64_t last = ((uint64_t)data + num_bytes) / page * page;
  return last > first ? madvise((void*)first, last - first, MADV_HUGEPAGE) : 0;
#else
  (void)data, (void)num_bytes;
  return -1;
#endif
}

}  // extern "C"
