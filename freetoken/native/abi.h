/* The page that a device and the host executor share. C11 and C++20, no includes beyond stdint.
 *
 * MEMORY MAP of one IO block (host memory, mapped into the device; every region 64-byte aligned)
 *
 *   offset        size                    writer   what
 *   0             64                      host     layout: fixed when the block is made
 *   64            64                      device   request: doorbell
 *   128           64                      host     reply: done words
 *   192           64                      either   poison word
 *   items_offset  max_items * 32          device   work list, ft_item
 *   rows_offset   max_rows * 4            device   int32 rows of x, -1 = a padding row (zeros)
 *   x_offset      max_tokens * H * size   device   x, one row a token
 *   out_offset    max_out_rows * H * 4    host     float32 partials
 *
 * WORK. An item is a run of tiles [first_tile, last_tile) of one expert over num_rows rows of the
 * row list. Its record starts at `source` (a HOST address; device addresses never appear here).
 *   first_tile == 0   one float32 sum [num_rows, H] over its tiles, at out_row; ascending, grouped in a way
 *                     that depends on layout and num_rows alone
 *   first_tile > 0    the rest of an expert whose prefix the device computes: one float32 partial
 *                     [num_rows, H] per tile at out_row + (tile - first_tile) * num_rows, which the device
 *                     adds to its prefix one by one
 * So an expert's sum has the same order whoever computes what, and never depends on threads.
 *
 * ORDER. One request is in flight per block.
 *   1. device: poison is tested; if set, the step is abandoned and every later wait falls through.
 *   2. device: writes items, rows, x, then num_items and layer, then a system-scope release, then
 *      request.sequence = n (n > 0, rising by one). Nothing above may be written again before reply n.
 *   3. host: sees sequence n by an acquire load, reads all of the above, computes, writes out,
 *      then release-stores reply.done = n. reply.status 0 = good, else the partials are undefined.
 *   4. device: waits for done == n with a deadline <= 1 s of its own timer, by an acquire at system scope
 *      or in a later node; only then reads out. On the deadline: status is unknown, it sets poison.
 * A poisoned block stays poisoned until the host has parked its workers and cleared it.
 */
#ifndef FREETOKEN_ABI_H
#define FREETOKEN_ABI_H

#include <stdint.h>

#define FT_ABI_MAGIC 0x4F495446u /* "FTIO" */
#define FT_ABI_VERSION 1u

enum ft_dtype { FT_BF16 = 0, FT_F16 = 1, FT_F32 = 2 };
enum ft_status { FT_OK = 0, FT_POISONED = 1, FT_FAILED = 2 };

typedef struct ft_layout { /* offset 0 */
  uint32_t magic;
  uint32_t version;
  uint32_t hidden;
  uint32_t x_dtype;
  uint32_t max_items;
  uint32_t max_rows;
  uint32_t max_tokens;
  uint32_t max_out_rows;
  uint64_t items_offset;
  uint64_t rows_offset;
  uint64_t x_offset;
  uint64_t out_offset;
} ft_layout;

typedef struct ft_request { /* offset 64 */
  uint32_t sequence;
  uint32_t layer;
  uint32_t num_items;
  uint32_t num_rows;
  uint32_t num_tokens;
  uint32_t whole_sums; /* not 0: an item with first_tile > 0, too, yields one sum over its tiles */
  uint32_t reserved[10];
} ft_request;

typedef struct ft_reply { /* offset 128 */
  uint32_t done;
  uint32_t status;
  uint32_t reserved[14];
} ft_reply;

typedef struct ft_poison { /* offset 192 */
  uint32_t word;
  uint32_t reserved[15];
} ft_poison;

typedef struct ft_item {
  int32_t expert; /* layer * num_experts + expert */
  int32_t first_tile;
  int32_t last_tile;
  int32_t first_row; /* into the row list */
  int32_t num_rows;
  int32_t out_row; /* into out, in rows of H floats */
  uint64_t source; /* host address of the record, 4096-byte aligned; 0 = by expert id */
} ft_item;

typedef struct ft_io {
  ft_layout layout;
  ft_request request;
  ft_reply reply;
  ft_poison poison;
} ft_io;

#endif
