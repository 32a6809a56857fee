// Drives the library through its C surface, for runs under sanitisers: all formats and tiers, many threads that
// start and stop, faults, two callers at once. Exits with 1 if an answer ever changes.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../../freetoken/native/api.h"

namespace {

uint32_t state = 1;
uint32_t draw() { return state = state * 1664525u + 1013904223u; }

std::vector<std::string> words(const char* text) {
  std::vector<std::string> out{""};
  for (; *text; text++) {
    if (*text == ' ') out.emplace_back();
    else out.back() += *text;
  }
  return out;
}

struct Block {  // exactly as large as it must be, so that reading past an end is seen
  void* memory;
  explicit Block(size_t n, size_t align = 64) : memory(std::aligned_alloc(align, (n + align - 1) / align * align)) {
    std::memset(memory, 0, n);
  }
  ~Block() { std::free(memory); }
  Block(const Block&) = delete;
};

struct Request {
  uint32_t hidden, rows;
  std::unique_ptr<Block> bytes, out;
  ft_io* io;

  Request(const ft_layer& l, const uint8_t* records, int experts, uint32_t m, int first) : hidden(l.hidden), rows(m) {
    const uint32_t parts = first ? l.num_tiles - first : 1, out_rows = experts * m * parts;
    uint64_t at = sizeof(ft_io), offsets[4];
    const uint64_t sizes[4] = {experts * sizeof(ft_item), experts * m * 4ull, m * hidden * 2ull, out_rows * hidden * 4ull};
    for (int i = 0; i < 4; i++) offsets[i] = at, at = (at + sizes[i] + 63) / 64 * 64;
    bytes = std::make_unique<Block>(at);
    out = std::make_unique<Block>(sizes[3]);
    io = (ft_io*)bytes->memory;
    io->layout = {FT_ABI_MAGIC, FT_ABI_VERSION, hidden, FT_BF16, (uint32_t)experts, experts * m, m, out_rows,
                  offsets[0], offsets[1], offsets[2], offsets[3]};
    auto* items = (ft_item*)((char*)io + offsets[0]);
    auto* row = (int32_t*)((char*)io + offsets[1]);
    auto* x = (uint16_t*)((char*)io + offsets[2]);
    for (int e = 0; e < experts; e++) {
      items[e] = {e, first, (int32_t)l.num_tiles, (int32_t)(e * m), (int32_t)m, (int32_t)(e * m * parts),
                  (uint64_t)(records + e * l.record_bytes)};
      for (uint32_t i = 0; i < m; i++) row[e * m + i] = i % 5 == 4 ? -1 : (int32_t)i;
    }
    for (uint32_t i = 0; i < m * hidden; i++) x[i] = (uint16_t)(0x3C00 + draw() % 0x300 + (draw() & 1) * 0x8000);
    io->request.num_items = experts;
    io->request.num_rows = experts * m;
    io->request.num_tokens = m;
  }

  int ask(ft_executor* executor) { return ft_executor_serve(executor, io, (float*)out->memory, 20000); }
  std::vector<float> answer() const {
    const float* p = (const float*)out->memory;
    return {p, p + (size_t)io->layout.max_out_rows * hidden};
  }
};

int failures = 0;
void check(bool good, const char* what) {
  if (good) return;
  std::printf("FAILED: %s\n", what);
  failures++;
}
bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && !std::memcmp(a.data(), b.data(), a.size() * 4);
}

void one_format(int format, int tier, uint32_t hidden, uint32_t width) {
  const uint64_t bytes = ft_tile_bytes(format, width, hidden);
  if (!bytes) return;
  constexpr int experts = 3;
  ft_layer l{};
  l.format = format, l.hidden = hidden, l.tile_width = width, l.num_tiles = 4, l.num_experts = experts;
  l.tile_bytes = (bytes + 127) / 128 * 128;
  l.record_bytes = l.num_tiles * l.tile_bytes;
  l.alpha = 1, l.limit = INFINITY;
  Block records(experts * l.record_bytes, 4096);
  auto* p = (uint16_t*)records.memory;  // small numbers whatever the format makes of them
  for (uint64_t i = 0; i < experts * l.record_bytes / 2; i++) p[i] = (uint16_t)(0x2020 + (draw() & 0x0707));
  ft_executor* executor = ft_executor_new(tier, &l, 1);
  check(executor, "executor");
  for (uint32_t m : {1u, 7u, 40u})
    for (int first : {0, 1}) {
      Request request(l, (const uint8_t*)records.memory, experts, m, first);
      ft_pool_start(1, nullptr, 0);
      check(request.ask(executor) == FT_OK, "serve");
      const std::vector<float> want = request.answer();
      for (int threads : {2, 4}) {
        ft_pool_start(threads, nullptr, 0);
        for (int i = 0; i < 3; i++) {
          check(request.ask(executor) == FT_OK, "serve");
          check(same(request.answer(), want), "same bits on more threads");
        }
      }
    }
  ft_executor_free(executor);
}

void two_callers() {
  ft_pool_start(3, nullptr, 0);
  std::vector<uint16_t> w(300 * 256, 0x3F80), x(3 * 256, 0x3F80);
  std::atomic<int> wrong{0};
  auto call = [&] {
    for (int i = 0; i < 300; i++) {
      std::vector<uint16_t> y(3 * 300);
      ft_linear((int)words(ft_tiers()).size() - 1, FT_BF16, x.data(), w.data(), nullptr, y.data(), 3, 300, 256);
      for (uint16_t v : y) wrong += v != 0x4380;  // 256
    }
  };
  std::thread other(call);
  call();
  other.join();
  check(wrong == 0, "two callers at once");
  ft_pool_fault(1, 300, 20);
  call();
  ft_pool_fault(1, 100, 0);
  check(wrong == 0, "a slow and stalled worker");
  ft_pool_ping(2000);
  ft_read(0, w.data(), w.size() * 2);
}

}  // namespace

int main() {
  const auto tiers = words(ft_tiers()), formats = words(ft_formats());
  for (size_t t = 0; t < tiers.size(); t++)
    for (size_t f = 0; f < formats.size(); f++) {
      one_format((int)f, (int)t, 96, 32);
      one_format((int)f, (int)t, 40, 8);
      one_format((int)f, (int)t, 256, 256);
    }
  two_callers();
  std::printf("%s\n", failures ? "failures" : "all good");
  return failures ? 1 : 0;
}
