/* Keyed random bits on a CPU: what keyed_random.py and data/order.py define in NumPy, at a tenth of the cost or less.

   Guarantee: the same bits. Philox4x32-10 (Salmon et al., SC 2011); the Feistel permutation of data/order.py.
   How: LANES counters side by side in plain loops that the compiler makes vectors of. No threads of its own.
   Built with the package where there is a C compiler (setup.py); philox_host.py finds it, and NumPy serves where it is
   missing.
   Where it stops: no state, no allocation, no errors: callers check ranges. */

#include <math.h>
#include <stdint.h>

#define LANES 16
#if defined(__x86_64__) && defined(__linux__) && !defined(__clang__)
#define VECTORS __attribute__((target_clones("avx512f", "avx2", "default"))) /* chosen when the library is loaded */
#else
#define VECTORS
#endif
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    uint32_t w0[LANES], w1[LANES], w2[LANES], w3[LANES];
} Words;

INLINE void philox(Words *c, uint64_t seed)
{
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
#pragma GCC unroll 1 /* unrolled whole, it would no longer be seen as vectors */
        for (int i = 0; i < LANES; i++) {
            uint64_t p0 = (uint64_t)c->w0[i] * 0xD2511F53u, p1 = (uint64_t)c->w2[i] * 0xCD9E8D57u;
            c->w0[i] = (uint32_t)(p1 >> 32) ^ c->w1[i] ^ k0;
            c->w1[i] = (uint32_t)p1;
            c->w2[i] = (uint32_t)(p0 >> 32) ^ c->w3[i] ^ k1;
            c->w3[i] = (uint32_t)p0;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

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

/* out[num_rows][4 * num_blocks], `stride` from row to row: 32 bits for each position from 4 * first_block on. */
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

/* As electra_bits: `scale` where the bits are at least `threshold`, else 0. */
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

typedef struct {
    uint64_t place[LANES], size[LANES], a[LANES], b[LANES];
    uint32_t epoch[LANES], block[LANES];
} Walkers;

/* One pass of the network over Z_a x Z_b: order.py's _feistel. */
INLINE void feistel(Walkers *w, uint64_t seed, uint32_t purpose, int num_rounds)
{
    uint64_t half[2][LANES];
    Words c;
    for (int i = 0; i < LANES; i++) {
        half[0][i] = w->place[i] / w->b[i];
        half[1][i] = w->place[i] % w->b[i];
    }
    for (int round = 0; round < num_rounds; round++) {
        uint64_t *moved = half[round % 2], *fixed = half[1 - round % 2], *limit = round % 2 ? w->b : w->a;
        for (int i = 0; i < LANES; i++) {
            c.w0[i] = (uint32_t)fixed[i];
            c.w1[i] = w->block[i];
            c.w2[i] = w->epoch[i];
            c.w3[i] = purpose | (uint32_t)round << 8;
        }
        philox(&c, seed);
        for (int i = 0; i < LANES; i++) {
            uint64_t sum = moved[i] + (((uint64_t)c.w0[i] * limit[i]) >> 32);
            moved[i] = sum >= limit[i] ? sum - limit[i] : sum;
        }
    }
    for (int i = 0; i < LANES; i++)
        w->place[i] = half[0][i] * w->b[i] + half[1][i];
}

/* out[count]: the place of index[i] in the permutation of [0, size[i]): order.py's permute. */
VECTORS void electra_permute(uint64_t seed, uint32_t purpose, int num_rounds, const uint64_t *index,
                             const uint64_t *size, const uint64_t *epoch, const uint64_t *block, int64_t count,
                             uint64_t *out)
{
    Walkers w;
    for (int64_t first = 0; first < count; first += LANES) {
        int64_t lanes = count - first < LANES ? count - first : LANES, walking = lanes;
        int inside[LANES] = {0};
        for (int i = 0; i < LANES; i++) {
            int64_t from = first + (i < lanes ? i : 0);
            w.place[i] = index[from];
            w.size[i] = size[from];
            w.epoch[i] = (uint32_t)epoch[from];
            w.block[i] = (uint32_t)block[from];
            w.a[i] = (uint64_t)ceil(sqrt((double)w.size[i]));
            w.b[i] = (w.size[i] + w.a[i] - 1) / w.a[i];
        }
        while (walking) {
            feistel(&w, seed, purpose, num_rounds);
            for (int i = 0; i < lanes; i++)
                if (!inside[i] && w.place[i] < w.size[i]) {
                    out[first + i] = w.place[i];
                    inside[i] = 1;
                    walking--;
                }
        }
    }
}
