// Memory that ends where it must not be read on, numbers in it, and requests over records.
#pragma once
#include <sys/mman.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "../../freetoken/native/api.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#define ASAN_UNPOISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#endif

inline uint32_t draw() {
  static uint32_t state = 1;
  return state = state * 1664525u + 1013904223u;
}

inline int failures = 0;
inline void check(bool good, const char* what) {
  if (good) return;
  std::printf("FAILED: %s\n", what);
  failures++;
}

inline size_t bytes_of(int dtype) { return dtype == FT_F32 ? 4 : 2; }

// Zeros that end, but for `align`, at a page which can't be touched, and begin behind another: so what compilers don't
// watch, like loads of AMX's tiles, is seen, too. What is left of these pages is poisoned.
class Block {
 public:
  explicit Block(size_t n, size_t align = 64) {
    constexpr size_t PAGE = 4096;
    const size_t size = (n + align - 1) / align * align, inner = (size + PAGE - 1) / PAGE * PAGE;
    whole_ = inner + 2 * PAGE;
    start_ = (uint8_t*)mmap(nullptr, whole_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(start_, PAGE, PROT_NONE);
    mprotect(start_ + PAGE + inner, PAGE, PROT_NONE);
    memory = start_ + PAGE + inner - size;
    ASAN_POISON_MEMORY_REGION(start_ + PAGE, inner - size);
    ASAN_POISON_MEMORY_REGION((uint8_t*)memory + n, size - n);
  }
  ~Block() {
    ASAN_UNPOISON_MEMORY_REGION(start_, whole_);
    munmap(start_, whole_);
  }
  Block(const Block&) = delete;
  uint8_t* bytes() const { return (uint8_t*)memory; }
  float* floats() const { return (float*)memory; }

  void* memory;

 private:
  uint8_t* start_;
  size_t whole_;
};

// Small numbers of a type.
struct Numbers : Block {
  Numbers(size_t n, int dtype, float base = 0.0f) : Block(n * bytes_of(dtype), bytes_of(dtype)) {
    for (size_t i = 0; i < n; i++) {
      const float v = base + (float)(int)(draw() % 65 - 32) / 64.0f;
      uint32_t bits;
      std::memcpy(&bits, &v, 4);
      if (dtype == FT_F32) ((uint32_t*)memory)[i] = bits;
      else if (dtype == FT_BF16) ((uint16_t*)memory)[i] = (uint16_t)(bits >> 16);
      else ((uint16_t*)memory)[i] = (uint16_t)(0x2C00 + draw() % 0x400 + (draw() & 1) * 0x8000);
    }
  }
};

template <class T>
struct Words : Block {
  explicit Words(std::vector<T> v) : Block(v.size() * sizeof(T), alignof(T)) {
    std::memcpy(memory, v.data(), v.size() * sizeof(T));
  }
  T* data() const { return (T*)memory; }
};

// Codes that are small numbers whatever a format makes of them.
struct Codes : Block {
  Codes(size_t n, size_t align) : Block(n, align) {
    for (size_t i = 0; i < n; i++) bytes()[i] = (uint8_t)(0x20 + (draw() >> 16 & 7));
  }
};

// Experts of one layer and who computes them; null without the format having tiles of that shape.
struct Shape {
  uint32_t hidden, width, tiles, experts;
  bool bias = false;
};
struct Layer {
  ft_layer l{};
  std::unique_ptr<Block> records;
  ft_executor* executor = nullptr;

  Layer(int tier, int format, Shape s) {
    const uint64_t bytes = ft_tile_bytes(format, s.width, s.hidden);
    if (!bytes) return;
    l.format = format, l.hidden = s.hidden, l.tile_width = s.width, l.num_tiles = s.tiles, l.num_experts = s.experts;
    l.alpha = 1, l.limit = INFINITY;
    l.activation = s.bias ? FT_GELU : FT_SWIGLU;
    if (s.bias) l.bias_offset = (uint32_t)((bytes + 3) / 4 * 4), l.tiles_offset = (4 * s.hidden + 127) / 128 * 128;
    const uint64_t used = s.bias ? l.bias_offset + 8 * s.width : bytes;  // what fills the last tile's line isn't there
    l.tile_bytes = (used + 127) / 128 * 128;
    l.record_bytes = l.tiles_offset + s.tiles * l.tile_bytes;
    records = std::make_unique<Codes>(s.experts * l.record_bytes - l.tile_bytes + used, 128);
    l.records = (uint64_t)records->memory;
    executor = ft_executor_new(tier, &l, 1);
    check(executor, "executor");
  }
  ~Layer() {
    if (executor) ft_executor_free(executor);
  }
  Layer(const Layer&) = delete;
};

// Items of `rows` rows each, from tile `first` on, of one expert after the other.
struct Some {
  uint32_t rows;
  int first;
};
struct Request {
  std::unique_ptr<Block> bytes, out;
  ft_io* io;

  Request(const ft_layer& l, const std::vector<Some>& items, int dtype) {
    uint32_t rows = 0, tokens = 0, out_rows = 0;
    for (const Some& s : items) {
      rows += s.rows, tokens = std::max(tokens, s.rows);
      out_rows += s.rows * (s.first ? l.num_tiles - s.first : 1);
    }
    const uint64_t at = sizeof(ft_io), of_rows = (at + items.size() * sizeof(ft_item) + 63) / 64 * 64;
    const uint64_t of_x = (of_rows + rows * 4 + 63) / 64 * 64, size = tokens * l.hidden * bytes_of(dtype);
    bytes = std::make_unique<Block>(of_x + size);
    out = std::make_unique<Block>(out_rows * l.hidden * 4ull);
    io = (ft_io*)bytes->memory;
    io->layout = {FT_ABI_MAGIC, FT_ABI_VERSION, l.hidden, (uint32_t)dtype, (uint32_t)items.size(), rows, tokens, out_rows,
                  at, of_rows, of_x, 0};
    auto* item = (ft_item*)(bytes->bytes() + at);
    auto* row = (int32_t*)(bytes->bytes() + of_rows);
    uint32_t first_row = 0, out_row = 0, n = 0;
    for (const Some& s : items) {
      const uint32_t e = n++ % l.num_experts;
      *item++ = {(int32_t)e, s.first, (int32_t)l.num_tiles, (int32_t)first_row, (int32_t)s.rows, (int32_t)out_row,
                 n % 2 ? l.records + e * l.record_bytes : 0};
      for (uint32_t i = 0; i < s.rows; i++) *row++ = i % 5 == 4 ? -1 : (int32_t)i;
      first_row += s.rows, out_row += s.rows * (s.first ? l.num_tiles - s.first : 1);
    }
    const Numbers x(tokens * l.hidden, dtype);
    std::memcpy(bytes->bytes() + of_x, x.memory, size);
    io->request.num_items = (uint32_t)items.size();
    io->request.num_rows = rows;
    io->request.num_tokens = tokens;
  }

  int ask(ft_executor* executor, uint32_t deadline_ms = 60000) {
    return ft_executor_serve(executor, io, out->floats(), deadline_ms);
  }
  std::vector<float> answer() const {
    const size_t n = (size_t)io->layout.max_out_rows * io->layout.hidden;
    return {out->floats(), out->floats() + n};
  }
};

inline bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && !std::memcmp(a.data(), b.data(), a.size() * 4);
}

// Run on threads that share the work, then on one alone: the bytes of `out` must not change. Either starts with scratch
// memory of its own, as large as this needs.
template <class Call>
void alike(const char* what, const void* out, size_t bytes, Call call) {
  std::vector<char> want;
  for (int threads : {3, 1}) {
    ft_pool_start(threads, nullptr, 0);
    check(call() == FT_OK, what);
    if (want.empty()) want.assign((const char*)out, (const char*)out + bytes);
    else check(!std::memcmp(out, want.data(), bytes), what);
  }
}
