// Rows of a GGUF file's blocks, cut into the planes and parts of a tile (coded.h says how they lie).
//
// A format comes as data: the fields of a block, the planes of its codes, its parts; quant/_gguf.py and
// quant/_coded.py state the same. Called from a loader's own threads, each on its own tile; nothing here uses
// the pool. A row is taken apart into plain codes, which fit the nearest cache, and put together from them.
#include <cstring>
#include <vector>

#include "unblock.h"

namespace {

constexpr int STRIP = 16;  // rows of down whose columns are written side by side: a line of dwords

struct Row {
  std::vector<uint8_t> codes, parts[FT_PARTS_MOST];
};

// Digits of `bits` of n bytes, in runs, or-ed or stored to bits `at` and up.
template <int BITS>
void digits(const uint8_t* raw, int n, int run, int at, bool more, uint8_t* out) {
  constexpr int COUNT = 8 / BITS, MASK = (1 << BITS) - 1;
  if (run == 1) {  // a byte holds neighbours
    for (int i = 0; i < n; i++)
      for (int q = 0; q < COUNT; q++) {
        const uint8_t v = (uint8_t)((raw[i] >> (BITS * q) & MASK) << at);
        out[i * COUNT + q] = more ? out[i * COUNT + q] | v : v;
      }
    return;
  }
  for (int r = 0; r < n; r += run)
    for (int q = 0; q < COUNT; q++) {
      uint8_t* to = out + r * COUNT + q * run;
      for (int i = 0; i < run; i++) {
        const uint8_t v = (uint8_t)((raw[r + i] >> (BITS * q) & MASK) << at);
        to[i] = more ? to[i] | v : v;
      }
    }
}

// The twelve bytes of Q4_K and Q5_K: eight six-bit scales and eight minima.
void six_bits(const uint8_t* raw, uint8_t* sc, uint8_t* mn) {
  for (int i = 0; i < 4; i++) {
    const int a = raw[i], b = raw[4 + i], c = raw[8 + i];
    sc[i] = (uint8_t)(a & 63);
    mn[i] = (uint8_t)(b & 63);
    sc[4 + i] = (uint8_t)((c & 15) | a >> 6 << 4);
    mn[4 + i] = (uint8_t)(c >> 4 | b >> 6 << 4);
  }
}

class Reader {
 public:
  Reader(const ft_blocks& f, int64_t columns) : f_(f), columns_(columns) {}

  // False if a factor is not a number.
  bool read(const uint8_t* raw, Row& row) const {
    const int64_t blocks = columns_ / f_.columns;
    row.codes.resize(columns_);
    for (uint32_t p = 0; p < f_.num_parts; p++) row.parts[p].resize(columns_ / f_.part_columns[p] * f_.part_bytes[p]);
    for (int64_t b = 0; b < blocks; b++) block(raw + b * f_.block_bytes, b, row);
    for (uint32_t p = 0; p < f_.num_parts; p++)
      if (!finite(row.parts[p], f_.part_check[p])) return false;
    return true;
  }

 private:
  uint8_t* target(Row& row, int into, int64_t b) const {
    if (!into) return row.codes.data() + b * f_.columns;
    const int p = into - 1;
    return row.parts[p].data() + b * (f_.columns / f_.part_columns[p]) * f_.part_bytes[p];
  }

  void block(const uint8_t* raw, int64_t b, Row& row) const {
    uint32_t seen = 0;
    for (uint32_t i = 0; i < f_.num_fields; i++) {
      const ft_field& field = f_.fields[i];
      uint8_t* to = target(row, field.into, b);
      const bool more = seen >> field.into & 1;
      seen |= 1u << field.into;
      if (field.kind == FT_FIELD_RAW) std::memcpy(to, raw, field.num_bytes);
      else if (field.kind == FT_FIELD_SIX_BITS) six_bits(raw, to, target(row, field.into + 1, b));
      else if (field.bits == 4) digits<4>(raw, field.num_bytes, field.run, field.at, more, to);
      else if (field.bits == 2) digits<2>(raw, field.num_bytes, field.run, field.at, more, to);
      else digits<1>(raw, field.num_bytes, field.run, field.at, more, to);
      raw += field.num_bytes;
    }
  }

  static bool finite(const std::vector<uint8_t>& part, uint32_t check) {
    bool fine = true;
    if (check == FT_CHECK_HALF)
      for (size_t i = 1; i < part.size(); i += 2) fine &= (part[i] & 0x7C) != 0x7C;
    if (check == FT_CHECK_E8M0)
      for (uint8_t e : part) fine &= e != 0xFF;
    return fine;
  }

  const ft_blocks& f_;
  int64_t columns_;
};

// A plane of one row: words whose digits lie 32 elements apart; what pads the last line is zero.
template <int BITS>
void row_words(const uint8_t* codes, int64_t columns, int low, uint8_t* out) {
  constexpr int COUNT = 16 / BITS, MASK = (1 << BITS) - 1;
  for (int64_t k = 0; k < columns; k += 32 * COUNT, out += 64) {
    uint16_t words[32] = {};
    for (int q = 0; q < COUNT && k + 32 * q < columns; q++)
      for (int j = 0; j < 32; j++) words[j] |= (uint16_t)((codes[k + 32 * q + j] >> low & MASK) << (BITS * q));
    std::memcpy(out, words, 64);
  }
}

// Columns of down for n <= STRIP rows from h on: dwords of 2 * 16 / BITS columns each.
template <int BITS>
void down_dwords(const uint8_t* const* codes, int n, int64_t w, int64_t hidden, int low, uint8_t* out) {
  constexpr int COUNT = 16 / BITS;
  constexpr uint32_t MASK = (1u << BITS) - 1;
  for (int64_t i = 0; i < w; i += 2 * COUNT, out += hidden * 4) {
    uint32_t line[STRIP];
    for (int r = 0; r < n; r++) {
      const uint8_t* c = codes[r] + i;
      uint32_t both = 0;
      for (int q = 0; q < COUNT; q++)
        both |= (c[2 * q] >> low & MASK) << (BITS * q) | (c[2 * q + 1] >> low & MASK) << (16 + BITS * q);
      line[r] = both;
    }
    std::memcpy(out, line, 4 * n);
  }
}

// Runs of SIZE bytes at column c of n rows, one after the other: bytes, pairs of bytes, or parts.
template <int SIZE>
void down_items(const uint8_t* const* from, int n, int64_t count, int64_t hidden, uint8_t* out) {
  for (int64_t c = 0; c < count; c++, out += hidden * SIZE) {
    uint8_t line[STRIP * SIZE];
    for (int r = 0; r < n; r++) std::memcpy(line + r * SIZE, from[r] + c * SIZE, SIZE);
    std::memcpy(out, line, n * SIZE);
  }
}

void row_plane(const ft_blocks& f, int p, int low, const uint8_t* codes, int64_t columns, uint8_t* out) {
  const int bits = (int)f.plane_bits[p];
  if (!f.words) std::memcpy(out, codes, columns);
  else if (bits == 8) row_words<8>(codes, columns, low, out);
  else if (bits == 4) row_words<4>(codes, columns, low, out);
  else if (bits == 2) row_words<2>(codes, columns, low, out);
  else row_words<1>(codes, columns, low, out);
}

void down_plane(const ft_blocks& f, int p, int low, const uint8_t* const* codes, int n, int64_t w, int64_t hidden,
                int64_t h, uint8_t* out) {
  const int bits = (int)f.plane_bits[p];
  if (!f.words) down_items<1>(codes, n, w, hidden, out + h);
  else if (bits == 8) down_items<2>(codes, n, w / 2, hidden, out + 2 * h);
  else if (bits == 4) down_dwords<4>(codes, n, w, hidden, low, out + 4 * h);
  else if (bits == 2) down_dwords<2>(codes, n, w, hidden, low, out + 4 * h);
  else down_dwords<1>(codes, n, w, hidden, low, out + 4 * h);
}

}  // namespace

extern "C" {

FT_API int ft_unblock_rows(const ft_blocks* f, const uint8_t* raw, int64_t step, int64_t rows, int64_t columns,
                           uint8_t* const* streams) {
  Row row;
  const Reader reader(*f, columns);
  for (int64_t r = 0; r < rows; r++) {
    if (!reader.read(raw + r * step, row)) return 1;
    int low = 0;
    for (uint32_t p = 0; p < f->num_planes; low += (int)f->plane_bits[p++]) {
      const int64_t line = 512 / f->plane_bits[p];
      const int64_t row_bytes = f->words ? (columns + line - 1) / line * 64 : columns;
      row_plane(*f, (int)p, low, row.codes.data(), columns, streams[p] + r * row_bytes);
    }
    for (uint32_t p = 0; p < f->num_parts; p++)
      std::memcpy(streams[f->num_planes + p] + r * row.parts[p].size(), row.parts[p].data(), row.parts[p].size());
  }
  return 0;
}

FT_API int ft_unblock_down(const ft_blocks* f, const uint8_t* raw, int64_t step, int64_t hidden, int64_t w,
                           uint8_t* const* streams) {
  Row rows[STRIP];
  const uint8_t* from[STRIP];
  const Reader reader(*f, w);
  for (int64_t h = 0; h < hidden; h += STRIP) {
    const int n = hidden - h < STRIP ? (int)(hidden - h) : STRIP;
    for (int r = 0; r < n; r++) {
      if (!reader.read(raw + (h + r) * step, rows[r])) return 1;
      from[r] = rows[r].codes.data();
    }
    int low = 0;
    for (uint32_t p = 0; p < f->num_planes; low += (int)f->plane_bits[p++])
      down_plane(*f, (int)p, low, from, n, w, hidden, h, streams[p]);
    for (uint32_t p = 0; p < f->num_parts; p++) {
      for (int r = 0; r < n; r++) from[r] = rows[r].parts[p].data();
      uint8_t* to = streams[f->num_planes + p];
      const int64_t count = w / f->part_columns[p];
      if (f->part_bytes[p] == 2) down_items<2>(from, n, count, hidden, to + 2 * h);
      else if (f->part_bytes[p] == 4) down_items<4>(from, n, count, hidden, to + 4 * h);
      else down_items<1>(from, n, count, hidden, to + h);
    }
  }
  return 0;
}

FT_API int ft_unblock_tiles(const ft_blocks* f, const uint8_t* raw, int64_t step, int64_t hidden, int64_t w,
                            int64_t count, uint8_t* const* streams, int64_t tile_step, int down) {
  uint8_t* places[2 + FT_PARTS_MOST];
  const int64_t skip = down ? w / f->columns * f->block_bytes : w * step;
  for (int64_t t = 0; t < count; t++) {
    for (uint32_t s = 0; s < f->num_planes + f->num_parts; s++) places[s] = streams[s] + t * tile_step;
    const uint8_t* from = raw + t * skip;
    const int failed = down ? ft_unblock_down(f, from, step, hidden, w, places)
                            : ft_unblock_rows(f, from, step, w, hidden, places);
    if (failed) return 1;
  }
  return 0;
}

}  // extern "C"
