/* Attention of single queries to pieces of keys and values, by a call of torch's flash attention for each, on torch's
   threads, in one call that Python's lock is not held for.

   Knows nothing of Python, and no headers of torch: `attend_pieces.py` hands over the few functions of torch's stable C
   interface that are called (torch/csrc/stable/c/shim.h and torch/csrc/inductor/aoti_torch/c/shim.h). */

#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Rows of one layer lie an entry apart, where no processor looks for the next one by itself. */
#ifdef __GNUC__
#define FETCH(address) __builtin_prefetch(address)
#else
#define FETCH(address) ((void)(address))
#endif
#define TOKENS_AHEAD 16
#define LINE_BYTES 64

typedef void *Tensor;

struct torch {
    int32_t (*from_blob)(void *data, int64_t num_dims, const int64_t *sizes, const int64_t *strides, int64_t offset,
                         int32_t dtype, int32_t device_type, int32_t device_index, Tensor *made);
    int32_t (*flash)(Tensor query, Tensor key, Tensor value, double dropout, int32_t is_causal, Tensor *mask,
                     double *scale, Tensor *out, Tensor *lse);
    int32_t (*data)(Tensor tensor, void **data);
    int32_t (*strides)(Tensor tensor, int64_t **strides);
    int32_t (*discard)(Tensor tensor);
    int32_t (*parallel_for)(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void *),
                            void *context);
};

/* Piece i is `counts[i]` tokens, for the query of packed token `tokens[i]`. They lie one after another from entry
   `entries[i]` on; or, where that is negative, in the entries `copied[starts[i]]` and so on, and are copied first.
   `outs` are [pieces, kv heads, group, dim], `lses` the same without dim; in `query` tokens stand for the pieces. The
   pieces of query j are `firsts[j]` up to `firsts[j + 1]`; where their results are to be merged, and `outs` are float,
   that goes to `merged_outs` and `merged_lses`. */
struct call {
    const struct torch *torch;
    const char *query, *keys, *values; /* keys and values of entry 0 */
    char *outs;
    float *lses, *merged_outs, *merged_lses;
    const int64_t *tokens, *counts, *entries, *starts, *copied, *firsts;
    int64_t num_pieces, num_queries, num_heads, group, dim, entry_bytes, num_threads;
    double scale;
    int32_t dtype, item_bytes;
    _Atomic int64_t next;
    _Atomic int32_t error;
};

/* The heads of `count` tokens out of their entries, one token after another, for keys or values. */
static void copy(const struct call *call, const char *rows, const int64_t *entries, int64_t count, char *to) {
    size_t row_bytes = (size_t)(call->num_heads * call->dim * call->item_bytes);
    for (int64_t i = 0; i < count; i++) {
        if (i + TOKENS_AHEAD < count) {
            const char *ahead = rows + entries[i + TOKENS_AHEAD] * call->entry_bytes;
            for (size_t at = 0; at < row_bytes; at += LINE_BYTES) {
                FETCH(ahead + at);
            }
        }
        memcpy(to + (size_t)i * row_bytes, rows + entries[i] * call->entry_bytes, row_bytes);
    }
}

static int32_t attend(const struct call *call, int64_t piece) {
    const struct torch *torch = call->torch;
    int64_t heads = call->num_heads, group = call->group, dim = call->dim, count = call->counts[piece];
    int64_t query_bytes = heads * group * dim * call->item_bytes, row_bytes = heads * dim * call->item_bytes;
    const char *query = call->query + call->tokens[piece] * query_bytes;
    const char *keys = call->keys + call->entries[piece] * call->entry_bytes;
    const char *values = call->values + call->entries[piece] * call->entry_bytes;
    int64_t entry = call->entry_bytes / call->item_bytes;
    char *copied = NULL;
    if (call->entries[piece] < 0) {
        copied = malloc((size_t)(2 * count * row_bytes));
        if (copied == NULL) {
            return -1;
        }
        copy(call, call->keys, call->copied + call->starts[piece], count, copied);
        copy(call, call->values, call->copied + call->starts[piece], count, copied + count * row_bytes);
        keys = copied, values = copied + count * row_bytes;
        entry = heads * dim;
    }
    int64_t query_sizes[] = {1, heads, group, dim}, query_strides[] = {heads * group * dim, group * dim, dim, 1};
    int64_t sizes[] = {1, heads, count, dim}, strides[] = {count * entry, dim, entry, 1};
    Tensor made[5] = {NULL}; /* query, key, value, out, lse */
    const void *memory[] = {query, keys, values};
    int32_t error = 0;
    for (int i = 0; i < 3 && !error; i++) {
        error = torch->from_blob((void *)memory[i], 4, i ? sizes : query_sizes, i ? strides : query_strides, 0,
                                 call->dtype, 0, 0, &made[i]);
    }
    double scale = call->scale;
    error = error ? error : torch->flash(made[0], made[1], made[2], 0.0, 0, NULL, &scale, &made[3], &made[4]);
    char *out;
    float *lse;
    int64_t *out_strides, *lse_strides;
    error = error ? error : torch->data(made[3], (void **)&out);
    error = error ? error : torch->data(made[4], (void **)&lse);
    error = error ? error : torch->strides(made[3], &out_strides);
    error = error ? error : torch->strides(made[4], &lse_strides);
    for (int64_t head = 0; head < heads * group && !error; head++) {
        int64_t of_keys = head / group, in_group = head % group, at = piece * heads * group + head;
        memcpy(call->outs + at * dim * call->item_bytes,
               out + (of_keys * out_strides[1] + in_group * out_strides[2]) * call->item_bytes,
               (size_t)(dim * call->item_bytes));
        call->lses[at] = lse[of_keys * lse_strides[1] + in_group * lse_strides[2]];
    }
    for (int i = 0; i < 5; i++) {
        if (made[i] != NULL) {
            torch->discard(made[i]);
        }
    }
    free(copied);
    return error;
}

/* One thread's part: whichever pieces nobody has begun. */
static void share(int64_t begin, int64_t end, void *context) {
    struct call *call = context;
    int64_t piece;
    (void)begin, (void)end;
    while (!call->error && (piece = atomic_fetch_add(&call->next, 1)) < call->num_pieces) {
        int32_t error = attend(call, piece);
        if (error) {
            call->error = error;
        }
    }
}

/* The results over all pieces of each query. */
void torch_uma_merge_pieces(const struct call *call) {
    const float *outs = (const float *)call->outs;
    int64_t heads = call->num_heads * call->group, dim = call->dim;
    memset(call->merged_outs, 0, (size_t)(call->num_queries * heads * dim) * sizeof(float));
    for (int64_t query = 0; query < call->num_queries; query++) {
        for (int64_t head = 0; head < heads; head++) {
            int64_t first = call->firsts[query], end = call->firsts[query + 1];
            float most = -INFINITY, total = 0;
            for (int64_t piece = first; piece < end; piece++) {
                most = fmaxf(most, call->lses[piece * heads + head]);
            }
            float level = most == -INFINITY ? 0 : most; /* a difference of infinities would be NaN */
            float *sum = call->merged_outs + (query * heads + head) * dim;
            for (int64_t piece = first; piece < end; piece++) {
                float weight = expf(call->lses[piece * heads + head] - level);
                const float *out = outs + (piece * heads + head) * dim;
                total += weight;
                for (int64_t i = 0; i < dim; i++) {
                    sum[i] += weight * out[i];
                }
            }
            for (int64_t i = 0; i < dim && total > 0; i++) {
                sum[i] /= total;
            }
            call->merged_lses[query * heads + head] = level + logf(total);
        }
    }
}

/* Returns 0, or an error of torch's, or -1 where there is no memory for a copy. */
int32_t torch_uma_attend_pieces(struct call *call) {
    int32_t error = call->torch->parallel_for(0, call->num_threads, 1, share, call);
    error = error ? error : call->error;
    if (!error && call->merged_outs != NULL) {
        torch_uma_merge_pieces(call);
    }
    return error;
}
