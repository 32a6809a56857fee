// Drives the library through its C surface, for runs under sanitisers: all formats and tiers as records and as
// matrices, a layer's operations, whole layers, programs, many threads that start and stop, faults, two callers. Exits with 1 if an answer ever changes.
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
#include "../../freetoken/native/layer.h"
#include "../../freetoken/native/matrix_api.h"

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

// --- a layer's operations: outputs exactly as large as they must be ---------------------------------

// Numbers of a type, all small.
struct Numbers : Block {
  Numbers(size_t n, int dtype, float base = 0.0f) : Block(n * (dtype == FT_F32 ? 4 : 2), dtype == FT_F32 ? 4 : 2) {
    for (size_t i = 0; i < n; i++) {
      const float v = base + (float)(int)(draw() % 65 - 32) / 64.0f;
      uint32_t bits;
      std::memcpy(&bits, &v, 4);
      if (dtype == FT_F32) ((uint32_t*)memory)[i] = bits;
      else if (dtype == FT_BF16) ((uint16_t*)memory)[i] = (uint16_t)(bits >> 16);
      else ((uint16_t*)memory)[i] = (uint16_t)(0x2C00 + draw() % 0x400 + (draw() & 1) * 0x8000);
    }
  }
  float* floats() const { return (float*)memory; }
};
template <class T>
struct Words : Block {
  explicit Words(std::vector<T> v) : Block(v.size() * sizeof(T), alignof(T)) {
    std::memcpy(memory, v.data(), v.size() * sizeof(T));
  }
  T* data() const { return (T*)memory; }
};

// Run on one thread, then on more: the bytes of `out` must not change.
template <class Call>
void alike(const char* what, const void* out, size_t bytes, Call call) {
  std::vector<char> want;
  for (int threads : {1, 2, 4}) {
    ft_pool_start(threads, nullptr, 0);
    check(call() == FT_OK, what);
    if (want.empty()) want.assign((const char*)out, (const char*)out + bytes);
    else check(!std::memcmp(out, want.data(), bytes), what);
  }
}

size_t bytes_of(int dtype) { return dtype == FT_F32 ? 4 : 2; }

void attention(int tier, int dtype, int64_t rows, int dim, int page) {
  const int heads = 6, kv = 2, half = dim / 2, width = 40 / page + 1;
  const int64_t stride = 2ll * page * kv * dim, pages = 1 + rows * width, columns = (heads * 2 + 2 * kv) * dim;
  Numbers qkv(rows * columns, dtype), cache(pages * stride, dtype), q(rows * heads * dim, dtype), out(rows * heads * dim, dtype);
  Numbers norm(dim, FT_F32, 1), cos(64 * half, FT_F32), sin(64 * half, FT_F32), sinks(heads, FT_F32);
  std::vector<int64_t> positions, seqs, table;
  std::vector<int32_t> context;
  for (int64_t r = 0; r < rows; r++) {
    positions.push_back(39 - r % 7), seqs.push_back(r), context.push_back(r % 3 == 2 ? 0 : (int32_t)(40 - r % 7));
    for (int p = 0; p < width; p++) table.push_back(1 + r * width + p);
  }
  const Words<int64_t> at(positions), of(seqs), pages_of(table);
  const Words<int32_t> seen(context);
  const Words<uint8_t> live(std::vector<uint8_t>(rows, 1));
  const ft_rope rope{qkv.memory, q.memory, cache.memory, norm.floats(), norm.floats(), cos.floats(), sin.floats(),
                     at.data(), of.data(), pages_of.data(), live.data(), rows, columns, stride, width, 64,
                     dtype, heads, kv, dim, half, page, 1, 1e-6f};
  alike("rope", q.memory, rows * heads * dim * bytes_of(dtype), [&] { return ft_rope_store(tier, &rope); });
  for (int window : {0, 5}) {
    const ft_attend attend{q.memory, cache.memory, out.memory, pages_of.data(), seen.data(), window ? sinks.floats() : nullptr,
                           rows, stride, width, dtype, heads, kv, dim, page, window, 0.25f, 0};
    alike("attend", out.memory, rows * heads * dim * bytes_of(dtype), [&] { return ft_attend_decode(tier, &attend); });
  }
}

void recurrent(int tier, int dtype, int64_t rows, int k_dim, int v_dim) {
  const int k_heads = 2, v_heads = 4, taps = 4;
  const int64_t channels = 2ll * k_heads * k_dim + v_heads * v_dim, columns = channels + v_heads * v_dim + 2 * v_heads;
  const int64_t conv_stride = channels * (taps - 1), state = (int64_t)v_heads * k_dim * v_dim;
  Numbers in(rows * columns, dtype), conv((rows + 1) * conv_stride, dtype), delta((rows + 1) * state, FT_F32);
  Numbers weight(taps * channels, FT_F32), decay(v_heads, FT_F32, -1), bias(v_heads, FT_F32), norm(v_dim, FT_F32, 1);
  Numbers out(rows * v_heads * v_dim, dtype);
  std::vector<int64_t> units;
  for (int64_t r = 0; r < rows; r++) units.push_back(r + 1);
  const Words<int64_t> ids(units);
  const Words<uint8_t> fresh(std::vector<uint8_t>(rows, 1));  // a step of its own each time
  auto part = [&](int64_t at) { return (const char*)in.memory + at * bytes_of(dtype); };
  const ft_delta job{part(0), part(channels), part(columns - 2 * v_heads), part(columns - v_heads), conv.memory, out.memory,
                     delta.floats(), weight.floats(), decay.floats(), bias.floats(), norm.floats(), ids.data(), fresh.data(),
                     rows, columns, conv_stride, state, dtype, taps, k_heads, k_dim, v_heads, v_dim, 1e-6f, 0};
  alike("delta", out.memory, rows * v_heads * v_dim * bytes_of(dtype), [&] { return ft_delta_decode(tier, &job); });
}

void rows_of(int tier, int dtype, int64_t rows, int64_t width) {
  const size_t size = rows * width * bytes_of(dtype);
  Numbers x(rows * width, dtype), other(rows * width, dtype), gate(rows * (2 * width + 1), dtype), y(rows * width, dtype);
  Numbers weight(width, FT_F32, 1), wide(rows * width, FT_F32), router(9 * width, FT_F32), shares(rows * 3, FT_F32);
  Words<int32_t> ids(std::vector<int32_t>(rows * 3));
  const Words<uint8_t> live(std::vector<uint8_t>(rows, 1));
  const char* second = (const char*)gate.memory + width * bytes_of(dtype);
  const ft_norm norm{x.memory, weight.floats(), y.memory, rows, width, 1e-6f, dtype};
  alike("norm", y.memory, size, [&] { return ft_norm_rows(tier, &norm); });
  for (int kind = FT_SWIGLU; kind <= FT_RELU; kind++) {
    const ft_act_mul act{gate.memory, second, y.memory, rows, width, 2 * width + 1, 2 * width + 1, dtype, kind};
    alike("act_mul", y.memory, size, [&] { return ft_gate_act_mul(tier, &act); });
  }
  const ft_sigmoid_mul sigmoid{x.memory, second, y.memory, rows, 1, width, width, width, 2 * width + 1, 0, dtype, 0};
  alike("sigmoid_mul", y.memory, size, [&] { return ft_gate_sigmoid_mul(tier, &sigmoid); });
  const ft_add_routed routed{x.memory, wide.floats(), other.memory, second, y.memory, rows, width, 2 * width + 1, dtype, 0};
  alike("add_routed", y.memory, size, [&] { return ft_gate_add_routed(tier, &routed); });
  const ft_route route{x.memory, weight.floats(), router.floats(), live.data(), y.memory, ids.data(), shares.floats(),
                       rows, width, 9, dtype, 3, 1, 1e-6f};
  alike("route", ids.memory, rows * 12, [&] { return ft_route_rows(tier, &route); });
  const ft_widen widen{x.memory, wide.floats(), rows, width, dtype, 0};
  alike("widen", wide.memory, rows * width * 4, [&] { return ft_gate_widen(tier, &widen); });
  if (dtype == FT_F32) return;
  Numbers w(37 * width, dtype), bias(37, dtype), residual(rows * 37, dtype), sums(rows * 37, dtype);
  const ft_product product{x.memory, weight.floats(), w.memory, bias.memory, residual.memory, sums.memory, rows, 37, width, 1e-6f, dtype};
  alike("product", sums.memory, rows * 37 * 2, [&] { return ft_product_run(tier, &product); });
  const ft_step steps[] = {{(int (*)(int, const void*))ft_norm_rows, &norm},
                           {(int (*)(int, const void*))ft_gate_widen, &widen}};
  alike("program", wide.memory, rows * width * 4, [&] { return ft_program_run(tier, steps, 2) == -1 ? FT_OK : FT_FAILED; });
}

void matrices(int tier, int format, int64_t rows, int64_t n, int64_t k) {
  const uint64_t bytes = ft_matrix_bytes(format, n, k);
  if (!bytes) return;
  Block w(bytes, 16);
  auto* p = (uint16_t*)w.memory;
  for (uint64_t i = 0; i < bytes / 2; i++) p[i] = (uint16_t)(0x2020 + (draw() & 0x0707));
  for (int dtype : {FT_BF16, FT_F16, FT_F32}) {
    Numbers x(rows * k, dtype), bias(n, dtype), y(rows * n, dtype);
    const ft_coded_product job{x.memory, w.memory, bias.memory, y.memory, rows, n, k, format, dtype};
    alike("coded product", y.memory, rows * n * bytes_of(dtype), [&] { return ft_coded_product_run(tier, &job); });
  }
  Numbers decoded((n - 1) * k, FT_F32);
  if (ft_coded_numbers(tier, format, w.memory, decoded.floats(), n, k, 0, 0) != FT_OK) return;  // int8: no decoding
  alike("coded numbers", decoded.memory, (n - 1) * k * 4,
        [&] { return ft_coded_numbers(tier, format, w.memory, decoded.floats(), n, k, 1, n); });
}

void whole_layer(int tier, int format, uint32_t tokens) {
  constexpr uint32_t hidden = 256, width = 256, experts = 5, top_k = 3;
  const uint64_t bytes = ft_tile_bytes(format, width, hidden);
  if (!bytes) return;
  ft_layer l{};
  l.format = format, l.hidden = hidden, l.tile_width = width, l.num_tiles = 2, l.num_experts = experts;
  l.tile_bytes = (bytes + 127) / 128 * 128, l.record_bytes = 2 * l.tile_bytes, l.alpha = 1, l.limit = INFINITY;
  Block records(experts * l.record_bytes, 4096);
  auto* p = (uint16_t*)records.memory;
  for (uint64_t i = 0; i < experts * l.record_bytes / 2; i++) p[i] = (uint16_t)(0x2020 + (draw() & 0x0707));
  l.records = (uint64_t)records.memory;
  ft_executor* executor = ft_executor_new(tier, &l, 1);
  Numbers x(tokens * hidden, FT_BF16), weights(tokens * top_k, FT_F32), y(tokens * hidden, FT_F32);
  std::vector<int32_t> routes;
  for (uint32_t t = 0; t < tokens; t++)
    for (uint32_t r = 0; r < top_k; r++) routes.push_back(t % 6 == 5 ? -1 : (int32_t)(t % 3 + r));
  const Words<int32_t> ids(routes);
  ft_moe moe{x.memory, ids.data(), weights.floats(), y.floats(), 0, FT_BF16, tokens, top_k, 0, 0};
  const ft_experts job{executor, &moe, 20000, 0};
  alike("whole layer", y.memory, tokens * hidden * 4, [&] { return ft_experts_run(tier, &job); });
  ft_executor_free(executor);
}

void operations(int tier) {
  for (int dtype : {FT_BF16, FT_F16, FT_F32})
    for (int64_t rows : {1, 3, 17}) {
      attention(tier, dtype, rows, 20, 4);
      attention(tier, dtype, rows, 64, 16);
      recurrent(tier, dtype, rows, 16, 24);
      recurrent(tier, dtype, rows, 9, 5);
      rows_of(tier, dtype, rows, 33);
      rows_of(tier, dtype, rows, 700);
    }
}

void two_callers() {
  ft_pool_start(3, nullptr, 0);
  std::vector<uint16_t> w(300 * 256, 0x3F80), x(3 * 256, 0x3F80);
  std::atomic<int> wrong{0};
  auto call = [&] {
    for (int i = 0; i < 300; i++) {
      std::vector<uint16_t> y(3 * 300);
      ft_linear((int)words(ft_tiers()).size() - 1, FT_BF16, x.data(), nullptr, 0, w.data(), nullptr, nullptr, y.data(), 3,
                300, 256);
      for (uint16_t v : y) wrong += v != 0x4380;  // 256
    }
  };
  std::thread other(call), limits([] {
    for (int i = 0; i < 2000; i++) ft_pool_limit(1 + i % 3);
  });
  call();
  other.join();
  limits.join();
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
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const auto tiers = words(ft_tiers()), formats = words(ft_formats());
  for (size_t t = 0; t < tiers.size(); t++)
    for (size_t f = 0; f <= 2 * formats.size(); f++) {
      one_format((int)f, (int)t, 96, 32);
      one_format((int)f, (int)t, 40, 8);
      one_format((int)f, (int)t, 256, 256);
      for (int64_t rows : {1, 5, 32}) matrices((int)t, (int)f, rows, 35, 256);
      for (uint32_t tokens : {1u, 49u}) whole_layer((int)t, (int)f, tokens);
    }
  for (size_t t = 0; t < tiers.size(); t++) operations((int)t);
  two_callers();
  std::printf("%s\n", failures ? "failures" : "all good");
  return failures ? 1 : 0;
}
