// One step of the decoder by a team of threads inside one parallel region.
//
// How the work of a layer is shared out depends on the number of rows only, never on what the rows are:
//   one or two rows   every thread rounds all rows for itself, products are shared by channels: fewest barriers
//   few rows          rows are rounded by shares, products are shared by channels
//   many rows         each thread takes a share of the rows through all products: nothing is exchanged but at attention
// A row's numbers are the same in all three, because each operation on a row has one order of summation.
#pragma once
#include <omp.h>
#include <sched.h>

#include <atomic>
#include <memory>
#include <new>
#include <vector>

#include "attention.h"
#include "clock.h"
#include "plan.h"
#include "product.h"

namespace pl {

constexpr int kRowsShared = 16;  // from so many rows for each thread on, rows are shared and not channels
constexpr int kRowsAlone = 2;    // up to so many rows, every thread rounds all
constexpr int kPiecesSplit = 4;  // pieces of attention for each thread, below which they are split by keys
constexpr int kSpins = 2000;     // looks at a barrier before the processor is given to somebody else

class Barrier {
 public:
  void wait(int threads) {
    if (threads == 1) return;
    const int round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round;) {
      _mm_pause();
      if (++spins > kSpins) {
        spins = 0;
        sched_yield();
      }
    }
  }

 private:
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> round_{0};
};

struct alignas(64) Counter {
  std::atomic<int> next{0};
};

template <class T>
struct FreeAligned {
  void operator()(T* p) const { std::free(p); }
};
template <class T>
using Memory = std::unique_ptr<T[], FreeAligned<T>>;

// Zeros, aligned to 64 bytes.  Throws std::bad_alloc.
template <class T>
Memory<T> memory(int64_t count) {
  const size_t bytes = static_cast<size_t>((count * static_cast<int64_t>(sizeof(T)) + 127) / 64 * 64);
  T* p = static_cast<T*>(std::aligned_alloc(64, bytes));
  if (p == nullptr) throw std::bad_alloc();
  std::memset(p, 0, bytes);
  return Memory<T>(p);
}

// Buffers of activations: what `prepare` writes and `product` reads.
struct RowBuffers {
  Memory<uint8_t> bytes;
  Memory<float> scales;
  Memory<int32_t> sums;
  Rows rows{};
  RowBuffers(int64_t count, int64_t stride, int64_t groups)
      : bytes(memory<uint8_t>(count * stride)),
        scales(memory<float>(count * groups)),
        sums(memory<int32_t>(count * groups)) {
    rows = {bytes.get(), scales.get(), sums.get(), stride, groups};
  }
};

struct Model {
  pl_model m;
  std::vector<pl_layer> layers;
  int rows_max;
  int hidden, queries, qkv, inner, widest;  // padded columns of the buffers
  int heads_per_key, tile_heads, tile_rows, head_tiles;
  int64_t block_bytes;
  int splits_max;
  Memory<float> x, projected, attended, gated;
  int64_t stride;  // bytes of a row of activations
  RowBuffers shared;
  std::vector<RowBuffers> alone;            // of each thread, for steps of few rows
  Memory<float> row_scratch;                // of each thread: two rows
  Memory<AttentionScratch> attention;       // of each thread
  Memory<uint8_t> parts;                    // of a long context that several threads share
  Memory<float> best_values, least_values;  // [thread][row][16]
  Memory<int32_t> best_ids;
  Plan plan;                      // of the step that runs
  std::vector<Counter> counters;  // of each layer: the next piece of attention to take
  Barrier barrier;

  Model(const pl_model& model, int rows_max_);  // What it takes is also in `working_bytes` of working_memory.py.
  Part& part(int piece, int split) {
    const int64_t index = static_cast<int64_t>(piece) * splits_max + split;
    return *reinterpret_cast<Part*>(parts.get() + index * part_bytes(m.head_dim));
  }
  uint8_t* block(int layer, int block_id, int head) const {
    const int64_t index = (static_cast<int64_t>(layer) * m.blocks_max + block_id) * m.kv_heads + head;
    return m.kv + index * block_bytes;
  }
};

// One byte a column, or two where any product wants bfloat16; and an odd number of cache lines, so that the same column
// of several rows does not meet in one set of the cache.
inline int64_t activation_stride(const pl_model& model, int widest) {
  bool wide = model.head.form == PL_BF16;
  for (int i = 0; i < model.layers_count; i++)
    for (const pl_weight* w :
         {&model.layers[i].qkv, &model.layers[i].output, &model.layers[i].gate_up, &model.layers[i].down})
      wide = wide || w->form == PL_BF16;
  const int64_t lines = int64_t{widest} * (wide ? 2 : 1) / 64;
  return (lines | 1) * 64;
}

inline Model::Model(const pl_model& model, int rows_max_)
    : m(model),
      layers(model.layers, model.layers + model.layers_count),
      rows_max(rows_max_),
      hidden(padded(model.hidden, kWide)),
      queries(padded(model.heads * model.head_dim, kWide)),
      qkv(padded((model.heads + 2 * model.kv_heads) * model.head_dim, kWide)),
      inner(padded(model.intermediate, kWide)),
      widest(std::max({hidden, queries, qkv, inner})),
      heads_per_key(model.heads / model.kv_heads),
      tile_heads(std::min(heads_per_key, kQueriesMost)),
      tile_rows(std::max(1, std::min(8, 12 / tile_heads))),
      head_tiles((heads_per_key + tile_heads - 1) / tile_heads),
      block_bytes(kv_bytes(model.kv_form, model.head_dim)),
      splits_max((model.positions_max + PL_SPLIT - 1) / PL_SPLIT),
      x(memory<float>(int64_t{rows_max_} * hidden)),
      projected(memory<float>(int64_t{rows_max_} * qkv)),
      attended(memory<float>(int64_t{rows_max_} * queries)),
      gated(memory<float>(int64_t{rows_max_} * inner)),
      stride(activation_stride(model, widest)),
      shared(rows_max_, stride, widest / 32),
      row_scratch(memory<float>(int64_t{2} * model.threads * widest)),
      attention(memory<AttentionScratch>(model.threads)),
      parts(memory<uint8_t>(int64_t{kPiecesSplit} * model.threads * splits_max * part_bytes(model.head_dim))),
      best_values(memory<float>(int64_t{model.threads} * rows_max_ * 16)),
      least_values(memory<float>(int64_t{model.threads} * rows_max_ * 16)),
      best_ids(memory<int32_t>(int64_t{model.threads} * rows_max_ * 16)),
      counters(static_cast<size_t>(model.layers_count)) {
  for (int t = 0; t < m.threads; t++) alone.emplace_back(kRowsAlone, stride, widest / 32);
}

// One thread of a step.
class Worker {
 public:
  Worker(Model& model, const pl_step_args& step, int thread, int threads)
      : e(model),
        p(model.plan),
        s(step),
        thread_(thread),
        threads_(threads),
        rows_(p.rows()),
        by_rows_(threads > 1 && rows_ >= kRowsShared * threads),
        alone_(rows_ <= kRowsAlone || threads == 1),
        first_(alone_ ? 0 : share(rows_, thread)),
        stop_(alone_ ? rows_ : share(rows_, thread + 1)),
        buffers_(rows_ <= kRowsAlone ? e.alone[thread].rows : e.shared.rows),
        scratch_(e.row_scratch.get() + int64_t{2} * thread * e.widest) {}

  void run() {
    embed();
    barrier();
    mark_ = now_ns();
    for (int i = 0; i < e.m.layers_count; i++) layer(i);
    if (by_rows_) barrier();
    check();
    if (p.outs() > 0) head();
    if (thread_ == 0) std::memcpy(s.parts_ns, parts_, sizeof parts_);
  }

 private:
  Model& e;
  const Plan& p;
  const pl_step_args& s;
  const int thread_, threads_, rows_;
  const bool by_rows_, alone_;
  const int first_, stop_;  // rows of this thread
  const Rows buffers_;
  float* const scratch_;
  int64_t mark_ = 0, parts_[PL_PARTS] = {0, 0, 0, 0};

  int share(int64_t count, int64_t of) const { return static_cast<int>(count * of / threads_); }
  void barrier() { e.barrier.wait(threads_); }
  void sync() {  // after what the other threads' products need
    if (!by_rows_) barrier();
  }
  void spent(int part) {
    if (thread_ != 0) return;
    const int64_t now = now_ns();
    parts_[part] += now - mark_;
    mark_ = now;
  }

  void embed() {
    for (int r = share(rows_, thread_); r < share(rows_, thread_ + 1); r++) {
      const uint16_t* from = e.m.embedding + static_cast<int64_t>(p.tokens[r]) * e.hidden;
      float* x = e.x.get() + static_cast<int64_t>(r) * e.hidden;
      for (int i = 0; i < e.hidden; i += 16) store(x + i, load_bf16(from + i));
    }
  }

  // This thread's rows of a product's input: `make(row, y)` writes one, which is then rounded for the weight.
  template <class Make>
  void prepare_rows(const pl_weight& weight, Make make) {
    for (int r = first_; r < stop_; r++) {
      float* y = make(r, scratch_);
      prepare(y, scratch_ + e.widest, weight, buffers_.row(r));
    }
    if (!alone_) sync();
    spent(PL_ELEMENTS);
  }

  template <class Take>
  void multiply(const pl_weight& weight, Take take) {
    if (by_rows_)
      product(weight, buffers_.from(first_), stop_ - first_, 0, 1,
              [&](int r, int n, Floats a, Floats b) { take(first_ + r, n, a, b); });
    else
      product(weight, buffers_, rows_, thread_, threads_, take);
    sync();
    spent(PL_PRODUCTS);
  }

  // Into a buffer of `columns` columns.
  void multiply_into(const pl_weight& weight, float* to, int columns) {
    multiply(weight, [=](int r, int n, Floats a, Floats b) {
      float* y = to + static_cast<int64_t>(r) * columns + n;
      store(y, a);
      store(y + 16, b);
    });
  }

  void multiply_onto_x(const pl_weight& weight) {
    float* const x = e.x.get();
    const int columns = e.hidden;
    multiply(weight, [=](int r, int n, Floats a, Floats b) {
      float* y = x + static_cast<int64_t>(r) * columns + n;
      store(y, add(load(y), a));
      store(y + 16, add(load(y + 16), b));
    });
  }

  void layer(int index) {
    const pl_layer& l = e.layers[index];
    auto normed = [&](const float* weight) {
      return [this, weight](int r, float* y) {
        norm(e.x.get() + static_cast<int64_t>(r) * e.hidden, weight, e.m.hidden, e.m.epsilon, y);
        return y;
      };
    };
    prepare_rows(l.qkv, normed(l.input_norm));
    multiply_into(l.qkv, e.projected.get(), e.qkv);
    place(index);
    barrier();
    spent(PL_ELEMENTS);
    attend(index);
    spent(PL_ATTENTION);
    prepare_rows(l.output, [this](int r, float*) { return e.attended.get() + static_cast<int64_t>(r) * e.queries; });
    multiply_onto_x(l.output);
    prepare_rows(l.gate_up, normed(l.post_norm));
    float* const gated = e.gated.get();
    const int columns = e.inner;
    multiply(l.gate_up, [=](int r, int n, Floats gate, Floats up) {
      store(gated + static_cast<int64_t>(r) * columns + n / 2, mul(silu(gate), up));
    });
    prepare_rows(l.down, [this](int r, float* y) {
      float* gated_row = e.gated.get() + static_cast<int64_t>(r) * e.inner;
      if (e.m.mix <= 1) return gated_row;
      mix(gated_row, y, e.m.intermediate, e.m.mix);  // not in place: the other threads may read it as well
      std::fill(y + e.m.intermediate, y + e.inner, 0.f);
      return y;
    });
    multiply_onto_x(l.down);
  }

  // Norms, positions and mix of queries and keys, and the new keys and values into the cache: by (row, key head).
  void place(int index) {
    const int kv_heads = e.m.kv_heads;
    const int first = by_rows_ ? first_ * kv_heads : share(int64_t{rows_} * kv_heads, thread_);
    const int stop = by_rows_ ? stop_ * kv_heads : share(int64_t{rows_} * kv_heads, thread_ + 1);
    for (int i = first; i < stop; i++) place_head(index, i / kv_heads, i % kv_heads);
  }

  void place_head(int index, int row, int head) {
    const pl_layer& l = e.layers[index];
    const int dim = e.m.head_dim, half = dim / 2, position = p.positions[row];
    const bool rounds = e.m.kv_form == PL_KV_INT8;
    const float *cosine = e.m.cosine + static_cast<int64_t>(position) * half,
                *sine = e.m.sine + static_cast<int64_t>(position) * half;
    float* x = e.projected.get() + static_cast<int64_t>(row) * e.qkv;
    float* key = x + static_cast<int64_t>(e.m.heads + head) * dim;
    for (int i = 0; i < e.heads_per_key; i++) {
      float* query = x + static_cast<int64_t>(head * e.heads_per_key + i) * dim;
      if (l.query_norm != nullptr) norm_head(query, l.query_norm, dim, e.m.epsilon);
      rotate(query, cosine, sine, half);
      if (rounds) spread(query, dim);
    }
    if (l.key_norm != nullptr) norm_head(key, l.key_norm, dim, e.m.epsilon);
    rotate(key, cosine, sine, half);
    if (rounds) spread(key, dim);
    const int block_id = p.table(row)[position / PL_BLOCK_SLOTS];
    uint8_t* block = e.block(index, block_id, head);
    const float* value = key + static_cast<int64_t>(e.m.kv_heads) * dim;
    const int slot = position % PL_BLOCK_SLOTS;
    const bool sound = rounds ? keep<KvInt8>(block, slot, key, value, dim) : keep<KvBf16>(block, slot, key, value, dim);
    if (!sound) is_broken(row);
  }

  void attend(int index) {
    if (e.m.kv_form == PL_KV_INT8)
      attend_in<KvInt8>(index);
    else
      attend_in<KvBf16>(index);
  }

  template <class Kv>
  void attend_in(int index) {
    const int pieces = static_cast<int>(p.tiles.size()) * e.m.kv_heads * e.head_tiles;
    int splits = 1;
    if (pieces < kPiecesSplit * threads_) {
      int furthest = 0;
      for (const Tile& tile : p.tiles) furthest = std::max(furthest, p.positions[tile.row + tile.count - 1]);
      splits = furthest / PL_SPLIT + 1;
    }
    Counter& counter = e.counters[index];
    const bool several = splits > 1;
    for (int i; (i = counter.next.fetch_add(1, std::memory_order_relaxed)) < pieces * splits;) {
      // The last rows of a long prompt see the most, so they go first.
      const int piece = pieces - 1 - i / splits;
      if (several)
        attend_piece<Kv>(index, piece, i % splits, &e.part(piece, i % splits));
      else
        attend_piece<Kv>(index, piece, -1, nullptr);
    }
    barrier();
    if (!several) return;
    for (int piece = thread_; piece < pieces; piece += threads_) merge_piece(index, piece);
    barrier();
  }

  struct Piece {
    Tile tile;
    int head, first_head, heads;  // key head; the query heads of it
    int first_split, last_split;  // that any row sees
  };

  Piece ownof(int index, int piece) const {
    Piece own;
    const int per_tile = e.m.kv_heads * e.head_tiles;
    own.tile = p.tiles[piece / per_tile];
    own.head = piece % per_tile / e.head_tiles;
    const int offset = piece % e.head_tiles * e.tile_heads;
    own.first_head = own.head * e.heads_per_key + offset;
    own.heads = std::min(e.tile_heads, e.heads_per_key - offset);
    const int window = e.layers[index].window;
    const int low = window > 0 ? std::max(0, p.positions[own.tile.row] - window + 1) : 0;
    own.first_split = low / PL_SPLIT;
    own.last_split = p.positions[own.tile.row + own.tile.count - 1] / PL_SPLIT;
    return own;
  }

  // All splits of a piece (`only` < 0), or one of them into `part`.
  template <class Kv>
  void attend_piece(int index, int piece, int only, Part* part) {
    const Piece own = ownof(index, piece);
    const int dim = e.m.head_dim;
    if (only >= 0 && (only < own.first_split || only > own.last_split)) return;
    AttentionScratch& t = e.attention[thread_];
    const float* x =
        e.projected.get() + static_cast<int64_t>(own.tile.row) * e.qkv + static_cast<int64_t>(own.first_head) * dim;
    load_queries<Kv>(t.queries, x, e.qkv, own.tile.count, own.heads, dim, p.positions.data() + own.tile.row);
    const int32_t* table = p.table(own.tile.row);
    const int blocks = p.positions[own.tile.row + own.tile.count - 1] / PL_BLOCK_SLOTS + 1;
    const int from = only >= 0 ? only : own.first_split, to = only >= 0 ? only : own.last_split;
    for (int split = from; split <= to; split++) {
      const uint8_t* pointers[kSplitBlocks + 2 * kKeyBlocks];
      const int first = split * kSplitBlocks, count = std::min(kSplitBlocks, blocks - first);
      for (int b = 0; b < count; b++) pointers[b] = e.block(index, table[first + b], own.head);
      for (int b = count; b < count + 2 * kKeyBlocks && b < kSplitBlocks + 2 * kKeyBlocks; b++)
        pointers[b] = pointers[0];
      Part& into = only >= 0 ? *part : split == from ? t.part : t.next;
      attend_split<Kv>(t, dim, e.layers[index].window, pointers, count, split * PL_SPLIT, into);
      if (only < 0 && split > from) merge(t.part, t.next, t.queries.count, dim);
    }
    if (only < 0) deliver(own, t.part);
  }

  void merge_piece(int index, int piece) {
    const Piece own = ownof(index, piece);
    Part& whole = e.part(piece, own.first_split);
    for (int i = own.first_split + 1; i <= own.last_split; i++)
      merge(whole, e.part(piece, i), own.tile.count * own.heads, e.m.head_dim);
    deliver(own, whole);
  }

  void deliver(const Piece& own, const Part& part) {
    const int dim = e.m.head_dim;
    for (int q = 0; q < own.tile.count * own.heads; q++) {
      const Floats inverse = all(1.f / part.sum[q]);
      float* to = e.attended.get() + static_cast<int64_t>(own.tile.row + q / own.heads) * e.queries +
                  static_cast<int64_t>(own.first_head + q % own.heads) * dim;
      for (int i = 0; i < dim; i += 16) store(to + i, mul(load(part.values + q * dim + i), inverse));
    }
  }

  // Several threads may find the same.
  void is_broken(int row) { __atomic_store_n(&s.finite[p.slices[row]], 0, __ATOMIC_RELAXED); }

  // Which sequences' numbers are none.
  void check() {
    for (int r = share(rows_, thread_); r < share(rows_, thread_ + 1); r++)
      if (!std::isfinite(sum_of_row(e.x.get() + static_cast<int64_t>(r) * e.hidden, e.hidden))) is_broken(r);
  }

  void head() {
    const int outs = p.outs();
    const bool alone = outs <= kRowsAlone;
    const Rows buffers = alone ? e.alone[thread_].rows : e.shared.rows;
    for (int i = alone ? 0 : share(outs, thread_); i < (alone ? outs : share(outs, thread_ + 1)); i++) {
      norm(e.x.get() + static_cast<int64_t>(p.out_rows[i]) * e.hidden, e.m.norm, e.m.hidden, e.m.epsilon, scratch_);
      prepare(scratch_, scratch_ + e.widest, e.m.head, buffers.row(i));
    }
    float* best = e.best_values.get() + int64_t{16} * thread_ * e.rows_max;
    float* least = e.least_values.get() + int64_t{16} * thread_ * e.rows_max;
    int32_t* ids = e.best_ids.get() + int64_t{16} * thread_ * e.rows_max;
    for (int i = 0; i < outs * 16; i++) best[i] = -INFINITY, least[i] = INFINITY, ids[i] = 0;
    if (!alone) barrier();
    product(e.m.head, buffers, outs, thread_, threads_,
            [&](int r, int n, Floats a, Floats b) { take_logits(r, n, a, b, best, least, ids); });
    barrier();
    for (int i = thread_; i < outs; i += threads_) choose(i);
    spent(PL_HEAD);
  }

  // 32 logits of a row: kept if they are wanted, compared with the best so far in any case.
  void take_logits(int r, int n, Floats a, Floats b, float* best, float* least, int32_t* ids) {
    const int vocab = e.m.vocab;
    float* to = p.logit_rows[r] < 0 ? nullptr : s.logits + static_cast<int64_t>(p.logit_rows[r]) * vocab + n;
    alignas(64) float last[PL_TILE];
    if (n + PL_TILE > vocab) {  // beyond the vocabulary nothing is the best, and nothing the least
      store(last, a);
      store(last + 16, b);
      for (int i = vocab - n; i < PL_TILE; i++) last[i] = last[0];
      if (to != nullptr) std::memcpy(to, last, sizeof(float) * static_cast<size_t>(vocab - n));
      a = load(last);
      b = load(last + 16);
    } else if (to != nullptr) {
      store(to, a);
      store(to + 16, b);
    }
    Floats values = load(best + r * 16);
    Ints where = load_ints(ids + r * 16);
    keep_best(values, where, a, ids_from(n));
    keep_best(values, where, b, ids_from(n + 16));
    store(best + r * 16, values);
    store_ints(ids + r * 16, where);
    // Of min's arguments the second one is given back if either is no number, so one that is none stays there for good.
    const Floats none = add(sub(a, a), sub(b, b));
    store(least + r * 16, add(min(min(a, b), load(least + r * 16)), none));
  }

  // The lowest id of the highest logit, over all threads' lanes; minus infinity if any of the logits is no number.
  void choose(int r) {
    float best = -INFINITY, least = INFINITY;
    int32_t id = 0;
    bool sound = true;
    for (int t = 0; t < threads_; t++)
      for (int i = 0; i < 16; i++) {
        const int64_t at = (int64_t{t} * e.rows_max + r) * 16 + i;
        const float v = e.best_values[at];
        if (v > best || (v == best && e.best_ids[at] < id)) best = v, id = e.best_ids[at];
        least = std::min(least, e.least_values[at]);
        sound = sound && !std::isnan(e.least_values[at]);
      }
    s.best_ids[r] = id;
    s.highest[r] = sound ? best : -INFINITY;
    s.lowest[r] = least;
  }
};

}  // namespace pl
