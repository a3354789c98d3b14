// One token at random for each row of logits, as `engine/device/sampler.py` says it; that is also the oracle of its
// tests.
#pragma once
#include <algorithm>
#include <memory>
#include <vector>

#include "rows.h"

namespace pl {

constexpr int kSpan = 1024;  // probabilities that are summed up together on the way to one token

struct Candidate {
  float logit, weight;
  int32_t id;
};

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

inline int32_t draw_plain(const float* weights, int64_t vocab, double uniform) {
  const int64_t spans = (vocab + kSpan - 1) / kSpan;
  std::vector<double> sums(static_cast<size_t>(spans) + 1, 0.0);
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
inline int32_t draw_ranked(const float* logits, const float* weights, int64_t vocab, const pl_draw& draw) {
  double total = 0;
  for (int64_t i = 0; i < vocab; i++) total += weights[i];
  std::vector<Candidate> best;
  const int64_t wanted = draw.top_k > 0 ? std::min<int64_t>(draw.top_k, vocab) : 0;
  for (float least = 0.0625f;; least = least > 1e-30f ? least * least * 0.0625f : 0.f) {
    best.clear();
    double mass = 0;
    for (int64_t i = 0; i < vocab; i++)
      if (weights[i] >= least && (weights[i] > 0 || wanted > 0)) {
        best.push_back({logits[i], weights[i], static_cast<int32_t>(i)});
        mass += weights[i];
      }
    const bool enough = wanted > 0 ? static_cast<int64_t>(best.size()) >= wanted : mass >= draw.top_p * total;
    if (enough || least == 0.f) break;
  }
  std::sort(best.begin(), best.end(), before);
  if (wanted > 0 && static_cast<int64_t>(best.size()) > wanted) best.resize(static_cast<size_t>(wanted));
  double mass = 0;
  for (const Candidate& c : best) mass += c.weight;
  const double limit = draw.top_p * (wanted > 0 ? mass : total);
  size_t kept = best.size();
  double sum = 0;
  if (draw.top_p < 1)
    for (size_t i = 0; i < best.size(); i++) {
      sum += best[i].weight;
      if (sum >= limit) {
        kept = i + 1;
        break;
      }
    }
  if (draw.min_p > 0) {
    size_t above = 0;
    while (above < kept && best[above].weight >= draw.min_p * best[0].weight) above++;
    kept = std::max<size_t>(1, above);
  }
  sum = 0;
  for (size_t i = 0; i < kept; i++) sum += best[i].weight;
  const int64_t at = place_of([&](int64_t i) { return double{best[static_cast<size_t>(i)].weight}; },
                              static_cast<int64_t>(kept), 0.0, draw.uniform * sum);
  return best[static_cast<size_t>(at)].id;
}

inline int32_t draw_token(const float* logits, int64_t vocab, const pl_draw& draw, float* weights) {
  const bool ranked = draw.top_k > 0 || draw.top_p < 1;
  weigh_tokens(logits, vocab, draw.temperature, ranked ? 0.f : static_cast<float>(draw.min_p), weights);
  return ranked ? draw_ranked(logits, weights, vocab, draw) : draw_plain(weights, vocab, draw.uniform);
}

}  // namespace pl
