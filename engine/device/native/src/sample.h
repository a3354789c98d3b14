// One token at random for each row of logits, as `engine/device/sampler.py` says it; that is also the oracle of its
// tests.
#pragma once
#include <algorithm>

#include "rows.h"

namespace pl {

constexpr int kSpan = 1024;  // probabilities that are summed up together on the way to one token

struct Candidate {
  float logit, weight;
  int32_t id;
};

// What drawing one token needs.  The caller has it ready before it starts threads: nobody could say of one of them that
// there is no memory.
struct DrawRoom {
  float* weights;   // of all tokens, in whole spans
  double* sums;     // [spans_of(vocab) + 1]
  Candidate* best;  // [vocab], for what `is_ranked`
};

inline int64_t spans_of(int64_t vocab) { return (vocab + kSpan - 1) / kSpan; }
inline bool is_ranked(const pl_draw& draw) { return draw.top_k > 0 || draw.top_p < 1; }

// Likeliest first, equal ones by id.
inline bool before(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

// exp((logit - largest) / temperature) of every token, 0 for minus infinity and for what min_p cuts off.  `weights` has
// room for whole spans.
inline void weigh_tokens(const float* logits, int64_t vocab, double temperature, float least, float* weights) {
  float most = -INFINITY;
  for (int64_t i = 0; i < vocab; i++) most = std::max(most, logits[i]);
  const Floats peak = all(most), scale = all(static_cast<float>(1.4426950408889634 / temperature)), floor = all(least);
  alignas(64) float last[16];
  for (int64_t i = 0; i < vocab; i += 16) {
    const float* from = logits + i;
    if (i + 16 > vocab) {
      for (int j = 0; j < 16; j++) last[j] = i + j < vocab ? logits[i + j] : -INFINITY;
      from = last;
    }
    const Floats x = load(from), w = where_seen(x, exp2(mul(sub(x, peak), scale)));
    store(weights + i, keep_from(w, floor));
  }
}

// The first place at which the running sum is beyond `point`, or the last one with any weight.
template <class Weight>
inline int64_t place_of(Weight weight, int64_t count, double from, double point) {
  int64_t last = 0;
  for (int64_t i = 0; i < count; i++) {
    const double w = weight(i);
    if (w <= 0) continue;
    last = i;
    from += w;
    if (from > point) break;
  }
  return last;
}

inline int32_t draw_plain(const DrawRoom& room, int64_t vocab, double uniform) {
  const float* const weights = room.weights;
  double* const sums = room.sums;
  const int64_t spans = spans_of(vocab);
  sums[0] = 0;
  for (int64_t s = 0; s < spans; s++) {
    double sum = 0;
    for (int64_t i = s * kSpan; i < std::min(vocab, (s + 1) * kSpan); i++) sum += weights[i];
    sums[s + 1] = sums[s] + sum;
  }
  const double point = uniform * sums[spans];
  int64_t span = 0;
  while (span + 1 < spans && sums[span + 1] <= point) span++;
  while (span > 0 && sums[span + 1] == sums[span]) span--;  // nothing has any weight there
  const int64_t first = span * kSpan, count = std::min(vocab - first, int64_t{kSpan});
  return static_cast<int32_t>(
      first + place_of([&](int64_t i) { return double{weights[first + i]}; }, count, sums[span], point));
}

// With top_k or top_p: the likeliest tokens that can matter are sorted, and no others.
inline int32_t draw_ranked(const float* logits, const DrawRoom& room, int64_t vocab, const pl_draw& draw) {
  const float* const weights = room.weights;
  Candidate* const best = room.best;
  double total = 0;
  for (int64_t i = 0; i < vocab; i++) total += weights[i];
  int64_t count;
  const int64_t wanted = draw.top_k > 0 ? std::min<int64_t>(draw.top_k, vocab) : 0;
  for (float least = 0.0625f;; least = least > 1e-30f ? least * least * 0.0625f : 0.f) {
    count = 0;
    double mass = 0;
    for (int64_t i = 0; i < vocab; i++)
      if (weights[i] >= least && (weights[i] > 0 || wanted > 0)) {
        best[count++] = {logits[i], weights[i], static_cast<int32_t>(i)};
        mass += weights[i];
      }
    const bool enough = wanted > 0 ? count >= wanted : mass >= draw.top_p * total;
    if (enough || least == 0.f) break;
  }
  std::sort(best, best + count, before);
  if (wanted > 0) count = std::min(count, wanted);
  double mass = 0;
  for (int64_t i = 0; i < count; i++) mass += best[i].weight;
  const double limit = draw.top_p * (wanted > 0 ? mass : total);
  int64_t kept = count;
  double sum = 0;
  if (draw.top_p < 1)
    for (int64_t i = 0; i < count; i++) {
      sum += best[i].weight;
      if (sum >= limit) {
        kept = i + 1;
        break;
      }
    }
  if (draw.min_p > 0) {
    int64_t above = 0;
    while (above < kept && best[above].weight >= draw.min_p * best[0].weight) above++;
    kept = std::max<int64_t>(1, above);
  }
  sum = 0;
  for (int64_t i = 0; i < kept; i++) sum += best[i].weight;
  return best[place_of([&](int64_t i) { return double{best[i].weight}; }, kept, 0.0, draw.uniform * sum)].id;
}

inline int32_t draw_token(const float* logits, int64_t vocab, const pl_draw& draw, const DrawRoom& room) {
  const bool ranked = is_ranked(draw);
  weigh_tokens(logits, vocab, draw.temperature, ranked ? 0.f : static_cast<float>(draw.min_p), room.weights);
  return ranked ? draw_ranked(logits, room, vocab, draw) : draw_plain(room, vocab, draw.uniform);
}

}  // namespace pl
