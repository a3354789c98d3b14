// Paged attention with grouped queries over blocks of 16 keys, in int8 or bfloat16.
//
// A block of one layer and one key head:
//   int8      keys + 128 [dim / 4][16 keys][4], values [8 pairs of keys][dim][2], key scales [16], value scales [16]
//   bfloat16  keys [dim / 2][16 keys][2], values [8 pairs of keys][dim][2]
//
// Keys are taken in splits of 256, counted from position 0; a split's result is (largest score, sum, weighted values),
// and splits are merged in the order of the keys, whoever computed them (FlashDecoding).  What a query does not see
// adds exactly nothing, so it does not matter which queries share a tile.
#pragma once
#include <algorithm>
#include <cstddef>

#include "rows.h"

namespace pl {

constexpr int kQueriesMost = 16;  // query vectors of a tile: rows times query heads of one key head
constexpr int kDimMost = 256;
constexpr int kSplitBlocks = PL_SPLIT / PL_BLOCK_SLOTS;
constexpr int kScoreStride = PL_SPLIT + 16 * kKeyBlocks;

struct Part {
  float most[kQueriesMost], sum[kQueriesMost];
  alignas(64) float values[kQueriesMost * kDimMost];  // [query][dim]: only as many as `part_bytes` says are there
};

// What is used of a Part, which is less than all of it by far for most models, and there are many in a long context.
inline int64_t part_bytes(int dim) { return offsetof(Part, values) + int64_t{4} * kQueriesMost * dim; }

struct Queries {
  int count;                                               // rows * heads
  int heads;                                               // of each row
  const int32_t* positions;                                // of the rows
  alignas(64) uint8_t codes[kQueriesMost * kDimMost * 2];  // [query][dim]
  float scales[kQueriesMost];
  int32_t start[kQueriesMost];
};

struct AttentionScratch {
  Queries queries;
  alignas(64) int32_t scores[kQueriesMost * kScoreStride];  // or floats
  alignas(64) uint16_t weights[kQueriesMost * PL_SPLIT];    // int16 or bfloat16
  Part part, next;
};

inline int64_t kv_bytes(int form, int dim) { return form == PL_KV_INT8 ? 32 * dim + 128 : 64 * dim; }

struct KvInt8 {
  using Sum = Ints;
  static constexpr int kKeyBytes = 1;
  static Sum zero() { return zero_ints(); }
  static void dot_keys(Sum& s, Ints keys, Ints query) { dot_u8(s, keys, query); }
  static void dot_values(Sum& s, Ints values, Ints weights) { dot_i16(s, values, weights); }
  static Ints load_values(const uint8_t* p, int chunk) {
    return load_pairs_i8(reinterpret_cast<const int8_t*>(p + 32 * chunk));
  }
  static void keep(int32_t* p, Sum s) { store_ints(p, s); }
  static Sum first(const Queries& q, int i) { return all_ints(q.start[i]); }
};

struct KvBf16 {
  using Sum = Floats;
  static constexpr int kKeyBytes = 2;
  static Sum zero() { return all(0.f); }
  static void dot_keys(Sum& s, Ints keys, Ints query) { dot_bf16(s, keys, query); }
  static void dot_values(Sum& s, Ints values, Ints weights) { dot_bf16(s, values, weights); }
  static Ints load_values(const uint8_t* p, int chunk) { return load_packed(p + 64 * chunk); }
  static void keep(int32_t* p, Sum s) { store(reinterpret_cast<float*>(p), s); }
  static Sum first(const Queries&, int) { return zero(); }
};

// Scores of `Count` queries from `first` against `kKeyBlocks` blocks; `later` is only fetched.
template <class Kv, int Count>
PL_KERNEL void score(const Queries& q, int first, int dim, const uint8_t* const* blocks, const uint8_t* const* later,
                     int32_t* out) {
  typename Kv::Sum s[Count][kKeyBlocks];
#pragma GCC unroll 16
  for (int r = 0; r < Count; r++)
#pragma GCC unroll 4
    for (int b = 0; b < kKeyBlocks; b++) s[r][b] = Kv::first(q, first + r);
  const uint8_t* query = q.codes + static_cast<int64_t>(first) * dim * Kv::kKeyBytes;
  const int stride = dim * Kv::kKeyBytes, values = 16 * stride;
  for (int d = 0; d < stride; d += 4) {
    Ints keys[kKeyBlocks];
#pragma GCC unroll 4
    for (int b = 0; b < kKeyBlocks; b++) keys[b] = load_packed(blocks[b] + d * 16);
    if (first == 0) {
#pragma GCC unroll 4
      for (int b = 0; b < kKeyBlocks; b++) {
        _mm_prefetch(reinterpret_cast<const char*>(later[b] + d * 16), _MM_HINT_T1);
        _mm_prefetch(reinterpret_cast<const char*>(blocks[b] + values + d * 16), _MM_HINT_T1);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < Count; r++) {
      const Ints x = broadcast4(query + r * stride + d);
#pragma GCC unroll 4
      for (int b = 0; b < kKeyBlocks; b++) Kv::dot_keys(s[r][b], keys[b], x);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Count; r++)
#pragma GCC unroll 4
    for (int b = 0; b < kKeyBlocks; b++) Kv::keep(out + (first + r) * kScoreStride + 16 * b, s[r][b]);
}

// Weighted values of `Count` queries from `first`, `Chunks` times 16 dimensions from `chunk`.
template <class Kv, int Count, int Chunks>
PL_KERNEL void weigh(const uint16_t* weights, int first, int dim, int chunk, const uint8_t* const* blocks, int count,
                     float* out) {
  typename Kv::Sum s[Count][Chunks];
#pragma GCC unroll 8
  for (int r = 0; r < Count; r++)
#pragma GCC unroll 4
    for (int c = 0; c < Chunks; c++) s[r][c] = Kv::zero();
  const uint16_t* w = weights + static_cast<int64_t>(first) * PL_SPLIT;
  for (int b = 0; b < count; b++, w += 16) {
    const uint8_t* values = blocks[b] + 16 * dim * Kv::kKeyBytes;
#pragma GCC unroll 1
    for (int j = 0; j < 8; j++, values += 2 * dim * Kv::kKeyBytes) {
      Ints v[Chunks];
#pragma GCC unroll 4
      for (int c = 0; c < Chunks; c++) v[c] = Kv::load_values(values, chunk + c);
#pragma GCC unroll 8
      for (int r = 0; r < Count; r++) {
        const Ints p = broadcast4(w + r * PL_SPLIT + 2 * j);
#pragma GCC unroll 4
        for (int c = 0; c < Chunks; c++) Kv::dot_values(s[r][c], v[c], p);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Count; r++)
#pragma GCC unroll 4
    for (int c = 0; c < Chunks; c++)
      Kv::keep(reinterpret_cast<int32_t*>(out) + (first + r) * dim + 16 * (chunk + c), s[r][c]);
}

// Calls f(std::integral_constant<int, count>) for a count of 1 .. Most.
template <int Most, class F>
inline void with_count(int count, F f) {
  if constexpr (Most > 1) {
    if (count < Most) return with_count<Most - 1>(count, f);
  }
  f(std::integral_constant<int, Most>());
}

// From scores to weights of one query: softmax without the division, 0 for what it does not see.
template <class Kv>
inline void soften(AttentionScratch& t, int r, int dim, const uint8_t* const* blocks, int count, int key, int low,
                   int high, Part& part, float& unit) {
  const Queries& q = t.queries;
  int32_t* scores = t.scores + r * kScoreStride;
  float* values = reinterpret_cast<float*>(scores);
  const float scale = 1.44269504f / std::sqrt(static_cast<float>(dim));
  const bool rounded = Kv::kKeyBytes == 1;
  const Floats factor = all(rounded ? q.scales[r] * scale : scale);
  const int scales = 32 * dim;                                  // where a block of int8 has them
  const bool hides = key + 16 * count - 1 > high || key < low;  // whether anything is not to be seen
  Floats most = all(-INFINITY);
  for (int b = 0; b < count; b++) {
    Floats v;
    if (rounded)
      v = mul(to_floats(load_ints(scores + 16 * b)),
              mul(factor, load(reinterpret_cast<const float*>(blocks[b] + scales))));
    else
      v = mul(load(values + 16 * b), factor);
    const int from = key + 16 * b;
    if (hides && (from + 15 > high || from < low)) v = lanes_between(v, low - from, high - from);
    most = max(most, v);
    store(values + 16 * b, v);
  }
  part.most[r] = max_of(most);
  const Floats peak = all(part.most[r]);
  Floats sum = all(0.f), heaviest = all(0.f);
  for (int b = 0; b < count; b++) {
    const Floats v = load(values + 16 * b);
    Floats p = exp2(sub(v, peak));
    if (hides) p = where_seen(v, p);
    sum = add(sum, p);
    if (rounded) {  // the scale of a value becomes part of its weight
      p = mul(p, load(reinterpret_cast<const float*>(blocks[b] + scales + 64)));
      if (hides) p = where_seen(v, p);
      heaviest = max(heaviest, p);
      store(values + 16 * b, p);
    } else {
      store_bf16(t.weights + r * PL_SPLIT + 16 * b, p);
    }
  }
  part.sum[r] = sum_of(sum);
  if (rounded) {  // 15-bit integers, relative to the heaviest of the split
    const float top = max_of(heaviest);
    unit = top / 32767.f;
    const Floats inverse = all(inverse_of(top, 32767.f));
    int16_t* weights = reinterpret_cast<int16_t*>(t.weights) + r * PL_SPLIT;
    for (int b = 0; b < count; b++) store_int16(weights + 16 * b, mul(load(values + 16 * b), inverse));
  }
}

// One split: `count` blocks from key `key` on.
template <class Kv>
PL_KERNEL void attend_split(AttentionScratch& t, int dim, int window, const uint8_t* const* blocks, int count, int key,
                            Part& part) {
  const Queries& q = t.queries;
  for (int b = 0; b < count; b += kKeyBlocks)
    for (int r = 0; r < q.count; r += kQueries)
      with_count<kQueries>(q.count - r, [&](auto n) {
        score<Kv, n>(q, r, dim, blocks + b, blocks + b + kKeyBlocks, t.scores + 16 * b);
      });
  float units[kQueriesMost];
  for (int r = 0; r < q.count; r++) {
    const int high = q.positions[r / q.heads], low = window > 0 ? high - window + 1 : 0;
    soften<Kv>(t, r, dim, blocks, count, key, low, high, part, units[r]);
  }
  const int chunks = dim / 16;
  for (int c = 0; c < chunks;) {
    const int some = chunks - c >= 4 ? 4 : chunks - c >= 2 ? 2 : 1;
    for (int r = 0; r < q.count; r += kQueries)
      with_count<kQueries>(q.count - r, [&](auto n) {
        if (some == 4)
          weigh<Kv, n, 4>(t.weights, r, dim, c, blocks, count, part.values);
        else if (some == 2)
          weigh<Kv, n, 2>(t.weights, r, dim, c, blocks, count, part.values);
        else
          weigh<Kv, n, 1>(t.weights, r, dim, c, blocks, count, part.values);
      });
    c += some;
  }
  if (Kv::kKeyBytes == 1)
    for (int r = 0; r < q.count; r++)
      for (int i = 0; i < dim; i += 16) {
        float* p = part.values + r * dim + i;
        store(p, mul(to_floats(load_ints(reinterpret_cast<int32_t*>(p))), all(units[r])));
      }
}

inline float exp2_of(float x) {
  alignas(64) float lanes[16];
  store(lanes, exp2(all(x)));
  return lanes[0];
}

// `to` and the keys after it.
inline void merge(Part& to, const Part& later, int queries, int dim) {
  for (int r = 0; r < queries; r++) {
    if (later.sum[r] == 0.f) continue;  // it saw nothing there
    const float most = std::max(to.most[r], later.most[r]);
    const float a = exp2_of(to.most[r] - most), b = exp2_of(later.most[r] - most);
    to.most[r] = most;
    to.sum[r] = to.sum[r] * a + later.sum[r] * b;
    for (int i = 0; i < dim; i += 16) {
      float* p = to.values + r * dim + i;
      store(p, fma(load(p), all(a), mul(load(later.values + r * dim + i), all(b))));
    }
  }
}

// Queries of `rows` rows and `heads` heads from x [row][head][dim] on, in the form of the keys.
template <class Kv>
inline void load_queries(Queries& q, const float* x, int64_t row_stride, int rows, int heads, int dim,
                         const int32_t* positions) {
  q.count = rows * heads;
  q.heads = heads;
  q.positions = positions;
  for (int i = 0; i < q.count; i++) {
    const float* from = x + (i / heads) * row_stride + (i % heads) * dim;
    if (Kv::kKeyBytes == 1) {
      const float most = largest(from, dim);
      int8_t* codes = reinterpret_cast<int8_t*>(q.codes) + i * dim;
      round_columns(from, dim, inverse_of(most, 127.f), codes);
      q.scales[i] = most / 127.f;
      int32_t sum = 0;
      for (int j = 0; j < dim; j++) sum += codes[j];
      q.start[i] = -kDotOffset * sum;
    } else {
      uint16_t* values = reinterpret_cast<uint16_t*>(q.codes) + i * dim;
      for (int j = 0; j < dim; j += 16) store_bf16(values + j, load(from + j));
    }
  }
}

// From here on bfloat16 rounds to infinity: half way from its largest number to what would be the next one.
constexpr float kBf16Infinite = 0x1.ffp127f;

// Keep a token's key and value in slot `slot` of a block.  What is no number, or would be none in the cache, is kept as
// 0, because whoever gets the block next multiplies what it does not see by 0; the answer is false then.
template <class Kv>
inline bool keep(uint8_t* block, int slot, const float* key, const float* value, int dim) {
  uint8_t* keys = block;
  uint8_t* values = block + 16 * dim * Kv::kKeyBytes + (slot >> 1) * 2 * dim * Kv::kKeyBytes;
  const float most_key = largest(key, dim), most_value = largest(value, dim);
  bool sound = std::isfinite(sum_of_row(key, dim) + sum_of_row(value, dim));
  if (Kv::kKeyBytes == 2) sound = sound && std::max(most_key, most_value) < kBf16Infinite;
  if (Kv::kKeyBytes == 1) {
    alignas(64) int8_t k[kDimMost], v[kDimMost];
    round_columns(key, dim, inverse_of(most_key, 127.f), k);
    round_columns(value, dim, inverse_of(most_value, 127.f), v);
    if (!sound) {
      std::memset(k, 0, sizeof k);
      std::memset(v, 0, sizeof v);
    }
    float* scales = reinterpret_cast<float*>(block + 32 * dim);
    scales[slot] = sound ? most_key / 127.f : 0.f;
    scales[16 + slot] = sound ? most_value / 127.f : 0.f;
    for (int i = 0; i < dim; i += 4) {
      uint32_t four;
      std::memcpy(&four, k + i, 4);
      four ^= 0x80808080u;  // + 128
      std::memcpy(keys + i * 16 + slot * 4, &four, 4);
    }
    for (int i = 0; i < dim; i++) values[2 * i + (slot & 1)] = static_cast<uint8_t>(v[i]);
  } else {
    alignas(64) uint16_t k[kDimMost], v[kDimMost];
    for (int i = 0; i < dim; i += 16) {
      store_bf16(k + i, sound ? load(key + i) : all(0.f));
      store_bf16(v + i, sound ? load(value + i) : all(0.f));
    }
    uint16_t* wide_keys = reinterpret_cast<uint16_t*>(keys);
    uint16_t* wide_values = reinterpret_cast<uint16_t*>(values);
    for (int i = 0; i < dim; i += 2) std::memcpy(wide_keys + i * 16 + slot * 2, k + i, 4);
    for (int i = 0; i < dim; i++) wide_values[2 * i + (slot & 1)] = v[i];
  }
  return sound;
}

}  // namespace pl
