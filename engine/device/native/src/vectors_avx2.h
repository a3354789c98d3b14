// Sixteen lanes in two registers: AVX2, FMA and F16C.  The same names as in `vectors_avx512.h`.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace pl {

struct Floats {
  __m256 a, b;
};
struct Ints {
  __m256i a, b;
};

constexpr int kRows = 3;  // rows of a tile: 12 of the 16 registers
constexpr int kRowsInt4 = 2;
constexpr int kQueries = 3;
constexpr int kKeyBlocks = 2;
constexpr int kDotOffset = 0;

inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Floats v) {
  _mm256_storeu_ps(p, v.a);
  _mm256_storeu_ps(p + 8, v.b);
}
inline Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats add(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Floats sub(Floats x, Floats y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Floats mul(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Floats div(Floats x, Floats y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Floats fma(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Floats max(Floats x, Floats y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Floats min(Floats x, Floats y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Floats abs(Floats x) {
  const __m256 sign = _mm256_set1_ps(-0.f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline Floats round(Floats x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
inline __m256 power_of_two8(__m256 n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
inline Floats power_of_two(Floats n) { return {power_of_two8(n.a), power_of_two8(n.b)}; }
inline float sum_of(Floats v) {
  const __m256 s = _mm256_add_ps(v.a, v.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
inline float max_of(Floats v) {
  const __m256 s = _mm256_max_ps(v.a, v.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}

// A Hadamard transform over the lanes, without its factor.
inline __m256 mix_lanes8(__m256 v) {
  const __m256 halves = _mm256_permute2f128_ps(v, v, 1);
  v = _mm256_blend_ps(_mm256_add_ps(v, halves), _mm256_sub_ps(halves, v), 0xf0);
  const __m256 pairs = _mm256_permute_ps(v, 0x4e);
  v = _mm256_blend_ps(_mm256_add_ps(v, pairs), _mm256_sub_ps(pairs, v), 0xcc);
  const __m256 next = _mm256_permute_ps(v, 0xb1);
  return _mm256_blend_ps(_mm256_add_ps(v, next), _mm256_sub_ps(next, v), 0xaa);
}
inline Floats mix_lanes(Floats v) { return {mix_lanes8(_mm256_add_ps(v.a, v.b)), mix_lanes8(_mm256_sub_ps(v.a, v.b))}; }

inline __m256i bytes32(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline Ints load_ints(const int32_t* p) { return {bytes32(p), bytes32(p + 8)}; }
inline void store_ints(int32_t* p, Ints v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), v.b);
}
inline Ints all_ints(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Ints mul_ints(Ints x, Ints y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
inline __m256i larger8(__m256i magnitude, __m256 x) {
  return _mm256_max_epi32(magnitude, _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff)));
}
inline Ints larger(Ints magnitude, Floats x) { return {larger8(magnitude.a, x.a), larger8(magnitude.b, x.b)}; }
inline int32_t max_of_ints(Ints v) {
  const __m256i s = _mm256_max_epi32(v.a, v.b);
  __m128i q = _mm_max_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
  q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}
inline Floats to_floats(Ints v) { return {_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)}; }

inline __m256 lanes_between8(__m256 v, __m256i lane, int first, int last) {
  const __m256i outside = _mm256_or_si256(_mm256_cmpgt_epi32(lane, _mm256_set1_epi32(last)),
                                          _mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane));
  return _mm256_blendv_ps(v, _mm256_set1_ps(-INFINITY), _mm256_castsi256_ps(outside));
}
inline Ints ids_from(int32_t first) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm256_add_epi32(lane, _mm256_set1_epi32(first)), _mm256_add_epi32(lane, _mm256_set1_epi32(first + 8))};
}
inline Floats lanes_between(Floats v, int first, int last) {
  const Ints lane = ids_from(0);
  return {lanes_between8(v.a, lane.a, first, last), lanes_between8(v.b, lane.b, first, last)};
}
inline __m256 where_seen8(__m256 guard, __m256 v) {
  return _mm256_and_ps(v, _mm256_cmp_ps(guard, _mm256_set1_ps(-INFINITY), _CMP_NEQ_UQ));
}
inline Floats where_seen(Floats guard, Floats v) { return {where_seen8(guard.a, v.a), where_seen8(guard.b, v.b)}; }
inline __m256 keep_from8(__m256 v, __m256 floor) { return _mm256_and_ps(v, _mm256_cmp_ps(v, floor, _CMP_GE_OQ)); }
inline Floats keep_from(Floats v, Floats floor) { return {keep_from8(v.a, floor.a), keep_from8(v.b, floor.b)}; }
inline void keep_best8(__m256& best, __m256i& ids, __m256 v, __m256i id) {
  const __m256 better = _mm256_cmp_ps(v, best, _CMP_GT_OQ);
  best = _mm256_blendv_ps(best, v, better);
  ids = _mm256_blendv_epi8(ids, id, _mm256_castps_si256(better));
}
inline void keep_best(Floats& best, Ints& ids, Floats v, Ints id) {
  keep_best8(best.a, ids.a, v.a, id.a);
  keep_best8(best.b, ids.b, v.b, id.b);
}

// 16 int32 as 16 int16, saturated, in order.
inline __m256i narrow16(Floats v) {
  const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b));
  return _mm256_permute4x64_epi64(packed, 0xd8);
}
inline void store_int8(int8_t* p, Floats v) {
  const __m256i words = narrow16(v);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
inline void store_int16(int16_t* p, Floats v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow16(v)); }
inline __m256i sum_bytes8(__m256i sum, __m256i bytes) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline Ints sum_bytes(Ints sum, const int8_t* p) {
  return {sum_bytes8(sum.a, bytes32(p)), sum_bytes8(sum.b, bytes32(p + 32))};
}
inline int32_t sum_of_ints(Ints v) {
  const __m256i s = _mm256_add_epi32(v.a, v.b);
  __m128i q = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
  q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}

inline __m128i bytes16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m256 load_bf16_8(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bytes16(p)), 16));
}
inline Floats load_bf16(const uint16_t* p) { return {load_bf16_8(p), load_bf16_8(p + 8)}; }
inline Floats load_f16(const uint16_t* p) { return {_mm256_cvtph_ps(bytes16(p)), _mm256_cvtph_ps(bytes16(p + 8))}; }
inline Ints load_bytes_as_ints(const uint8_t* p) {
  const __m128i bytes = bytes16(p);
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
inline __m256i to_bf16_8(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
}
inline void store_bf16(uint16_t* p, Floats v) {
  const __m256i packed = _mm256_packus_epi32(to_bf16_8(v.a), to_bf16_8(v.b));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}

inline Ints load_packed(const uint8_t* p) { return {bytes32(p), bytes32(p + 32)}; }
inline Ints low_halves(Ints v) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(v.a, mask), _mm256_and_si256(v.b, mask)};
}
inline Ints high_halves(Ints v) { return low_halves({_mm256_srli_epi16(v.a, 4), _mm256_srli_epi16(v.b, 4)}); }
inline Ints broadcast4(const void* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return all_ints(x);
}
// Bytes of 127 in 16-bit pairs do not saturate if the unsigned side is a magnitude: at most 128 * 127 * 2.  So the
// stored byte, w + 128, becomes w again, and w's sign moves over to the other side.
inline __m256i dot_u8_8(__m256i sum, __m256i u, __m256i s) {
  const __m256i w = _mm256_xor_si256(u, _mm256_set1_epi8(-128));
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(s, w));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline void dot_u8(Ints& sum, Ints u, Ints s) { sum = {dot_u8_8(sum.a, u.a, s.a), dot_u8_8(sum.b, u.b, s.b)}; }
inline __m256i dot_u4_8(__m256i sum, __m256i u, __m256i s) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1)));
}
inline void dot_u4(Ints& sum, Ints u, Ints s) { sum = {dot_u4_8(sum.a, u.a, s.a), dot_u4_8(sum.b, u.b, s.b)}; }
inline void dot_i16(Ints& sum, Ints x, Ints y) {
  sum = {_mm256_add_epi32(sum.a, _mm256_madd_epi16(x.a, y.a)), _mm256_add_epi32(sum.b, _mm256_madd_epi16(x.b, y.b))};
}
inline Ints load_pairs_i8(const int8_t* p) {
  return {_mm256_cvtepi8_epi16(bytes16(p)), _mm256_cvtepi8_epi16(bytes16(p + 16))};
}
inline __m256 dot_bf16_8(__m256 sum, __m256i x, __m256i y) {
  const __m256i high = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000));
  sum = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(y, 16)),
                        sum);
  return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(x, high)), _mm256_castsi256_ps(_mm256_and_si256(y, high)),
                         sum);
}
inline void dot_bf16(Floats& sum, Ints x, Ints y) { sum = {dot_bf16_8(sum.a, x.a, y.a), dot_bf16_8(sum.b, x.b, y.b)}; }
inline Ints zero_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }

}  // namespace pl
