// The C interface of the native decoder.  `engine/device/native/library.py` has the same structures for ctypes, and
// `pl_layout` lets it check that both agree.
//
// Memory belongs to the caller and must outlive the model; all pointers to packed weights are aligned to 64 bytes.
// Sizes that end in `_padded` are multiples of 64 with zeros in the rest, so that no product needs a tail.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { PL_INT8 = 0, PL_INT4 = 1, PL_BF16 = 2 };                                          // forms of a weight
enum { PL_KV_INT8 = 0, PL_KV_BF16 = 1 };                                                 // forms of the cache
enum { PL_PRODUCTS = 0, PL_ATTENTION = 1, PL_ELEMENTS = 2, PL_HEAD = 3, PL_PARTS = 4 };  // where the time goes
enum { PL_BLOCK_SLOTS = 16, PL_TILE = 32, PL_SPLIT = 256 };

// Why `pl_step` computed nothing.
enum {
  PL_OK = 0,
  PL_BAD_ROWS = 1,
  PL_BAD_TOKEN = 2,
  PL_BAD_POSITION = 3,
  PL_BAD_PLAN = 4,
  PL_BAD_BLOCK = 5,
  PL_NO_MEMORY = 6
};

// A weight [outs, ins] in tiles of 32 output channels, all of the input of one tile together: see `pack.h`.
typedef struct {
  const uint8_t* data;
  const float* scale;    // [outs_padded to 32]: of an output channel; int8 and int4
  const float* bias;     // [outs_padded to 32], or null
  const int32_t* order;  // [ins]: which input each column is, where the columns were sorted; null: as they come
  int32_t form;
  int32_t outs;   // rows of tiles * 32
  int32_t ins;    // a multiple of 64; of `group` for int4
  int32_t group;  // int4: columns that share a scale
  int32_t asymmetric;
  int32_t unused;
} pl_weight;

typedef struct {
  const float *input_norm, *post_norm;  // [hidden_padded]
  const float *query_norm, *key_norm;   // [head_dim], or null
  pl_weight qkv, output, gate_up, down;
  int32_t window;  // how many newest positions a token sees; 0: all
  int32_t unused;
} pl_layer;

typedef struct {
  const pl_layer* layers;
  const uint16_t* embedding;   // bfloat16 [vocab, hidden_padded]
  const float* norm;           // [hidden_padded]
  const float *cosine, *sine;  // [positions_max, head_dim / 2]
  uint8_t* kv;                 // pl_kv_bytes(...) for each of layers * blocks_max * kv_heads, aligned to 64
  pl_weight head;
  int32_t layers_count, hidden, intermediate, heads, kv_heads, head_dim, vocab;
  int32_t positions_max, blocks_max, kv_form;
  int32_t mix;  // points of the Hadamard transform of the down projection's input; 0: none
  int32_t threads;
  float epsilon;
  int32_t unused;
} pl_model;

// A plan is one run of integers, slice by slice:
//   start, count, blocks, outs     position of the first token, tokens, blocks of the table, rows (the last) that
//   sample [outs]                         1 where the logits of such a row are wanted, 0 where its best token is enough
//   [count]                        tokens
//   [blocks]                       the block of each 16 positions; those behind the last position do not matter
typedef struct {
  const int32_t* plan;
  float* logits;            // [wanted rows, vocab]
  int32_t* best_ids;        // [sampling rows]: lowest id of the highest logit
  float *highest, *lowest;  // [sampling rows]; highest: minus infinity if any of the logits is no number
  int32_t* finite;          // [slices]: 1 if all numbers of all its rows are finite
  int64_t* parts_ns;        // [PL_PARTS], as the first thread sees it
  int64_t plan_length;
  int32_t slices, rows, outs, wanted;  // what the plan should come to
} pl_step_args;

#pragma GCC visibility push(default)  // these and nothing else

const char* pl_isa(void);
int64_t pl_layout(int32_t which);  // sizes of pl_weight, pl_layer, pl_model, pl_step_args
int64_t pl_kv_bytes(int32_t form, int32_t head_dim);
int64_t pl_packed_bytes(int32_t form, int32_t outs, int32_t ins, int32_t group, int32_t asymmetric);

// Codes as they are in memory: int8 [outs, ins]; int4 codes are -8 .. 7, zeros are added to codes (0: symmetric).
void pl_pack_int8(uint8_t* to, const int8_t* codes, int32_t outs, int32_t ins);
void pl_pack_int4(uint8_t* to, const int8_t* codes, const uint16_t* scales_f16, const int16_t* zeros, int32_t outs,
                  int32_t ins, int32_t group);
void pl_pack_bf16(uint8_t* to, const uint16_t* values, int32_t outs, int32_t ins);

// A model in use: null if there is no memory.
void* pl_open(const pl_model* model, int32_t rows_max);
void pl_close(void* handle);
int32_t pl_step(void* handle, const pl_step_args* args);

// One operation alone, for tests and measuring: y [rows, outs] = x [rows, ins] * weight.T + bias.
int32_t pl_product(const pl_weight* weight, const float* x, float* y, int32_t rows, int32_t mix, int32_t threads);

// One token for each row of logits [rows, vocab], as `engine/device/sampler.py` says it.
typedef struct {
  double temperature, top_p, min_p, uniform;
  int32_t top_k, unused;
} pl_draw;
int32_t pl_sample(const float* logits, int64_t vocab, const pl_draw* draws, int32_t* tokens, int32_t rows,
                  int32_t threads);

// Ranks on one host that exchange float32 over memory that they share: see `group.h`.  `base` is the same
// pl_group_bytes of it in all of them, zeroed before the first one opens it, and aligned to 64 bytes.  All call the
// same functions in the same order with the same sizes, each with one thread at a time.
//
// `stamps` [size + 1]: when each rank came, in ns of CLOCK_MONOTONIC (0: it takes no part), then when this one left.
// They return 0; 1 + the rank that did not come within timeout_ns; or -1 - the rank that was closed.  Then that is what
// every later call returns.
int64_t pl_group_bytes(int32_t size, int64_t values_max);
void* pl_group_open(void* base, int32_t rank, int32_t size, int64_t values_max, int64_t timeout_ns);  // null: no memory
void pl_group_close(void* group);
int32_t pl_group_sum(void* group, float* values, int64_t count, int64_t* stamps);  // in place, in the order of ranks
int32_t pl_group_gather(void* group, const float* values, const int64_t* counts, float* gathered, int64_t* stamps);
int32_t pl_group_send(void* group, int32_t receiver, const float* values, int64_t count, int64_t* stamps);
int32_t pl_group_receive(void* group, int32_t sender, float* values, int64_t count, int64_t* stamps);

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
