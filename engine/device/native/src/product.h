// Matrix products: rows of activations times a packed weight.
//
// A tile is 32 output channels and all of the input, so there is no blocking over the input: its 128 bytes for each
// four inputs (int8), eight (int4) or two (bfloat16) are read once, in order, for up to `kRows..` rows.  Integer sums
// are exact, float sums run along the input, so a row's result does not depend on how many rows share a tile.
#pragma once
#include "rows.h"

namespace pl {

constexpr int64_t kAhead = 4096;  // bytes that a lone row prefetches ahead

struct Prefetch {
  const uint8_t* from;
  int step;  // bytes for each 128 of this tile
};

// ---- int8

template <int Rows>
PL_KERNEL void dot_int8(const uint8_t* w, int quads, const uint8_t* a, int64_t stride, const int32_t* start,
                        int32_t* out, Prefetch next) {
  constexpr int kTriples = (Rows + 2) / 3;
  Ints c[Rows][2];
  const uint8_t* row[kTriples];
#pragma GCC unroll 16
  for (int i = 0; i < Rows; i++) c[i][0] = c[i][1] = all_ints(start[i]);
#pragma GCC unroll 4
  for (int i = 0; i < kTriples; i++) row[i] = a + 3 * i * stride;
  for (int k = 0; k < quads; k++, w += 128, next.from += next.step) {
    if (Rows == 1 || Rows >= 5) {  // in between, it costs more than it hides
      _mm_prefetch(reinterpret_cast<const char*>(next.from), _MM_HINT_T1);
      _mm_prefetch(reinterpret_cast<const char*>(next.from + 64), _MM_HINT_T1);
    }
    const Ints w0 = load_packed(w), w1 = load_packed(w + 64);
    // A pointer for every three rows, which an address can name as x, x + stride and x + 2 * stride.  Left alone the
    // compiler keeps an offset for every row, in more registers than there are.
#pragma GCC unroll 4
    for (int i = 0; i < kTriples; i++) asm("" : "+r"(row[i]));
#pragma GCC unroll 16
    for (int i = 0; i < Rows; i++) {
      const Ints b = broadcast4(row[i / 3] + (i % 3) * stride);
      dot_u8(c[i][0], w0, b);
      dot_u8(c[i][1], w1, b);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kTriples; i++) row[i] += 4;
  }
#pragma GCC unroll 16
  for (int i = 0; i < Rows; i++) {
    store_ints(out + i * 32, c[i][0]);
    store_ints(out + i * 32 + 16, c[i][1]);
  }
}

// ---- int4: a group is `group / 8` times 128 bytes (low halves: the first four inputs of eight), 32 float16 scales,
// and for asymmetric weights 32 bytes of zero points

template <int Rows, bool Asymmetric>
PL_KERNEL void dot_int4(const uint8_t* w, int groups, int eights, const uint8_t* a, int64_t stride, const float* scales,
                        const int32_t* sums, int64_t group_stride, float* out) {
  Floats f[Rows][2];
#pragma GCC unroll 8
  for (int i = 0; i < Rows; i++) f[i][0] = f[i][1] = all(0.f);
  for (int g = 0; g < groups; g++) {
    Ints c[Rows][2];
    const uint8_t* tail = w + 128 * eights;
#pragma GCC unroll 8
    for (int i = 0; i < Rows; i++) {
      const int32_t sum = sums[i * group_stride + g];
      if (Asymmetric) {
        c[i][0] = mul_ints(load_bytes_as_ints(tail + 64), all_ints(-sum));
        c[i][1] = mul_ints(load_bytes_as_ints(tail + 80), all_ints(-sum));
      } else {
        c[i][0] = c[i][1] = all_ints(-8 * sum);
      }
    }
#pragma GCC unroll 1
    for (int k = 0; k < eights; k++, w += 128, a += 8) {
      const Ints x0 = load_packed(w), x1 = load_packed(w + 64);
      const Ints l0 = low_halves(x0), l1 = low_halves(x1), h0 = high_halves(x0), h1 = high_halves(x1);
#pragma GCC unroll 8
      for (int i = 0; i < Rows; i++) {
        const Ints b = broadcast4(a + i * stride), d = broadcast4(a + i * stride + 4);
        dot_u4(c[i][0], l0, b);
        dot_u4(c[i][1], l1, b);
        dot_u4(c[i][0], h0, d);
        dot_u4(c[i][1], h1, d);
      }
    }
    const Floats s0 = load_f16(reinterpret_cast<const uint16_t*>(w)),
                 s1 = load_f16(reinterpret_cast<const uint16_t*>(w + 32));
    w = tail + (Asymmetric ? 128 : 64);
#pragma GCC unroll 8
    for (int i = 0; i < Rows; i++) {
      const Floats q = all(scales[i * group_stride + g]);
      f[i][0] = fma(to_floats(c[i][0]), mul(s0, q), f[i][0]);
      f[i][1] = fma(to_floats(c[i][1]), mul(s1, q), f[i][1]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; i++) {
    store(out + i * 32, f[i][0]);
    store(out + i * 32 + 16, f[i][1]);
  }
}

// ---- bfloat16

template <int Rows>
PL_KERNEL void dot_bf16_rows(const uint8_t* w, int pairs, const uint8_t* a, int64_t stride, float* out, Prefetch next) {
  Floats c[Rows][2];
#pragma GCC unroll 16
  for (int i = 0; i < Rows; i++) c[i][0] = c[i][1] = all(0.f);
  for (int k = 0; k < pairs; k++, w += 128, a += 4, next.from += next.step) {
    if (Rows == 1 || Rows >= 5) {
      _mm_prefetch(reinterpret_cast<const char*>(next.from), _MM_HINT_T1);
      _mm_prefetch(reinterpret_cast<const char*>(next.from + 64), _MM_HINT_T1);
    }
    const Ints w0 = load_packed(w), w1 = load_packed(w + 64);
#pragma GCC unroll 16
    for (int i = 0; i < Rows; i++) {
      const Ints b = broadcast4(a + i * stride);
      dot_bf16(c[i][0], w0, b);
      dot_bf16(c[i][1], w1, b);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < Rows; i++) {
    store(out + i * 32, c[i][0]);
    store(out + i * 32 + 16, c[i][1]);
  }
}

// A table of one kernel for each row count 1 .. N, without a line for each.
template <int N, template <int> class Entry>
struct Table {
  typename Entry<1>::Type at[N + 1];
  Table() { fill<N>(); }
  template <int I>
  void fill() {
    at[I] = Entry<I>::value;
    if constexpr (I > 1) fill<I - 1>();
  }
};
template <int R>
struct Int8Entry {
  using Type = void (*)(const uint8_t*, int, const uint8_t*, int64_t, const int32_t*, int32_t*, Prefetch);
  static constexpr Type value = dot_int8<R>;
};
template <int R>
struct Bf16Entry {
  using Type = void (*)(const uint8_t*, int, const uint8_t*, int64_t, float*, Prefetch);
  static constexpr Type value = dot_bf16_rows<R>;
};
using Int4Kernel = void (*)(const uint8_t*, int, int, const uint8_t*, int64_t, const float*, const int32_t*, int64_t,
                            float*);
template <int R>
struct Int4Entry {
  using Type = Int4Kernel;
  static constexpr Type value = dot_int4<R, false>;
};
template <int R>
struct Int4AsymmetricEntry {
  using Type = Int4Kernel;
  static constexpr Type value = dot_int4<R, true>;
};
static const Table<kRows, Int8Entry> int8_kernels;
static const Table<kRows, Bf16Entry> bf16_kernels;
static const Table<kRowsInt4, Int4Entry> int4_kernels;
static const Table<kRowsInt4, Int4AsymmetricEntry> int4_asymmetric_kernels;

inline int64_t int4_group_bytes(int group, bool asymmetric) { return group * 16 + (asymmetric ? 128 : 64); }

inline int64_t tile_bytes(int form, int ins, int group, bool asymmetric) {
  switch (form) {
    case PL_INT8: return static_cast<int64_t>(ins) * 32;
    case PL_INT4: return ins / group * int4_group_bytes(group, asymmetric);
    default: return static_cast<int64_t>(ins) * 64;
  }
}

// Rows of activations side by side: what `prepare` made of each.
struct Rows {
  uint8_t* bytes;
  float* scales;
  int32_t* sums;
  int64_t stride;        // bytes of a row
  int64_t group_stride;  // scales and sums of a row
  Activations row(int r) const { return {bytes + r * stride, scales + r * group_stride, sums + r * group_stride}; }
  Rows from(int r) const {
    return {bytes + r * stride, scales + r * group_stride, sums + r * group_stride, stride, group_stride};
  }
};

constexpr int kRowsMost = kRows > kRowsInt4 ? kRows : kRowsInt4;

// `take(row, channel, y0, y1)` gets 32 outputs of a row at a time, for the tiles of this share of the channels.
template <class Take>
inline void product(const pl_weight& weight, const Rows& a, int rows, int share, int shares, Take take) {
  const int tiles = weight.outs / PL_TILE;
  const int first = static_cast<int>(static_cast<int64_t>(tiles) * share / shares);
  const int stop = static_cast<int>(static_cast<int64_t>(tiles) * (share + 1) / shares);
  const int64_t bytes = tile_bytes(weight.form, weight.ins, weight.group, weight.asymmetric != 0);
  const int most = weight.form == PL_INT4 ? kRowsInt4 : kRows;
  alignas(64) int32_t sums[kRowsMost * PL_TILE];
  alignas(64) float values[kRowsMost * PL_TILE];
  int32_t start[kRowsMost];
  const int chunks = (rows + most - 1) / most;
  for (int tile = first; tile < stop; tile++) {
    const uint8_t* w = weight.data + tile * bytes;
    const int channel = tile * PL_TILE;
    const Floats s0 = load(weight.scale + channel), s1 = load(weight.scale + channel + 16);
    const bool biased = weight.bias != nullptr;
    const Floats b0 = biased ? load(weight.bias + channel) : all(0.f);
    const Floats b1 = biased ? load(weight.bias + channel + 16) : all(0.f);
    // The next tile is fetched meanwhile, its bytes spread over the chunks of rows; a lone row looks ahead in its own.
    Prefetch next = {chunks == 1 ? w + kAhead : w + bytes, chunks == 1 ? 128 : 128 / chunks < 8 ? 8 : 128 / chunks};
    int row = 0;
    for (int left = chunks; left > 0; left--) {
      const int count = (rows - row + left - 1) / left;
      const Rows some = a.from(row);
      if (weight.form == PL_INT8) {
        for (int i = 0; i < count; i++) start[i] = -kDotOffset * some.sums[i * some.group_stride];
        int8_kernels.at[count](w, weight.ins / 4, some.bytes, some.stride, start, sums, next);
        next.from += static_cast<int64_t>(next.step) * (weight.ins / 4) * (chunks > 1);
        for (int i = 0; i < count; i++) {
          const Floats q = all(some.scales[i * some.group_stride]);
          take(row + i, channel, fma(to_floats(load_ints(sums + i * 32)), mul(s0, q), b0),
               fma(to_floats(load_ints(sums + i * 32 + 16)), mul(s1, q), b1));
        }
      } else {
        if (weight.form == PL_INT4) {
          const auto& kernels = weight.asymmetric ? int4_asymmetric_kernels.at : int4_kernels.at;
          kernels[count](w, weight.ins / weight.group, weight.group / 8, some.bytes, some.stride, some.scales,
                         some.sums, some.group_stride, values);
        } else {
          bf16_kernels.at[count](w, weight.ins / 2, some.bytes, some.stride, values, next);
          next.from += static_cast<int64_t>(next.step) * (weight.ins / 2) * (chunks > 1);
        }
        for (int i = 0; i < count; i++)
          take(row + i, channel, fma(load(values + i * 32), s0, b0), fma(load(values + i * 32 + 16), s1, b1));
      }
      row += count;
    }
  }
}

}  // namespace pl
