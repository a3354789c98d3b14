// A plan, read and checked: after this nothing that a step uses as an index can lead beyond its memory.
#pragma once
#include <vector>

#include "pellucid.h"

namespace pl {

// What a plan may name.
struct Bounds {
  int rows, tokens, positions, blocks;
};

struct Tile {
  int row, count;
};

class Plan {
 public:
  std::vector<int32_t> tokens, positions, slices;  // of each row
  std::vector<const int32_t*> tables;              // of each slice
  std::vector<int32_t> out_rows, logit_rows;       // of each sampling row: its row, its place in the logits or -1
  std::vector<Tile> tiles;                         // rows of one slice that attend together

  int rows() const { return static_cast<int>(tokens.size()); }
  int outs() const { return static_cast<int>(out_rows.size()); }
  const int32_t* table(int row) const { return tables[slices[row]]; }

  // PL_OK, or why not.  `args.plan` must stay as it is while the step runs.
  int32_t read(const pl_step_args& args, const Bounds& bounds, int tile_rows) {
    clear();
    if (written_.size() != static_cast<size_t>(bounds.blocks)) written_.assign(static_cast<size_t>(bounds.blocks), 0);
    stamp_++;
    const int32_t *p = args.plan, *end = p + args.plan_length;
    int wanted = 0;
    for (int slice = 0; slice < args.slices; slice++) {
      if (end - p < 4) return PL_BAD_PLAN;
      const int32_t start = p[0], count = p[1], blocks = p[2], outs = p[3];
      p += 4;
      if (count < 1 || blocks < 1 || outs < 0 || outs > count) return PL_BAD_PLAN;
      if (end - p < int64_t{outs} + count + blocks) return PL_BAD_PLAN;
      if (count > bounds.rows - rows()) return PL_BAD_ROWS;
      if (start < 0 || start > bounds.positions - count) return PL_BAD_POSITION;
      const int32_t fault = read_slice(slice, start, count, blocks, outs, p, bounds, wanted);
      if (fault != PL_OK) return fault;
      for (int r = 0; r < count; r += tile_rows)
        tiles.push_back({rows() - count + r, count - r < tile_rows ? count - r : tile_rows});
      p += int64_t{outs} + count + blocks;
    }
    const bool as_told = p == end && rows() == args.rows && outs() == args.outs && wanted == args.wanted;
    return as_told && rows() > 0 ? PL_OK : PL_BAD_PLAN;
  }

 private:
  std::vector<int64_t> written_;  // of each block: the step that last wrote it
  int64_t stamp_ = 0;

  void clear() {
    tokens.clear();
    positions.clear();
    slices.clear();
    tables.clear();
    out_rows.clear();
    logit_rows.clear();
    tiles.clear();
  }

  int32_t read_slice(int slice, int start, int count, int blocks, int outs, const int32_t* p, const Bounds& bounds,
                     int& wanted) {
    const int32_t *flags = p, *ids = p + outs, *table = ids + count;
    const int first = rows(), used = (start + count - 1) / PL_BLOCK_SLOTS + 1;
    if (blocks < used) return PL_BAD_BLOCK;
    for (int b = 0; b < used; b++)
      if (table[b] < 0 || table[b] >= bounds.blocks) return PL_BAD_BLOCK;
    for (int b = start / PL_BLOCK_SLOTS; b < used; b++) {  // two slices that write one block would spoil each other
      if (written_[table[b]] == stamp_) return PL_BAD_BLOCK;
      written_[table[b]] = stamp_;
    }
    for (int i = 0; i < count; i++) {
      if (ids[i] < 0 || ids[i] >= bounds.tokens) return PL_BAD_TOKEN;
      tokens.push_back(ids[i]);
      positions.push_back(start + i);
      slices.push_back(slice);
    }
    tables.push_back(table);
    for (int i = 0; i < outs; i++) {
      if (flags[i] != 0 && flags[i] != 1) return PL_BAD_PLAN;
      out_rows.push_back(first + count - outs + i);
      logit_rows.push_back(flags[i] ? wanted++ : -1);
    }
    return PL_OK;
  }
};

}  // namespace pl
