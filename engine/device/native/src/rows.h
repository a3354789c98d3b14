// What is done to one row at a time: norms, rounding to 8 bits, the Hadamard mix, rotary positions.
// Each has one order of summation, whatever the other rows are.
#pragma once
#include "pellucid.h"
#include "vectors.h"

namespace pl {

#define PL_KERNEL static __attribute__((noinline))  // inlined into a large function, gcc 12 spills the accumulators

constexpr int kWide = 64;  // columns a pass
constexpr int padded(int n, int to) { return (n + to - 1) / to * to; }

// 2 ** x by a polynomial of degree 6 on the fraction: relative error below 2e-7, exactly 1 at 0, 2 ** -126 below -126.
// What is no number stays none: of max's arguments the second one is given back then.
inline Floats exp2(Floats x) {
  x = max(all(-126.f), x);
  const Floats whole = round(x), f = sub(x, whole);
  Floats p = all(1.5403530e-4f);
  p = fma(p, f, all(1.3333558e-3f));
  p = fma(p, f, all(9.6181291e-3f));
  p = fma(p, f, all(5.5504109e-2f));
  p = fma(p, f, all(2.4022651e-1f));
  p = fma(p, f, all(6.9314718e-1f));
  p = fma(p, f, all(1.f));
  return mul(p, power_of_two(whole));
}

inline Floats silu(Floats x) {
  const Floats e = exp2(min(mul(x, all(-1.44269504f)), all(126.f)));
  return div(x, add(all(1.f), e));
}

// A row of activations in the form that a product wants.
struct Activations {
  uint8_t* bytes;  // int8 or bfloat16
  float* scales;   // one, or one a group
  int32_t* sums;   // of the codes: the whole row's, or one a group
};

// The largest magnitude; no number if any column is none, so that a scale made of it spoils the whole row.
inline float largest(const float* x, int columns) {
  Ints m = zero_ints();
  for (int i = 0; i < columns; i += 16) m = larger(m, load(x + i));
  const int32_t bits = max_of_ints(m);
  float most;
  std::memcpy(&most, &bits, sizeof most);
  return most;
}

// `levels / most`; 0 for what is too small to be divided by, infinite, or no number.
inline float inverse_of(float most, float levels) { return most > 1e-30f ? levels / most : 0.f; }

// Finite exactly if all columns are, and nothing overflows on the way.
inline float sum_of_row(const float* x, int columns) {
  Floats s = all(0.f);
  for (int i = 0; i < columns; i += 16) s = add(s, abs(load(x + i)));
  return sum_of(s);
}

// Codes of some columns: x / scale, rounded to nearest even.
inline void round_columns(const float* x, int columns, float inverse, int8_t* codes) {
  for (int i = 0; i < columns; i += 16) store_int8(codes + i, mul(load(x + i), all(inverse)));
}

// One scale a row: largest / 127.
inline void round_row(const float* x, int columns, float most, const Activations& to) {
  int8_t* codes = reinterpret_cast<int8_t*>(to.bytes);
  *to.scales = most / 127.f;
  const Floats inverse = all(inverse_of(most, 127.f));
  Ints sum = zero_ints();
  for (int i = 0; i < columns; i += kWide) {
    for (int j = i; j < i + kWide; j += 16) store_int8(codes + j, mul(load(x + j), inverse));
    sum = sum_bytes(sum, codes + i);
  }
  *to.sums = sum_of_ints(sum);
}

// One scale for each `group` columns, a multiple of 32; columns beyond the last whole group are zeros.
inline void round_groups(const float* x, int columns, int group, const Activations& to) {
  int8_t* codes = reinterpret_cast<int8_t*>(to.bytes);
  for (int g = 0; g < columns / group; g++, x += group, codes += group) {
    const float most = largest(x, group);
    to.scales[g] = most / 127.f;
    round_columns(x, group, inverse_of(most, 127.f), codes);
    int32_t sum = 0;
    for (int i = 0; i < group; i++) sum += codes[i];
    to.sums[g] = sum;
  }
}

inline void round_to_bf16(const float* x, int columns, const Activations& to) {
  uint16_t* values = reinterpret_cast<uint16_t*>(to.bytes);
  for (int i = 0; i < columns; i += 16) store_bf16(values + i, load(x + i));
}

// Into the form that `weight` multiplies.  `x` may be overwritten.
inline void prepare(float* x, float* scratch, const pl_weight& weight, const Activations& to) {
  if (weight.order != nullptr) {
    for (int i = 0; i < weight.ins; i++) scratch[i] = x[weight.order[i]];
    x = scratch;
  }
  switch (weight.form) {
    case PL_INT8: round_row(x, weight.ins, largest(x, weight.ins), to); break;
    case PL_INT4: round_groups(x, weight.ins, weight.group, to); break;
    default: round_to_bf16(x, weight.ins, to);
  }
}

// RMSNorm: y = x / sqrt(mean(x ** 2) + epsilon) * weight.  The columns beyond `columns` are zeros in x and weight.
inline void norm(const float* x, const float* weight, int columns, float epsilon, float* y) {
  const int stop = padded(columns, kWide);
  Floats sums[4] = {all(0.f), all(0.f), all(0.f), all(0.f)};
  for (int i = 0; i < stop; i += kWide)
    for (int j = 0; j < 4; j++) {
      const Floats v = load(x + i + 16 * j);
      sums[j] = fma(v, v, sums[j]);
    }
  const float square = sum_of(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  const Floats r = all(1.f / std::sqrt(square / static_cast<float>(columns) + epsilon));
  for (int i = 0; i < stop; i += 16) store(y + i, mul(mul(load(x + i), r), load(weight + i)));
}

// The same for a head, whose size is a multiple of 16 and which is changed in place.
inline void norm_head(float* x, const float* weight, int columns, float epsilon) {
  Floats sum = all(0.f);
  for (int i = 0; i < columns; i += 16) sum = fma(load(x + i), load(x + i), sum);
  const Floats r = all(1.f / std::sqrt(sum_of(sum) / static_cast<float>(columns) + epsilon));
  for (int i = 0; i < columns; i += 16) store(x + i, mul(mul(load(x + i), r), load(weight + i)));
}

// A Hadamard transform over `Points` vectors, without its factor.
template <int Points>
inline __attribute__((always_inline)) void butterfly(Floats* v) {
#pragma GCC unroll 4
  for (int apart = 1; apart < Points; apart *= 2)
#pragma GCC unroll 16
    for (int i = 0; i < Points; i++)
      if (!(i & apart)) {
        const Floats p = v[i], q = v[i + apart];
        v[i] = add(p, q);
        v[i + apart] = sub(p, q);
      }
}

template <int Points>
inline void mix_runs(const float* from, float* to, int columns) {
  const Floats scale = all(1.f / std::sqrt(static_cast<float>(Points)));
  for (int i = 0; i < columns; i += Points * 16) {
    Floats v[Points];
#pragma GCC unroll 16
    for (int j = 0; j < Points; j++) v[j] = load(from + i + 16 * j);
    butterfly<Points>(v);
#pragma GCC unroll 16
    for (int j = 0; j < Points; j++) store(to + i + 16 * j, mul(v[j], scale));
  }
}

// 32 points as two times 16, which is what the registers hold.
inline void mix_runs_of_32(const float* from, float* to, int columns) {
  const Floats scale = all(1.f / std::sqrt(32.f));
  for (int i = 0; i < columns; i += 512, from += 512, to += 512) {
    for (int half = 0; half < 512; half += 256) {
      Floats v[16];
#pragma GCC unroll 16
      for (int j = 0; j < 16; j++) v[j] = load(from + half + 16 * j);
      butterfly<16>(v);
#pragma GCC unroll 16
      for (int j = 0; j < 16; j++) store(to + half + 16 * j, v[j]);
    }
    for (int j = 0; j < 256; j += 16) {
      const Floats p = load(to + j), q = load(to + 256 + j);
      store(to + j, mul(add(p, q), scale));
      store(to + 256 + j, mul(sub(p, q), scale));
    }
  }
}

// An orthogonal mix of the channels of each run of `points` * 16: a Hadamard transform over vectors of 16 lanes, so
// that no lane has to move (QuaRot, Ashkboos et al. 2024, 4: the online transform before the down projection).
inline void mix(const float* from, float* to, int columns, int points) {
  switch (points) {
    case 2: mix_runs<2>(from, to, columns); break;
    case 4: mix_runs<4>(from, to, columns); break;
    case 8: mix_runs<8>(from, to, columns); break;
    case 16: mix_runs<16>(from, to, columns); break;
    case 32: mix_runs_of_32(from, to, columns); break;
    default: std::memcpy(to, from, sizeof(float) * static_cast<size_t>(columns)); break;
  }
}

// The same mix for all channels of a query or a key, in place: no score is another one, and no channel far larger than
// the others when they are rounded to 8 bits (QuaRot, 4: the cache of keys).  Of 16 channels, and of all vectors of
// them if their number is a power of two.
inline void spread(float* head, int dim) {
  const int vectors = dim / 16, points = vectors & -vectors;
  for (int i = 0; i < dim; i += 16) store(head + i, mul(mix_lanes(load(head + i)), all(0.25f)));
  if (points > 1) mix(head, head, dim, points);
}

// Rotary positions in the half-rotated form: pairs are (i, i + head_dim / 2).
inline void rotate(float* head, const float* cosine, const float* sine, int half) {
  int i = 0;
  for (; i + 16 <= half; i += 16) {
    const Floats a = load(head + i), b = load(head + half + i), c = load(cosine + i), s = load(sine + i);
    store(head + i, sub(mul(a, c), mul(b, s)));
    store(head + half + i, add(mul(b, c), mul(a, s)));
  }
  for (; i < half; i++) {
    const float a = head[i], b = head[half + i];
    head[i] = a * cosine[i] - b * sine[i];
    head[half + i] = b * cosine[i] + a * sine[i];
  }
}

}  // namespace pl
