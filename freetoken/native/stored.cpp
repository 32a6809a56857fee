// Stored tensors on their way into a record: bytes of files read, then laid into tiles.
//
// What quant/_coded.py does to one matrix after the other, for all of an expert's at once, so that a loader's
// thread needs the interpreter twice an expert and not some hundred times. Numbers are made and looked at before
// the first byte is written: whoever is told of a fault goes the slow way, which says what is wrong.
#include "stored.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <vector>

#if defined(__linux__)
#include <sys/uio.h>
#endif
#include <unistd.h>

namespace {

constexpr int64_t ALIGN = 4096;

float widened(const uint8_t* at, uint32_t from) {
  uint32_t bits = 0;
  if (from == FT_FROM_F32 || from == FT_RECIPROCAL) {
    std::memcpy(&bits, at, 4);
    return from == FT_RECIPROCAL ? 1.0f / std::bit_cast<float>(bits) : std::bit_cast<float>(bits);
  }
  uint16_t half;
  std::memcpy(&half, at, 2);
  if (from == FT_FROM_BF16) return std::bit_cast<float>((uint32_t)half << 16);
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3FF;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000u | fraction << 13);
  if (exponent) return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
  const float small = std::ldexp((float)fraction, -24);
  return sign ? -small : small;
}

// The float16 that is just this number; false if there is none.
bool as_half(float value, uint16_t& out) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), sign = bits >> 16 & 0x8000;
  const int exponent = (int)(bits >> 23 & 255) - 127;
  uint32_t fraction = bits & 0x7FFFFF;
  if (!(bits & 0x7FFFFFFF)) {
    out = (uint16_t)sign;
    return true;
  }
  if (exponent > 15 || exponent < -24) return false;
  if (exponent >= -14) {
    out = (uint16_t)(sign | (uint32_t)(exponent + 15) << 10 | fraction >> 13);
    return !(fraction & 0x1FFF);
  }
  fraction |= 0x800000;
  const int shift = -1 - exponent;  // 14 for the largest that is subnormal
  out = (uint16_t)(sign | fraction >> shift);
  return !(fraction & ((1u << shift) - 1));
}

// True if no number is all ones under the mask.
template <typename T>
bool none(const uint8_t* raw, int64_t count, T mask) {
  T bad = 0;
  for (int64_t i = 0; i < count; i++) {
    T v;
    std::memcpy(&v, raw + i * sizeof(T), sizeof(T));
    bad = (T)(bad | ((v & mask) == mask));
  }
  return !bad;
}

bool finite(uint32_t kind, const uint8_t* raw, int64_t num_bytes) {
  if (kind == FT_FINITE_E4M3) return none<uint8_t>(raw, num_bytes, 0x7F);
  if (kind == FT_FINITE_E8M0) return none<uint8_t>(raw, num_bytes, 0xFF);
  if (kind == FT_FINITE_F16) return none<uint16_t>(raw, num_bytes / 2, 0x7C00);
  if (kind == FT_FINITE_F32) return none<uint32_t>(raw, num_bytes / 4, 0x7F800000);
  return true;
}

// The numbers of one step as the tile holds them.
struct Numbers {
  const uint8_t* at = nullptr;
  int64_t row = 0;  // bytes from row to row
  float whole = 1.0f;
  std::vector<uint8_t> own;
};

bool halves(const ft_step& s, const uint8_t* from, Numbers& out) {
  std::vector<float> wide((size_t)(s.rows * s.columns));
  float largest = 0.0f;
  bool plain = true;
  uint16_t half;
  size_t i = 0;
  for (int64_t r = 0; r < s.rows; r++)
    for (int64_t c = 0; c < s.columns; c++, i++) {
      wide[i] = widened(from + r * s.row + c * s.column, s.numbers);
      if (!std::isfinite(wide[i])) return false;
      largest = std::fmax(largest, std::fabs(wide[i]));
      plain = plain && as_half(wide[i], half);
    }
  if (!plain) {
    int exponent;
    std::frexp(largest, &exponent);
    out.whole = std::ldexp(1.0f, exponent - 15);
  }
  out.own.resize(wide.size() * 2);
  for (i = 0; i < wide.size(); i++) {
    const float part = wide[i] / out.whole;
    if (!as_half(part, half) || part * out.whole != wide[i]) return false;
    std::memcpy(out.own.data() + 2 * i, &half, 2);
  }
  out.at = out.own.data();
  out.row = 2 * s.columns;
  return true;
}

// Words that hold a column of eight rows, as a byte each, or as two a byte along the row.
void fields(const ft_step& s, const uint8_t* from, uint8_t* out) {
  const bool pairs = s.kind == FT_STEP_NIBBLES;
  auto word = [&](int64_t r, int64_t c) {
    uint32_t w;
    std::memcpy(&w, from + r * s.row + c * s.column, 4);
    return w;
  };
  for (int64_t r = 0; r < s.rows / 8; r++, out += 8 * s.columns)
    for (int64_t c = 0; c < s.columns; c++) {
      const uint32_t a = word(r, pairs ? 2 * c : c), b = pairs ? word(r, 2 * c + 1) : 0;
      for (int i = 0; i < 8; i++) {
        const uint32_t shift = 4 * (s.order >> (4 * i) & 15);
        out[i * s.columns + c] = (uint8_t)((a >> shift & 15) + s.more + ((b >> shift & 15) << 4));
      }
    }
}

bool sorted(const ft_step& s, const uint8_t* at) {
  std::vector<int32_t> values((size_t)s.columns);
  std::memcpy(values.data(), at, values.size() * 4);
  return std::is_sorted(values.begin(), values.end());
}

// False if they aren't what the step promises.
bool made(const ft_step& s, const uint8_t* tensor, Numbers& out) {
  out.at = tensor + s.start;
  out.row = s.row;
  if (s.kind == FT_STEP_HALVES) return halves(s, out.at, out);
  if (s.kind == FT_STEP_SORTED) return sorted(s, out.at);
  if (s.numbers == FT_TURNED || s.numbers == FT_FIELDS) {
    out.own.resize((size_t)(s.rows * s.columns));
    if (s.numbers == FT_FIELDS) fields(s, out.at, out.own.data());
    else ft_transpose(4, out.at, (uint64_t)s.row, out.own.data(), (uint64_t)s.columns, s.columns / 4, s.rows);
    out.at = out.own.data();
    out.row = s.columns;
  } else if (s.numbers != FT_AS_THEY_LIE) {
    out.own.resize((size_t)(4 * s.rows * s.columns));
    uint8_t* to = out.own.data();
    for (int64_t r = 0; r < s.rows; r++)
      for (int64_t c = 0; c < s.columns; c++, to += 4) {
        const float value = widened(out.at + r * s.row + c * s.column, s.numbers);
        std::memcpy(to, &value, 4);
      }
    out.at = out.own.data();
    out.row = 4 * s.columns;
  }
  if (s.kind == FT_STEP_EIGHTS) return std::all_of(out.own.begin(), out.own.end(), [](uint8_t v) { return v == 8; });
  const int64_t line = s.columns * s.item;
  if (out.row == line) return finite(s.finite, out.at, s.rows * line);
  for (int64_t r = 0; r < s.rows; r++)
    if (!finite(s.finite, out.at + r * out.row, line)) return false;
  return true;
}

// A word of two codes, which lie 32 elements apart, in lines of 32 words.
void byte_rows(const uint8_t* from, int64_t row, int64_t rows, int64_t columns, uint8_t* out) {
  for (int64_t r = 0; r < rows; r++, from += row)
    for (int64_t k = 0; k < columns; k += 64, out += 64) {
      uint8_t line[64] = {};
      for (int j = 0; j < 32; j++) line[2 * j] = from[k + j];
      if (k + 32 < columns)
        for (int j = 0; j < 32; j++) line[2 * j + 1] = from[k + 32 + j];
      std::memcpy(out, line, 64);
    }
}

// Two columns of down are a word of it, and one of the tile.
void lay_codes(const ft_step& s, const Numbers& from, const int64_t shape[3], int64_t tile, uint8_t* out) {
  const int64_t hidden = shape[0], w = shape[1];
  uint8_t* to = out + s.offsets[0];
  if (s.down) ft_transpose(2, from.at + tile * w, (uint64_t)from.row, to, (uint64_t)(2 * hidden), hidden, w / 2);
  else byte_rows(from.at + tile * w * from.row, from.row, w, hidden, to);
}

// 32 words a line, whose digits lie 32 elements apart: a byte has the same digit of two neighbours.
void nibble_rows(const uint8_t* from, int64_t row, int64_t rows, int64_t num_bytes, uint8_t* out) {
  for (int64_t r = 0; r < rows; r++, from += row)
    for (int64_t k = 0; k < num_bytes; k += 64, out += 64) {
      uint32_t pairs[16] = {};
      for (int q = 0; q < 4 && k + 16 * q < num_bytes; q++)
        for (int p = 0; p < 16; p++) {
          const uint32_t both = from[k + 16 * q + p];
          pairs[p] |= ((both & 15) | (both >> 4) << 16) << (4 * q);
        }
      std::memcpy(out, pairs, 64);
    }
}

// Eight columns of down are a dword of nibbles, and one of the tile: even ones below, odd ones above.
void nibble_columns(const uint8_t* from, int64_t row, int64_t hidden, int64_t w, uint8_t* out) {
  const int64_t lines = w / 8;
  ft_transpose(4, from, (uint64_t)row, out, (uint64_t)(4 * hidden), hidden, lines);
  for (int64_t i = 0; i < lines * hidden; i++, out += 4) {
    uint32_t d;
    std::memcpy(&d, out, 4);
    uint32_t even = d & 0x0F0F0F0F, odd = d >> 4 & 0x0F0F0F0F;
    even = (even | even >> 4) & 0x00FF00FF;
    odd = (odd | odd >> 4) & 0x00FF00FF;
    d = ((even | even >> 8) & 0xFFFF) | (odd | odd >> 8) << 16;
    std::memcpy(out, &d, 4);
  }
}

void lay_nibbles(const ft_step& s, const Numbers& from, const int64_t shape[3], int64_t tile, uint8_t* out) {
  const int64_t hidden = shape[0], w = shape[1];
  if (s.down) nibble_columns(from.at + tile * w / 2, from.row, hidden, w, out + s.offsets[0]);
  else nibble_rows(from.at + tile * w * from.row, from.row, w, hidden / 2, out + s.offsets[0]);
}

void lay_part(const ft_step& s, const Numbers& from, int64_t w, int64_t tile, uint8_t* out) {
  const int64_t first = tile * w / s.span, line = s.columns * s.item;
  uint8_t* to = out + s.offsets[0];
  if (s.down) {
    ft_transpose((int)s.item, from.at + first * s.item, (uint64_t)from.row, to, (uint64_t)(s.rows * s.item), s.rows,
                 s.lines);
    return;
  }
  for (int64_t i = 0; i < s.lines; i++) std::memcpy(to + i * line, from.at + (first + i) * from.row, (size_t)line);
}

#if defined(__linux__) && defined(RWF_NOWAIT)
// What the page cache has of a span, in whole blocks; 0 if it hasn't the first one.
int64_t from_cache(const ft_span& s) {
  int64_t done = 0;
  while (done < s.num_bytes) {
    const iovec part{s.into + done, (size_t)(done ? s.num_bytes - done : std::min(ALIGN, s.num_bytes))};
    const ssize_t got = preadv2(s.cached, &part, 1, s.offset + done, RWF_NOWAIT);
    if (got > 0) done += got;
    if (got < ALIGN) break;
  }
  return done == s.num_bytes ? done : done / ALIGN * ALIGN;
}
#else
int64_t from_cache(const ft_span&) { return 0; }
#endif

bool read(const ft_span& s, bool first_cached) {
  int64_t done = first_cached && s.direct >= 0 ? from_cache(s) : 0;
  while (done < s.num_bytes) {
    const int64_t rest = s.num_bytes - done, at = s.offset + done;
    const bool direct = s.direct >= 0 && !(((int64_t)s.into | done | rest | at) % ALIGN);
    const ssize_t got = pread(direct ? s.direct : s.cached, s.into + done, (size_t)rest, at);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    done += got;
    if (direct && got % ALIGN) break;  // inside a block it stops at the end of the file only
  }
  return done >= s.least;
}

}  // namespace

extern "C" {

FT_API int ft_lay(const ft_step* steps, int count, const uint8_t* const* tensors, const int64_t shape[3],
                  uint8_t* tiles, int64_t tile_step, int64_t used) {
  std::vector<Numbers> numbers((size_t)count);
  for (int i = 0; i < count; i++)
    if (!made(steps[i], tensors[steps[i].tensor], numbers[i])) return i;
  for (int64_t tile = 0; tile < shape[2]; tile++) {
    uint8_t* out = tiles + tile * tile_step;
    std::memset(out, 0, (size_t)used);
    for (int i = 0; i < count; i++) {
      const ft_step& s = steps[i];
      const Numbers& from = numbers[i];
      if (s.kind == FT_STEP_CODES) lay_codes(s, from, shape, tile, out);
      else if (s.kind == FT_STEP_NIBBLES) lay_nibbles(s, from, shape, tile, out);
      else if (s.kind == FT_STEP_EIGHTS || s.kind == FT_STEP_SORTED) continue;
      else if (s.kind == FT_STEP_SINGLE) std::memcpy(out + s.offsets[0], from.at, s.item);
      else lay_part(s, from, shape[1], tile, out);
      if (s.kind == FT_STEP_HALVES) std::memcpy(out + s.offsets[1], &from.whole, 4);
    }
  }
  return -1;
}

FT_API int ft_read_spans(const ft_span* spans, int count, int first_cached) {
  for (int i = 0; i < count; i++)
    if (!read(spans[i], first_cached)) return i;
  return -1;
}

}  // extern "C"
