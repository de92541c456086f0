/* CPU loops for work that takes NumPy and torch ten passes or more: keyed bits, the row order, rows out of shards and
   their checksums, and the head's row pass.

   Guarantee: the bits of keyed_random.py (Philox4x32-10, Salmon et al., SC 2011) and the permutation of
   data/order.py, bit for bit; the row pass of mlm_head.py to the rounding of fp32.
   How: LANES counters side by side, in plain loops that the compiler turns into vector instructions. The functions
   start no threads; cpu_library.py calls them from several. They are built with the package where there is a C compiler
   (setup.py). cpu_library.py loads them, and NumPy or torch does the work where they are missing.
   Limits: no state, no allocation, no error codes except that of electra_gather_rows. Callers check ranges. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 32 /* too many to unroll completely: compilers do not vectorise a loop that they have unrolled */
#if defined(__x86_64__) && defined(__linux__) && !defined(__clang__)
#define X86
#include <immintrin.h>
#define VECTORS __attribute__((target_clones("avx512f", "avx2", "default"))) /* chosen when the library is loaded */
#else
#define VECTORS
#endif
#define INLINE static inline __attribute__((always_inline))

/* Version of the functions' arguments. cpu_library.py loads no other version: increment both with any change of
   arguments. */
const int electra_cpu_library_version = 2;

/* One Philox counter for each lane, four words each; the random words replace them. */
typedef struct {
    uint32_t w0[LANES], w1[LANES], w2[LANES], w3[LANES];
} Words;

/* Constants of Philox4x32-10 (Salmon et al., SC 2011): two multipliers, two increments of the key, and the rounds. */
#define MULTIPLIER_0 0xD2511F53u
#define MULTIPLIER_1 0xCD9E8D57u
#define KEY_INCREMENT_0 0x9E3779B9u
#define KEY_INCREMENT_1 0xBB67AE85u
#define PHILOX_ROUNDS 10

/* Replace the counters by their random words, Philox4x32-10, on any CPU. A round multiplies two of a counter's four
   words by constants, and distributes the halves of the 64-bit products over the words, mixed with the key. */
static void philox_anywhere(Words *c, uint64_t seed)
{
    uint32_t key_0 = (uint32_t)seed;
    uint32_t key_1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        for (int i = 0; i < LANES; i++) {
            uint64_t product_0 = (uint64_t)c->w0[i] * MULTIPLIER_0;
            uint64_t product_1 = (uint64_t)c->w2[i] * MULTIPLIER_1;
            c->w0[i] = (uint32_t)(product_1 >> 32) ^ c->w1[i] ^ key_0;
            c->w1[i] = (uint32_t)product_1;
            c->w2[i] = (uint32_t)(product_0 >> 32) ^ c->w3[i] ^ key_1;
            c->w3[i] = (uint32_t)product_0;
        }
        key_0 += KEY_INCREMENT_0;
        key_1 += KEY_INCREMENT_1;
    }
}

#ifdef X86
/* Replace the counters by their random words, with AVX2; see philox_anywhere for the algorithm. AVX2 multiplies the
   low halves of four 64-bit elements, so eight counters are split into those at even and at odd places: a vector holds
   one word of four counters, each in the low half of 64 bits, and the high halves are never used. It is four times as
   fast as what compilers generate. */
__attribute__((target("avx2"))) static void philox_avx2(Words *c, uint64_t seed)
{
    const __m256i multiplier_0 = _mm256_set1_epi64x(MULTIPLIER_0);
    const __m256i multiplier_1 = _mm256_set1_epi64x(MULTIPLIER_1);
    uint32_t *words[4] = {c->w0, c->w1, c->w2, c->w3};
    for (int i = 0; i < LANES; i += 8) {
        __m256i even[4], odd[4];
        for (int w = 0; w < 4; w++) {
            even[w] = _mm256_loadu_si256((const __m256i *)(words[w] + i));
            odd[w] = _mm256_srli_epi64(even[w], 32);
        }
        uint32_t key_0 = (uint32_t)seed;
        uint32_t key_1 = (uint32_t)(seed >> 32);
        for (int round = 0; round < PHILOX_ROUNDS; round++) {
            const __m256i keys_0 = _mm256_set1_epi64x(key_0);
            const __m256i keys_1 = _mm256_set1_epi64x(key_1);
            __m256i *halves[2] = {even, odd};
            for (int h = 0; h < 2; h++) {
                __m256i *x = halves[h];
                __m256i product_0 = _mm256_mul_epu32(x[0], multiplier_0);
                __m256i product_1 = _mm256_mul_epu32(x[2], multiplier_1);
                x[0] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(product_1, 32), x[1]), keys_0);
                x[1] = product_1;
                x[2] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(product_0, 32), x[3]), keys_1);
                x[3] = product_0;
            }
            key_0 += KEY_INCREMENT_0;
            key_1 += KEY_INCREMENT_1;
        }
        /* Interleave the words of even and odd places again. */
        for (int w = 0; w < 4; w++) {
            __m256i both = _mm256_blend_epi32(even[w], _mm256_slli_epi64(odd[w], 32), 0xAA);
            _mm256_storeu_si256((__m256i *)(words[w] + i), both);
        }
    }
}
#endif

/* Replace the counters by their random words (Philox4x32-10, key `seed`), with AVX2 where the CPU has it. */
INLINE void philox(Words *c, uint64_t seed)
{
#ifdef X86
    if (__builtin_cpu_supports("avx2")) {
        philox_avx2(c, seed);
        return;
    }
#endif
    philox_anywhere(c, seed);
}

/* Set *c to the random words of LANES neighbouring blocks of one row, from `block` on. A block is four positions,
   which get the four words of one counter, (block, row, step, purpose). */
INLINE void words_of(Words *c, uint64_t seed, uint32_t purpose, uint32_t step, uint32_t row, uint32_t block)
{
    for (int i = 0; i < LANES; i++) {
        c->w0[i] = block + (uint32_t)i;
        c->w1[i] = row;
        c->w2[i] = step;
        c->w3[i] = purpose;
    }
    philox(c, seed);
}

/* Write 32 random bits for each row and each position from 4 * first_block on, as keyed_random.bits_grid does. A block
   is four positions. out is [num_rows][4 * num_blocks]; `stride` is the distance from row to row in elements. */
VECTORS void electra_bits(uint64_t seed, uint32_t purpose, uint32_t step, const int64_t *rows, int64_t num_rows,
                          int64_t first_block, int64_t num_blocks, int64_t stride, int64_t *out)
{
    Words c;
    for (int64_t r = 0; r < num_rows; r++)
        for (int64_t b = 0; b < num_blocks; b += LANES) {
            int64_t *to = out + r * stride + 4 * b;
            int64_t count = num_blocks - b < LANES ? num_blocks - b : LANES;
            words_of(&c, seed, purpose, step, (uint32_t)rows[r], (uint32_t)(first_block + b));
            for (int64_t i = 0; i < count; i++) {
                to[4 * i] = c.w0[i];
                to[4 * i + 1] = c.w1[i];
                to[4 * i + 2] = c.w2[i];
                to[4 * i + 3] = c.w3[i];
            }
        }
}

/* Write the factors of dropout: `scale` where the bits are at least `threshold`, and 0 elsewhere. The bits and the
   other arguments are those of electra_bits. */
VECTORS void electra_keep_scale(uint64_t seed, uint32_t purpose, uint32_t step, const int64_t *rows, int64_t num_rows,
                                int64_t first_block, int64_t num_blocks, int64_t stride, uint64_t threshold, float scale,
                                float *out)
{
    Words c;
    for (int64_t r = 0; r < num_rows; r++)
        for (int64_t b = 0; b < num_blocks; b += LANES) {
            float *to = out + r * stride + 4 * b;
            int64_t count = num_blocks - b < LANES ? num_blocks - b : LANES;
            words_of(&c, seed, purpose, step, (uint32_t)rows[r], (uint32_t)(first_block + b));
            for (int64_t i = 0; i < count; i++) {
                to[4 * i] = c.w0[i] >= threshold ? scale : 0.0f;
                to[4 * i + 1] = c.w1[i] >= threshold ? scale : 0.0f;
                to[4 * i + 2] = c.w2[i] >= threshold ? scale : 0.0f;
                to[4 * i + 3] = c.w3[i] >= threshold ? scale : 0.0f;
            }
        }
}

/* Indices on their way through their permutations, one for each lane. The network permutes the a * b >= size cells of
   a grid of a rows and b columns. epoch and block are a part of the permutation's key. */
typedef struct {
    uint64_t place[LANES], size[LANES], a[LANES], b[LANES];
    uint32_t epoch[LANES], block[LANES];
} Walkers;

/* Run every lane's place once through the Feistel network over its grid of a x b cells, as the network of
   data/order.py does. A place is the cell (place / b, place % b). Each round adds to one of the two coordinates,
   modulo its limit, a random number that is a function of the other one; so each round, and all of them together, can
   be undone, and is a permutation of the cells. */
INLINE void feistel(Walkers *w, uint64_t seed, uint32_t purpose, int num_rounds)
{
    uint64_t half[2][LANES];
    Words c;
    for (int i = 0; i < LANES; i++) {
        half[0][i] = w->place[i] / w->b[i];
        half[1][i] = w->place[i] % w->b[i];
    }
    for (int round = 0; round < num_rounds; round++) {
        uint64_t *moved = half[round % 2];
        uint64_t *fixed = half[1 - round % 2];
        uint64_t *limit = round % 2 ? w->b : w->a;
        for (int i = 0; i < LANES; i++) {
            c.w0[i] = (uint32_t)fixed[i];
            c.w1[i] = w->block[i];
            c.w2[i] = w->epoch[i];
            c.w3[i] = purpose | (uint32_t)round << 8;
        }
        philox(&c, seed);
        for (int i = 0; i < LANES; i++) {
            uint64_t shift = ((uint64_t)c.w0[i] * limit[i]) >> 32; /* the random word, scaled to [0, limit) */
            uint64_t sum = moved[i] + shift;
            moved[i] = sum >= limit[i] ? sum - limit[i] : sum;
        }
    }
    for (int i = 0; i < LANES; i++)
        w->place[i] = half[0][i] * w->b[i] + half[1][i];
}

/* Write to out[i] the place of index[i] in the keyed permutation of [0, size[i]), as permute of data/order.py
   does. The network permutes slightly more cells than `size`, so a place outside [0, size) goes through it again until
   it is inside ("cycle walking"). All arrays have `count` elements. */
VECTORS void electra_permute(uint64_t seed, uint32_t purpose, int num_rounds, const uint64_t *index,
                             const uint64_t *size, const uint64_t *epoch, const uint64_t *block, int64_t count,
                             uint64_t *out)
{
    Walkers w;
    for (int64_t first = 0; first < count; first += LANES) {
        int64_t lanes = count - first < LANES ? count - first : LANES;
        int64_t num_outside = lanes;
        int inside[LANES] = {0};
        for (int i = 0; i < LANES; i++) {
            int64_t from = first + (i < lanes ? i : 0); /* lanes behind the last index repeat the first one */
            w.place[i] = index[from];
            w.size[i] = size[from];
            w.epoch[i] = (uint32_t)epoch[from];
            w.block[i] = (uint32_t)block[from];
            w.a[i] = (uint64_t)ceil(sqrt((double)w.size[i]));
            w.b[i] = (w.size[i] + w.a[i] - 1) / w.a[i];
        }
        while (num_outside) {
            feistel(&w, seed, purpose, num_rounds);
            for (int i = 0; i < lanes; i++)
                if (!inside[i] && w.place[i] < w.size[i]) {
                    out[first + i] = w.place[i];
                    inside[i] = 1;
                    num_outside--;
                }
        }
    }
}

/* Write the checksum of each row, as data/receipt.py defines it: the sum, modulo 2^64, of the row's 32-bit words times
   their keys. Rows are adjacent and may begin at any byte; the bytes after their last whole word count as a word. */
VECTORS void electra_row_checksums(const char *rows, int64_t count, int64_t row_bytes, const uint32_t *keys,
                                   uint64_t *checksums)
{
    int64_t num_words = row_bytes / 4;
    for (int64_t i = 0; i < count; i++) {
        const char *row = rows + i * row_bytes;
        uint64_t sum = 0;
        for (int64_t w = 0; w < num_words; w++) {
            uint32_t word;
            memcpy(&word, row + 4 * w, 4);
            sum += (uint64_t)word * keys[w];
        }
        if (row_bytes % 4) {
            uint32_t word = 0;
            memcpy(&word, row + 4 * num_words, (size_t)(row_bytes % 4));
            sum += (uint64_t)word * keys[num_words];
        }
        checksums[i] = sum;
    }
}

/* Index of a mapped shard (Shard.table in data/shard.py). `address` is where its mapping begins. `starts` points to
   the first row of each block and, last, the number of rows; `offsets` points to the byte offset of each block;
   `checksums` points to the checksum of each row. */
typedef struct {
    int64_t address, num_blocks, starts, offsets, checksums;
} Table;

#define ALL_GOOD (-1)
#define OUTSIDE (-2)
#define ROWS_COPIED 32 /* before they are verified, so that the processor waits for several rows of memory at a time */

/* Copy row `row` of a shard to `copy`. Return 1, or 0 if the shard has no such row. */
INLINE int copy_row(const Table *table, int64_t row, int64_t row_bytes, char *copy)
{
    const int64_t *starts = (const int64_t *)table->starts;
    const int64_t *offsets = (const int64_t *)table->offsets;
    int64_t low = 0;
    int64_t high = table->num_blocks;
    if (row < 0 || row >= starts[high])
        return 0;
    /* Find the row's block by bisection; starts[low] <= row < starts[high] throughout. */
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (starts[middle] <= row)
            low = middle;
        else
            high = middle;
    }
    int64_t offset = offsets[low] + (row - starts[low]) * row_bytes;
    memcpy(copy, (const char *)table->address + offset, (size_t)row_bytes);
    return 1;
}

/* Copy row rows[i] of the shard tables[which[i]] to row i of out, [count][row_bytes], and compare the checksum of the
   copy with that of the table, unless keys is NULL. Return ALL_GOOD, the first i whose checksum is wrong, or OUTSIDE if
   a row number is not in its shard. */
int64_t electra_gather_rows(const Table *tables, const int64_t *which, const int64_t *rows, int64_t count,
                            int64_t row_bytes, const uint32_t *keys, char *out)
{
    uint64_t found[ROWS_COPIED];
    for (int64_t first = 0; first < count; first += ROWS_COPIED) {
        int64_t end = first + ROWS_COPIED < count ? first + ROWS_COPIED : count;
        for (int64_t i = first; i < end; i++)
            if (!copy_row(&tables[which[i]], rows[i], row_bytes, out + i * row_bytes))
                return OUTSIDE;
        if (!keys)
            continue;
        electra_row_checksums(out + first * row_bytes, end - first, row_bytes, keys, found);
        for (int64_t i = first; i < end; i++) {
            const uint64_t *checksums = (const uint64_t *)tables[which[i]].checksums;
            if (found[i - first] != checksums[rows[i]])
                return i;
        }
    }
    return ALL_GOOD;
}

/* An fp32 number is a sign bit, 8 bits of the exponent plus 127, and 23 bits of the fraction. */
#define FRACTION_BITS 23
#define EXPONENT_BIAS 127
#define LOG2_E 1.44269504f
#define LN_2 0.693147181f
#define LN_2_HIGH 0.693145752f  /* 16 bits of LN_2, so that small multiples are exact */
#define LN_2_LOW 1.42860677e-6f /* the rest of LN_2 */
#define ROUND_TO_INTEGER 12582912.0f /* 1.5 * 2^23: adding and subtracting it rounds to an integer */
#define LOWEST_EXPONENT -87.0f
#define BITS_OF_ROOT_HALF 0x3F3504F3 /* of the fp32 number sqrt(1/2) */

/* Replace x <= 0 by exp(x), with a relative error below 2e-7; 0 for x below -87. With x = n ln 2 + r,
   |r| <= ln 2 / 2, the result is 2^n, made from its bits, times the power series of e^r. */
INLINE void exp_of(float *x)
{
    float series[LANES], power[LANES];
    int32_t power_bits[LANES];
    for (int i = 0; i < LANES; i++) {
        float within = x[i] < LOWEST_EXPONENT ? LOWEST_EXPONENT : x[i];
        float n = (within * LOG2_E + ROUND_TO_INTEGER) - ROUND_TO_INTEGER;
        float r = (within - n * LN_2_HIGH) - n * LN_2_LOW;
        series[i] = 1 + r * (1 + r * (0.5f + r * (1.0f / 6 + r * (1.0f / 24 + r * (1.0f / 120 + r * (1.0f / 720))))));
        power_bits[i] = ((int32_t)n + EXPONENT_BIAS) << FRACTION_BITS;
    }
    memcpy(power, power_bits, sizeof power);
    for (int i = 0; i < LANES; i++)
        x[i] = x[i] < LOWEST_EXPONENT ? 0.0f : series[i] * power[i];
}

/* Replace normal x > 0 by log(x), with a relative error below 2e-7. With x = 2^e (1 + f), where 1 + f lies between the
   square roots of 1/2 and 2, the result is e ln 2 + 2 atanh(f / (2 + f)), and atanh is a power series. */
INLINE void log_of(float *x)
{
    int32_t bits[LANES], e[LANES];
    float one_plus_f[LANES];
    memcpy(bits, x, sizeof bits);
    for (int i = 0; i < LANES; i++) {
        e[i] = (bits[i] - BITS_OF_ROOT_HALF) >> FRACTION_BITS;
        bits[i] -= e[i] * (1 << FRACTION_BITS); /* divides by 2^e */
    }
    memcpy(one_plus_f, bits, sizeof one_plus_f);
    for (int i = 0; i < LANES; i++) {
        float f = one_plus_f[i] - 1.0f;
        float s = f / (2.0f + f);
        float square = s * s;
        /* atanh(s) = s + s (s^2 / 3 + s^4 / 5 + s^6 / 7 + s^8 / 9) */
        float series = square * (1.0f / 3 + square * (1.0f / 5 + square * (1.0f / 7 + square * (1.0f / 9))));
        x[i] = (float)e[i] * LN_2 + 2.0f * (s + s * series);
    }
}

/* Convert a uint32 to float in two exact halves, whose sum is rounded once. Vector instructions convert only int32. */
INLINE float float_of(uint32_t x)
{
    return (float)(int32_t)(x >> 16) * 65536.0f + (float)(int32_t)(x & 0xFFFF);
}

/* Write the Gumbel noise of 32 random bits, with the formula of gumbel_from_bits in sampling.py: -log(E), where
   E = -log(1 - u) and u = (bits + 1/2) / 2^32. Where u < 1/32, E is a power series in u. */
INLINE void gumbel_of(float *noise, const uint32_t *bits)
{
    float series[LANES], small[LANES];
    for (int i = 0; i < LANES; i++) {
        float u = (float_of(bits[i]) + 0.5f) * 0x1p-32f;
        noise[i] = (float_of(~bits[i]) + 0.5f) * 0x1p-32f; /* 1 - u, without the rounding of a subtraction */
        series[i] = u * (1 + u * (0.5f + u * (1.0f / 3 + u * (0.25f + u * 0.2f))));
        small[i] = bits[i] >> 27 ? 0.0f : 1.0f; /* 1 where u < 1/32; a float, so that all lanes have one type */
    }
    log_of(noise);
    for (int i = 0; i < LANES; i++)
        noise[i] = small[i] > 0.5f ? series[i] : -noise[i];
    log_of(noise);
    for (int i = 0; i < LANES; i++)
        noise[i] = -noise[i];
}

/* Largest value that each lane has seen, and the token id that has it. */
typedef struct {
    float value[LANES];
    int32_t token[LANES];
} Best;

/* Set every lane to -infinity, which every finite value replaces. */
INLINE void reset_best(Best *best)
{
    for (int i = 0; i < LANES; i++) {
        best->value[i] = -INFINITY;
        best->token[i] = i;
    }
}

/* Update the largest values with those of the tokens first, first + 1, ..., one in each lane. An equal value does not
   replace, so that the lowest token wins. */
INLINE void keep_best(Best *best, const float *value, int32_t first)
{
    for (int i = 0; i < LANES; i++) {
        int better = value[i] > best->value[i];
        best->value[i] = better ? value[i] : best->value[i];
        best->token[i] = better ? first + i : best->token[i];
    }
}

/* Return the lane of the largest value; among equal values, the lane of the lowest token. */
INLINE int best_lane(const Best *best)
{
    int lane = 0;
    for (int i = 1; i < LANES; i++) {
        int higher = best->value[i] > best->value[lane];
        int equal = best->value[i] == best->value[lane];
        if (higher || (equal && best->token[i] < best->token[lane]))
            lane = i;
    }
    return lane;
}

/* Read logit + bias of LANES tokens from `first` on; tokens from `vocab` on are -infinity. */
INLINE void load(float *z, const float *logits, const float *bias, int32_t first, int32_t vocab)
{
    if (first + LANES <= vocab)
        for (int i = 0; i < LANES; i++)
            z[i] = logits[first + i] + bias[first + i];
    else
        for (int i = 0; i < LANES; i++)
            z[i] = first + i < vocab ? logits[first + i] + bias[first + i] : -INFINITY;
}

/* Key of the sampling noise of one row of logits. */
typedef struct {
    uint64_t seed;
    uint32_t purpose, step, row;
} NoiseKey;

/* Find the largest logit of a row (likely) and the largest score, logit / temperature + Gumbel noise (drawn), of each
   lane. The token `forbidden` is not drawn; -1 forbids none. */
INLINE void find_best(Best *likely, Best *drawn, NoiseKey key, const float *row, const float *bias, int32_t vocab,
                      float per_temperature, int32_t forbidden)
{
    float z[LANES], score[LANES];
    reset_best(likely);
    reset_best(drawn);
    for (int32_t quad = 0; 4 * quad < vocab; quad += LANES) { /* LANES counters give the bits of 4 * LANES tokens */
        Words c;
        uint32_t bits[4 * LANES];
        words_of(&c, key.seed, key.purpose, key.step, key.row, (uint32_t)quad);
        for (int i = 0; i < LANES; i++) {
            bits[4 * i] = c.w0[i];
            bits[4 * i + 1] = c.w1[i];
            bits[4 * i + 2] = c.w2[i];
            bits[4 * i + 3] = c.w3[i];
        }
        for (int part = 0; part < 4; part++) {
            int32_t first = 4 * quad + part * LANES;
            if (first >= vocab)
                break;
            load(z, row, bias, first, vocab);
            keep_best(likely, z, first);
            gumbel_of(score, bits + part * LANES);
            for (int i = 0; i < LANES; i++)
                score[i] += z[i] * per_temperature;
            if (forbidden >= first && forbidden < first + LANES)
                score[forbidden - first] = -INFINITY;
            keep_best(drawn, score, first);
        }
    }
}

/* Return the sum of exp(logit - top) over a row; with `store`, the exponentials overwrite the logits. */
INLINE float sum_exponentials(float *row, const float *bias, int32_t vocab, float top, int store)
{
    float z[LANES], sums[LANES] = {0}, sum = 0;
    for (int32_t first = 0; first < vocab; first += LANES) {
        load(z, row, bias, first, vocab);
        for (int i = 0; i < LANES; i++)
            z[i] -= top;
        exp_of(z);
        for (int i = 0; i < LANES; i++)
            sums[i] += z[i];
        if (store)
            for (int i = 0; i < LANES && first + i < vocab; i++)
                row[first + i] = z[i];
    }
    for (int i = 0; i < LANES; i++)
        sum += sums[i];
    return sum;
}

/* Replace the exponentials of a row, whose sum is `sum`, by (softmax - onehot) * weight, and the padding from `vocab`
   on by 0. The true token's difference is taken before the multiplication, so that it loses no digits. */
INLINE void write_gradient(float *row, int32_t vocab, int64_t stride, int64_t target, float sum, float weight)
{
    float scale = weight / sum;
    float target_gradient = (row[target] / sum - 1.0f) * weight;
    for (int32_t v = 0; v < vocab; v++)
        row[v] *= scale;
    row[target] = target_gradient;
    for (int64_t v = vocab; v < stride; v++)
        row[v] = 0.0f;
}

/* Run the head's row pass, row_pass_reference of mlm_head.py, on num_rows rows of logits: the cross-entropy loss, the
   most likely token, a sampled token and the gradient.

   A row has `stride` floats, of which the first `vocab` are tokens. rows are the numbers of the rows within the global
   batch, a part of the sampling key. per_temperature is 1 / temperature. With disallow_correct, the true token is not
   sampled. loss, most_likely and sampled have one element a row. With with_gradient, (softmax - onehot) * weight
   overwrites the logits, with 0 from `vocab` on. */
VECTORS void electra_row_pass(uint64_t seed, uint32_t purpose, uint32_t step, const int64_t *rows, int64_t num_rows,
                              float *logits, int64_t stride, int32_t vocab, const float *bias, const int64_t *target,
                              const float *weight, float per_temperature, int disallow_correct, int with_gradient,
                              float *loss, int64_t *most_likely, int64_t *sampled)
{
    for (int64_t r = 0; r < num_rows; r++) {
        float *row = logits + r * stride;
        float target_logit = row[target[r]] + bias[target[r]];
        int32_t forbidden = disallow_correct ? (int32_t)target[r] : -1;
        NoiseKey key = {seed, purpose, step, (uint32_t)rows[r]};
        Best likely, drawn;
        find_best(&likely, &drawn, key, row, bias, vocab, per_temperature, forbidden);
        int likely_lane = best_lane(&likely);
        float top = likely.value[likely_lane];
        most_likely[r] = likely.token[likely_lane];
        sampled[r] = drawn.token[best_lane(&drawn)];
        float sum = sum_exponentials(row, bias, vocab, top, with_gradient);
        loss[r] = logf(sum) + (top - target_logit);
        if (with_gradient)
            write_gradient(row, vocab, stride, target[r], sum, weight[r]);
    }
}
