// Sixteen lanes in one register: AVX-512 F, BW, DQ, VL and VNNI, and BF16 where the compiler may use it.
// `vectors_avx2.h` has the same names.  What is written with them gives the same bits for any number of rows.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX512BF16__
#define PL_NATIVE_BF16 1
#else
#define PL_NATIVE_BF16 0
#endif

namespace pl {

using Floats = __m512;  // 16 float32
using Ints = __m512i;   // 16 int32

constexpr int kRows = 12;        // rows of a tile of the int8 product: 24 accumulators
constexpr int kRowsInt4 = 6;     // of the products that keep float sums beside
constexpr int kQueries = 6;      // query vectors of a tile of attention
constexpr int kKeyBlocks = 4;    // key blocks of 16 that share it
constexpr int kDotOffset = 128;  // what `dot_u8` leaves in the sum for each unit of the signed side

inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats abs(Floats a) { return _mm512_abs_ps(a); }
inline Floats round(Floats a) { return _mm512_roundscale_ps(a, 0); }
// 2 ** n for whole n in -126 .. 127
inline Floats power_of_two(Floats n) { return _mm512_scalef_ps(_mm512_set1_ps(1.f), n); }
inline float sum_of(Floats v) { return _mm512_reduce_add_ps(v); }
inline float max_of(Floats v) { return _mm512_reduce_max_ps(v); }

inline Ints load_ints(const int32_t* p) { return _mm512_loadu_si512(p); }
inline void store_ints(int32_t* p, Ints v) { _mm512_storeu_si512(p, v); }
inline Ints all_ints(int32_t x) { return _mm512_set1_epi32(x); }
inline Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints mul_ints(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
// The larger magnitude of each lane, as its bits; what is no number is larger than all that are.
inline Ints larger(Ints magnitude, Floats x) {
  return _mm512_max_epi32(magnitude, _mm512_and_si512(_mm512_castps_si512(x), all_ints(0x7fffffff)));
}
inline int32_t max_of_ints(Ints v) { return _mm512_reduce_max_epi32(v); }
inline Floats to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }

// A Hadamard transform over the lanes, without its factor.
inline Floats mix_lanes(Floats v) {
  v = _mm512_mask_sub_ps(_mm512_add_ps(v, _mm512_shuffle_f32x4(v, v, 0x4e)), 0xff00, _mm512_shuffle_f32x4(v, v, 0x4e),
                         v);
  v = _mm512_mask_sub_ps(_mm512_add_ps(v, _mm512_shuffle_f32x4(v, v, 0xb1)), 0xf0f0, _mm512_shuffle_f32x4(v, v, 0xb1),
                         v);
  v = _mm512_mask_sub_ps(_mm512_add_ps(v, _mm512_permute_ps(v, 0x4e)), 0xcccc, _mm512_permute_ps(v, 0x4e), v);
  return _mm512_mask_sub_ps(_mm512_add_ps(v, _mm512_permute_ps(v, 0xb1)), 0xaaaa, _mm512_permute_ps(v, 0xb1), v);
}

// Lanes first .. last of `v`, minus infinity elsewhere.
inline Floats lanes_between(Floats v, int first, int last) {
  const Ints lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __mmask16 keep = _mm512_cmple_epi32_mask(lane, all_ints(last)) & _mm512_cmpge_epi32_mask(lane, all_ints(first));
  return _mm512_mask_mov_ps(all(-INFINITY), keep, v);
}
// `v` where `guard` is above minus infinity, 0 elsewhere.
inline Floats where_seen(Floats guard, Floats v) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(guard, all(-INFINITY), _CMP_NEQ_UQ), v);
}
// `v` where it is at least `floor`, 0 elsewhere.
inline Floats keep_from(Floats v, Floats floor) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(v, floor, _CMP_GE_OQ), v);
}
// The best values and their ids, lane by lane; an equal value that comes later does not win.
inline void keep_best(Floats& best, Ints& ids, Floats v, Ints id) {
  const __mmask16 better = _mm512_cmp_ps_mask(v, best, _CMP_GT_OQ);
  best = _mm512_mask_mov_ps(best, better, v);
  ids = _mm512_mask_mov_epi32(ids, better, id);
}
inline Ints ids_from(int32_t first) {
  return add_ints(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), all_ints(first));
}

// To 16 bytes, or 16 int16, rounded to nearest even, saturated.
inline void store_int8(int8_t* p, Floats v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)));
}
inline void store_int16(int16_t* p, Floats v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(v)));
}
// The sum of 64 signed bytes, four to a lane.
inline Ints sum_bytes(Ints sum, const int8_t* p) {
  return _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), _mm512_loadu_si512(p));
}
inline int32_t sum_of_ints(Ints v) { return _mm512_reduce_add_epi32(v); }

inline Floats load_bf16(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline Floats load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Ints load_bytes_as_ints(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// Round to nearest even; no number stays none.
inline void store_bf16(uint16_t* p, Floats v) {
#if PL_NATIVE_BF16
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
#else
  const Ints bits = _mm512_castps_si512(v);
  const Ints odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), all_ints(1));
  Ints rounded = _mm512_srli_epi32(add_ints(add_ints(bits, odd), all_ints(0x7fff)), 16);
  rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), all_ints(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
#endif
}

// ---- what products are made of.  Loads of weights are aligned to 64 bytes.

inline Ints load_packed(const uint8_t* p) { return _mm512_load_si512(p); }
inline Ints low_halves(Ints v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline Ints high_halves(Ints v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
inline Ints broadcast4(const void* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return _mm512_set1_epi32(x);
}
// Four products a lane, of unsigned bytes `u` and signed bytes `s`.  In asm: with the intrinsic gcc 12 copies and
// spills the accumulators of the larger tiles.
inline __attribute__((always_inline)) void dot_u8(Ints& sum, Ints u, Ints s) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u), "v"(s));
}
// The same for bytes of which the unsigned side is at most 15, with no offset anywhere.
inline __attribute__((always_inline)) void dot_u4(Ints& sum, Ints u, Ints s) { dot_u8(sum, u, s); }
// Two products a lane, of signed 16-bit integers.
inline __attribute__((always_inline)) void dot_i16(Ints& sum, Ints a, Ints b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
}
// 32 signed bytes as 16 pairs of int16.
inline Ints load_pairs_i8(const int8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
}
// Two products a lane, of bfloat16.
inline __attribute__((always_inline)) void dot_bf16(Floats& sum, Ints a, Ints b) {
#if PL_NATIVE_BF16
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#else
  const Ints high = all_ints(static_cast<int32_t>(0xffff0000));
  sum = fma(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), sum);
  sum = fma(_mm512_castsi512_ps(_mm512_and_si512(a, high)), _mm512_castsi512_ps(_mm512_and_si512(b, high)), sum);
#endif
}
inline Ints zero_ints() { return _mm512_setzero_si512(); }

}  // namespace pl
