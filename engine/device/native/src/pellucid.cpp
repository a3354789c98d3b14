// The C interface: checks what it is given, then lets a team of threads work.
#include "pellucid.h"

#include "group.h"
#include "pack.h"
#include "sample.h"
#include "step.h"

extern "C" {

const char* pl_isa(void) {
#if PL_AVX512
  return PL_NATIVE_BF16 ? "avx512-bf16" : "avx512-vnni";
#else
  return "avx2";
#endif
}

int64_t pl_layout(int32_t which) {
  const int64_t sizes[] = {sizeof(pl_weight), sizeof(pl_layer), sizeof(pl_model), sizeof(pl_step_args),
                           sizeof(pl_draw)};
  return which >= 0 && which < 5 ? sizes[which] : -1;
}

int64_t pl_kv_bytes(int32_t form, int32_t head_dim) { return pl::kv_bytes(form, head_dim); }

void* pl_open(const pl_model* model, int32_t rows_max) {
  try {
    return new pl::Model(*model, rows_max);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void pl_close(void* handle) { delete static_cast<pl::Model*>(handle); }

int32_t pl_step(void* handle, const pl_step_args* args) {
  pl::Model& e = *static_cast<pl::Model*>(handle);
  const pl::Bounds bounds = {e.rows_max, e.m.vocab, e.m.positions_max, e.m.blocks_max};
  try {
    const int32_t fault = e.plan.read(*args, bounds, e.tile_rows);
    if (fault != PL_OK) return fault;
  } catch (const std::bad_alloc&) {
    return PL_NO_MEMORY;
  }
  for (pl::Counter& counter : e.counters) counter.next.store(0, std::memory_order_relaxed);
  for (int i = 0; i < args->slices; i++) args->finite[i] = 1;
#pragma omp parallel num_threads(e.m.threads)
  pl::Worker(e, *args, omp_get_thread_num(), omp_get_num_threads()).run();
  return PL_OK;
}

int32_t pl_product(const pl_weight* weight, const float* x, float* y, int32_t rows, int32_t mix, int32_t threads) {
  const int widest = pl::padded(weight->ins, pl::kWide);
  try {
    pl::RowBuffers buffers(rows, 2 * widest, widest / 32);
    auto row = pl::memory<float>(2 * widest);
    for (int r = 0; r < rows; r++) {
      pl::mix(x + static_cast<int64_t>(r) * weight->ins, row.get(), weight->ins, mix);
      pl::prepare(row.get(), row.get() + widest, *weight, buffers.rows.row(r));
    }
#pragma omp parallel num_threads(threads)
    pl::product(*weight, buffers.rows, rows, omp_get_thread_num(), omp_get_num_threads(),
                [&](int r, int n, pl::Floats a, pl::Floats b) {
                  float* to = y + static_cast<int64_t>(r) * weight->outs + n;
                  pl::store(to, a);
                  pl::store(to + 16, b);
                });
  } catch (const std::bad_alloc&) {
    return PL_NO_MEMORY;
  }
  return PL_OK;
}

int32_t pl_sample(const float* logits, int64_t vocab, const pl_draw* draws, int32_t* tokens, int32_t rows,
                  int32_t threads) {
  try {
    const int64_t room = pl::padded(static_cast<int>(vocab), pl::kWide), sums_count = pl::spans_of(vocab) + 1;
    const int64_t best_count = std::any_of(draws, draws + rows, pl::is_ranked) ? vocab : 0;
    auto weights = pl::memory<float>(room * threads);
    auto sums = pl::memory<double>(sums_count * threads);
    const std::unique_ptr<pl::Candidate[]> best(new pl::Candidate[static_cast<size_t>(best_count * threads)]);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int r = 0; r < rows; r++) {
      const int t = omp_get_thread_num();
      const pl::DrawRoom own = {weights.get() + room * t, sums.get() + sums_count * t, best.get() + best_count * t};
      tokens[r] = pl::draw_token(logits + r * vocab, vocab, draws[r], own);
    }
  } catch (const std::bad_alloc&) {
    return PL_NO_MEMORY;
  }
  return PL_OK;
}

int64_t pl_group_bytes(int32_t size, int64_t values_max) { return pl::GroupMemory::bytes(size, values_max); }

void* pl_group_open(void* base, int32_t rank, int32_t size, int64_t values_max, int64_t timeout_ns) {
  try {
    return new pl::Group({static_cast<uint8_t*>(base), size, values_max}, rank, timeout_ns);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void pl_group_close(void* group) { delete static_cast<pl::Group*>(group); }

int32_t pl_group_sum(void* group, float* values, int64_t count, int64_t* stamps) {
  return static_cast<pl::Group*>(group)->sum(values, count, stamps);
}

int32_t pl_group_gather(void* group, const float* values, const int64_t* counts, float* gathered, int64_t* stamps) {
  return static_cast<pl::Group*>(group)->gather(values, counts, gathered, stamps);
}

int32_t pl_group_send(void* group, int32_t receiver, const float* values, int64_t count, int64_t* stamps) {
  return static_cast<pl::Group*>(group)->send(receiver, values, count, stamps);
}

int32_t pl_group_receive(void* group, int32_t sender, float* values, int64_t count, int64_t* stamps) {
  return static_cast<pl::Group*>(group)->receive(sender, values, count, stamps);
}

}  // extern "C"
