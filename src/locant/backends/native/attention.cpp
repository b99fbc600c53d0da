// Exact attention with position terms, forward and backward, tile by tile with an online softmax, in float32 arithmetic.
//
// For batch b, head h, query i and key j, with offset o = id(j) - id(i), or j - i - (J - I) where no ids are given:
//     content = sum_c s q_c k_c gate[o]_c * scale[o]
//     logit   = content + s q . query[o] + k . key[o] + bias[o] + f pair[i, j] + low_i . low_j
//     out     = sum_j weight factor[i, j] (v + value[o]),  weights after softmax, then factors, then dropout
// (tables hold s where it is due). Vector tables have one row for each offset left .. right; farther offsets use the first or
// last row. Numbers (scale, bias) have one entry for every offset. Everything is cut into tiles of 64 queries x 64 keys; inputs,
// float32 or bfloat16, are copied to zero-padded buffers a head at a time, so that no loop has a tail. Written with GCC vector
// types: any CPU, fast on AVX2 and AVX-512.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

// ROWS x 4 vectors are summed at once in a product, DOWN x ACROSS on diagonals.
#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 4, DOWN = 4, ACROSS = 4;
#elif defined(__AVX2__)
constexpr int LANES = 8, ROWS = 4, DOWN = 2, ACROSS = 4;
#else
constexpr int LANES = 4, ROWS = 4, DOWN = 2, ACROSS = 4;
#endif
typedef float Vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t Int __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

constexpr int64_t TILE = 64;         // queries and keys of a tile
constexpr int64_t MARGIN = 2 * TILE;  // repeats of the first and last row beside a table, zeros beside numbers
constexpr int64_t GROUP = 16;        // keys that share a window of offsets
constexpr int64_t WINDOW = TILE + GROUP;
constexpr int64_t SLICE = 32;  // channels of a table and of keys that stay in the nearest cache
constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float LOG2E = 1.44269504f;

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }
inline Vec all(float x) { return Vec{} + x; }
inline Vec greater(Vec a, Vec b) { return a > b ? a : b; }
// Keeps a vector in a register: compilers would rather load it again for every use.
inline void hold(Vec& v) {
#if defined(__AVX512F__)
    asm("" : "+v"(v));
#elif defined(__SSE2__)
    asm("" : "+x"(v));
#endif
}
inline int64_t up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

template <int STEP>
inline Vec swapped(Vec v) {
    Int order;
    for (int l = 0; l < LANES; ++l) order[l] = l ^ STEP;
    return __builtin_shuffle(v, order);
}

inline float sum(Vec v) {
    v += swapped<1>(v);
    v += swapped<2>(v);
    if constexpr (LANES >= 8) v += swapped<4>(v);
    if constexpr (LANES >= 16) v += swapped<8>(v);
    return v[0];
}

inline float most(Vec v) {
    v = greater(v, swapped<1>(v));
    v = greater(v, swapped<2>(v));
    if constexpr (LANES >= 8) v = greater(v, swapped<4>(v));
    if constexpr (LANES >= 16) v = greater(v, swapped<8>(v));
    return v[0];
}

// 2^x with a relative error of about 1e-7; 0 below 2^-126.
inline Vec exp2_vec(Vec x) {
    const Vec floor = all(-126.0f);
    const Int dead = x < floor;
#ifdef __AVX512F__
    x = dead ? all(-300.0f) : x;
    const Vec n = (Vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    x = dead ? floor : x;
    const Vec magic = all(12582912.0f);
    const Vec n = (x + magic) - magic;
#endif
    const Vec r = x - n;
    Vec p = all(1.535336188e-4f);
    p = p * r + 1.339887440e-3f;
    p = p * r + 9.618437357e-3f;
    p = p * r + 5.550332471e-2f;
    p = p * r + 2.402264791e-1f;
    p = p * r + 6.931472029e-1f;
    p = p * r + 1.0f;
#ifdef __AVX512F__
    return (Vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    const Int exponent = (__builtin_convertvector(n, Int) + 127) << 23;
    return dead ? all(0.0f) : p * (Vec)exponent;
#endif
}

// The hash of locant.backends.dropout.
template <class T>
inline T mix(T x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

// --- products: C[M N] = starts + A[M K] B[K N], with A(m, k) = a[m * row + k * col]; M a multiple of ROWS, N of LANES ---------

struct Start {  // what sums start from: entry (m, n) is at[m * row + n]. Rows may overlap: a diagonal is a row of one less.
    const float* at;
    int64_t row;
};

struct Starts {
    Start list[6];
    int count = 0;
    Starts() {}
    Starts(const float* at, int64_t row) { add(at, row); }
    void add(const float* at, int64_t row) { list[count++] = {at, row}; }
};

template <int WIDTH>
inline void product_panel(int64_t depth, const float* a, int64_t row, int64_t col, const float* b, int64_t ldb, float* c,
                          int64_t ldc, const Starts& starts, int64_t m0, int64_t n0) {
    Vec acc[ROWS][WIDTH] = {};
    for (int s = 0; s < starts.count; ++s) {
        const int64_t step = starts.list[s].row;
        const float* at = starts.list[s].at + m0 * step + n0;
        for (int m = 0; m < ROWS; ++m)
            for (int w = 0; w < WIDTH; ++w) acc[m][w] += load(at + m * step + w * LANES);
    }
    for (int64_t k = 0; k < depth; ++k) {
        Vec right[WIDTH];
        for (int w = 0; w < WIDTH; ++w) hold(right[w] = load(b + k * ldb + w * LANES));
        for (int m = 0; m < ROWS; ++m) {
            const float left = a[m * row + k * col];
            for (int w = 0; w < WIDTH; ++w) acc[m][w] += right[w] * left;
        }
    }
    for (int m = 0; m < ROWS; ++m)
        for (int w = 0; w < WIDTH; ++w) store(c + m * ldc + w * LANES, acc[m][w]);
}

void product(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t row, int64_t col, const float* b,
             int64_t ldb, float* c, int64_t ldc, const Starts& starts) {
    int64_t n = 0;
    for (; n + 4 * LANES <= columns; n += 4 * LANES)
        for (int64_t m = 0; m < rows; m += ROWS)
            product_panel<4>(depth, a + m * row, row, col, b + n, ldb, c + m * ldc + n, ldc, starts, m, n);
    for (; n + 2 * LANES <= columns; n += 2 * LANES)
        for (int64_t m = 0; m < rows; m += ROWS)
            product_panel<2>(depth, a + m * row, row, col, b + n, ldb, c + m * ldc + n, ldc, starts, m, n);
    for (; n < columns; n += LANES)
        for (int64_t m = 0; m < rows; m += ROWS)
            product_panel<1>(depth, a + m * row, row, col, b + n, ldb, c + m * ldc + n, ldc, starts, m, n);
}

// C += A B
void add_product(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t row, int64_t col, const float* b,
                 int64_t ldb, float* c, int64_t ldc) {
    product(rows, columns, depth, a, row, col, b, ldb, c, ldc, Starts(c, ldc));
}

// Transposes a LANES x LANES block in registers.
template <int STEP>
inline void butterfly(Vec* v) {
    Int low, high;
    for (int l = 0; l < LANES; ++l) {
        low[l] = (l & STEP) ? LANES + l - STEP : l;
        high[l] = (l & STEP) ? LANES + l : l + STEP;
    }
    for (int r = 0; r < LANES; ++r)
        if (!(r & STEP)) {
            const Vec a = v[r], b = v[r + STEP];
            v[r] = __builtin_shuffle(a, b, low);
            v[r + STEP] = __builtin_shuffle(a, b, high);
        }
}

inline void transpose(Vec* v) {
    butterfly<1>(v);
    butterfly<2>(v);
    if constexpr (LANES >= 8) butterfly<4>(v);
    if constexpr (LANES >= 16) butterfly<8>(v);
}

// --- memory ---------------------------------------------------------------------------------------------------------

struct Buffer {  // 64-byte aligned, zeroed
    float* data = nullptr;
    size_t bytes;
    explicit Buffer(int64_t size) {
        bytes = up(std::max<int64_t>(size, 1) * 4, 64);
        data = static_cast<float*>(std::aligned_alloc(64, bytes));
        if (data) std::memset(data, 0, bytes);
    }
    ~Buffer() { std::free(data); }
    void clear() const { std::memset(data, 0, bytes); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    operator float*() const { return data; }
    float* operator+(int64_t n) const { return data + n; }
};

}  // namespace

extern "C" {

struct Operand {          // [B H N W], the last axis contiguous; null where there is none
    void* data;
    int64_t strides[3];  // of B, H and N; 0 where broadcast
    int64_t half;        // 1: bfloat16, 0: float32
};

struct Arguments {
    int64_t batch, heads, queries, keys, depth, width, rank;  // B H I J D E; rank: columns of low_query and low_key
    int64_t causal;                                            // key j is seen by query i while j <= i + J - I
    int64_t left, rows;                                        // offsets of the vector tables: left .. left + rows - 1
    int64_t lowest, numbers;                                   // offsets of bias and scales: lowest .. lowest + numbers - 1
    int64_t query_heads, key_heads, gate_heads, value_heads, bias_heads, scale_heads;  // 1 or H
    int64_t mask_strides[4];             // B H I J; 0 where broadcast
    int64_t query_step, key_step;        // of ids, from one batch row to the next
    int64_t slices_batch, slices_heads;  // 1 where a gradient of pairs is shared by the batch, by the heads
    int64_t seed, threshold;             // of dropout; 0: none
    int64_t chunks, threads;             // how the queries of one head are split; threads to use
    float scale, kept;                   // kept: what dropout multiplies kept weights by
    float pair_factor, unused;
    Operand q, k, v;                               // [B H I D], [B H J D], [B H J E]
    Operand low_query, low_key;                    // [B H I rank], [B H J rank]
    Operand pair, factors;                         // [B H I J]
    const float *query, *key, *gate, *value;       // [H R D], value [H R E]
    const float *bias, *scales;                    // [H numbers]
    const uint8_t* mask;
    const int64_t *query_ids, *key_ids;            // [B I], [B J]
    float* lse;                                    // [B H I]
    Operand out, dout;                             // [B H I E]
    Operand dq, dk, dv, dlow_query, dlow_key;      // as q; [chunks B H J D], [chunks B H J E]; as low_query, as dk
    Operand dpair, dfactors;                       // as pair, in float32, zeroed
    float *dquery, *dkey, *dgate, *dvalue;         // [threads H R D], zeroed
    float *dbias, *dscales;                        // [threads H numbers], zeroed
};

int64_t locant_arguments_size() { return sizeof(Arguments); }
int64_t locant_lanes() { return LANES; }

}  // extern "C"

namespace {

// `count` numbers of a row from column `first` on, times a factor.
void read(const Operand& t, int64_t b, int64_t h, int64_t n, int64_t first, int64_t count, float factor, float* to) {
    const int64_t at = b * t.strides[0] + h * t.strides[1] + n * t.strides[2] + first;
    if (t.half) {
        const uint16_t* from = static_cast<const uint16_t*>(t.data) + at;
        for (int64_t c = 0; c < count; ++c) {
            const uint32_t bits = static_cast<uint32_t>(from[c]) << 16;
            float x;
            std::memcpy(&x, &bits, 4);
            to[c] = x * factor;
        }
    } else {
        const float* from = static_cast<const float*>(t.data) + at;
        for (int64_t c = 0; c < count; ++c) to[c] = from[c] * factor;
    }
}

void write(const Operand& t, int64_t b, int64_t h, int64_t n, int64_t count, float factor, const float* from) {
    const int64_t at = b * t.strides[0] + h * t.strides[1] + n * t.strides[2];
    if (t.half) {  // rounded to the nearest, ties to even
        uint16_t* to = static_cast<uint16_t*>(t.data) + at;
        for (int64_t c = 0; c < count; ++c) {
            const float x = from[c] * factor;
            uint32_t bits;
            std::memcpy(&bits, &x, 4);
            to[c] = x == x ? (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 : 0x7FC0;
        }
    } else {
        float* to = static_cast<float*>(t.data) + at;
        for (int64_t c = 0; c < count; ++c) to[c] = from[c] * factor;
    }
}

enum class Side { left, band, right };

// A vector table of one head with repeated ends: `transposed` [D stride], where column x serves offset left - MARGIN + x, and
// `forward` [length D], its rows (reversed for the key term: row x serves offset right + MARGIN - x).
struct Table {
    int64_t rows, length, stride, depth;
    Buffer forward, transposed;
    Table(const Arguments& a, const float* source, int64_t width, bool reversed)
        : rows(a.rows),
          length(source ? a.rows + 2 * MARGIN : 0),
          stride(up(length, LANES) + (up(length, LANES) / 16 % 2 ? 0 : 16)),
          depth(up(width, LANES)),
          forward(source ? (length + TILE) * depth : 0),
          transposed(source ? depth * stride + 2 * TILE : 0) {
        for (int64_t x = 0; x < length; ++x) {
            const int64_t r = std::min(std::max<int64_t>(x - MARGIN, 0), rows - 1);
            std::memcpy(forward + x * depth, source + (reversed ? rows - 1 - r : r) * width, width * 4);
            for (int64_t c = 0; c < width; ++c) transposed[c * stride + x] = source[r * width + c];
        }
    }
    const float* end(Side side, bool reversed) const { return forward + ((side == Side::left) == reversed ? length - 1 : 0) * depth; }
};

// Position ids of queries or keys, by tiles.
struct Ids {
    int64_t count;
    std::vector<int64_t> id, low, high;  // low, high: of each tile
    std::vector<char> steady;            // whether the ids of a tile step by one
    explicit Ids(int64_t count) : count(count), id(up(count, TILE)), low(up(count, TILE) / TILE), high(low.size()), steady(low.size()) {}
    void fill(const int64_t* given, int64_t first) {
        for (int64_t n = 0; n < static_cast<int64_t>(id.size()); ++n)
            id[n] = n >= count ? id[n - 1] + 1 : given ? given[n] : first + n;
        for (size_t t = 0; t < low.size(); ++t) {
            const int64_t start = t * TILE, stop = std::min<int64_t>(start + TILE, count);
            low[t] = high[t] = id[start];
            steady[t] = 1;
            for (int64_t n = start + 1; n < stop; ++n) {
                low[t] = std::min(low[t], id[n]);
                high[t] = std::max(high[t], id[n]);
                if (id[n] != id[n - 1] + 1) steady[t] = 0;
            }
        }
    }
    int64_t lowest() const { return *std::min_element(low.begin(), low.end()); }
    int64_t highest() const { return *std::max_element(high.begin(), high.end()); }
};

// Inputs of one (batch, head), zero-padded; and what its tiles share.
struct Head {
    const Arguments& a;
    int64_t b = 0, h = 0, I, J, D, E, L;  // padded
    int64_t shift;                         // query i is key i + shift
    bool rows;                             // whether all rows of k are kept, not only a tile of them
    Buffer k, kt, v, vt, low, lowt, far, bias, scales;
    Ids query_ids, key_ids;
    Head(const Arguments& a, bool backward)
        : a(a),
          I(up(a.queries, TILE)),
          J(up(a.keys, TILE)),
          D(up(a.depth, LANES)),
          E(up(a.width, LANES)),
          L(up(a.rank, LANES)),
          shift(a.keys - a.queries),
          rows(backward || a.key || a.key_ids),
          k((rows ? J : TILE) * D),
          kt(J * D),
          v(J * E),
          vt(backward ? J * E : 0),
          low(J * L),
          lowt(J * L),
          far(a.key ? 2 * J : 0),
          bias(a.bias ? a.numbers + 2 * MARGIN : 0),
          scales(a.scales ? a.numbers + 2 * MARGIN : 0),
          query_ids(a.queries),
          key_ids(a.keys) {
        query_ids.fill(nullptr, shift);
        key_ids.fill(nullptr, 0);
    }

    void open(int64_t batch, int64_t head, const Table& key, bool backward) {
        b = batch, h = head;
        if (a.query_ids) query_ids.fill(a.query_ids + b * a.query_step, 0);
        if (a.key_ids) key_ids.fill(a.key_ids + b * a.key_step, 0);
        for (int64_t j0 = 0; j0 < J; j0 += TILE) {
            const int64_t count = std::min(TILE, a.keys - j0);
            float* to = k + (rows ? j0 * D : 0);
            for (int64_t j = 0; j < count; ++j) read(a.k, b, h, j0 + j, 0, a.depth, 1.0f, to + j * D);
            if (count < TILE) std::memset(to + count * D, 0, (TILE - count) * D * 4);
            panel(to, D, kt + j0 * D);
            for (int64_t j = 0; j < count; ++j) read(a.v, b, h, j0 + j, 0, a.width, 1.0f, v + (j0 + j) * E);
            if (backward) panel(v + j0 * E, E, vt + j0 * E);
            if (!a.rank) continue;
            for (int64_t j = 0; j < count; ++j) read(a.low_key, b, h, j0 + j, 0, a.rank, 1.0f, low + (j0 + j) * L);
            panel(low + j0 * L, L, lowt + j0 * L);
        }
        if (a.bias) std::memcpy(bias + MARGIN, a.bias + (a.bias_heads > 1 ? h : 0) * a.numbers, a.numbers * 4);
        if (a.scales) std::memcpy(scales + MARGIN, a.scales + (a.scale_heads > 1 ? h : 0) * a.numbers, a.numbers * 4);
        if (!a.key) return;
        for (Side side : {Side::left, Side::right}) {
            const float* row = key.end(side, true);
            float* to = far + (side == Side::left ? 0 : J);
            for (int64_t j = 0; j < a.keys; ++j) {
                Vec total = all(0.0f);
                for (int64_t c = 0; c < D; c += LANES) total += load(k + j * D + c) * load(row + c);
                to[j] = sum(total);
            }
        }
    }

    // [TILE W] -> [W TILE]
    static void panel(const float* source, int64_t width, float* target) {
        for (int64_t c0 = 0; c0 < width; c0 += LANES)
            for (int64_t j = 0; j < TILE; j += LANES) {
                Vec block[LANES];
                for (int l = 0; l < LANES; ++l) block[l] = load(source + (j + l) * width + c0);
                transpose(block);
                for (int l = 0; l < LANES; ++l) store(target + (c0 + l) * TILE + j, block[l]);
            }
    }

    int64_t last_tile(int64_t i0) const {  // keys to look at from the block of queries i0
        const int64_t last = std::min(i0 + TILE, a.queries) - 1 + shift;
        return a.causal ? std::min(J, up(std::max<int64_t>(last + 1, 0), TILE)) : J;
    }
};

// Scratch of one block of queries, and the arithmetic on its tiles.
struct Block {
    const Head& head;
    const Arguments& a;
    const Table *query = nullptr, *key = nullptr, *gate = nullptr, *value = nullptr;
    bool kept;  // whether the content before scales is
    int64_t wide;
    Buffer q, low, tile, content, products, gated_left, gated_right, mass;
    int64_t i0 = 0, height = 0, tall = 0;        // queries of the block; in whole vectors
    int64_t j0 = 0, columns = 0, cols = 0;       // keys of the tile; in whole vectors
    int64_t base = 0;                            // offset of its first query and first key
    bool steady = true;                          // whether offsets are constant along its diagonals
    Side side = Side::band;                      // where it lies to the vector tables
    int64_t low_row = 0, high_row = 0;           // columns of a table (multiples of LANES) that may be needed
    int64_t begin = 0, end = 0;                  // the same with margins: what of arrays [TILE wide] is in use

    Block(const Head& head, bool backward)
        : head(head),
          a(head.a),
          kept(backward),
          wide(up(a.rows + 2 * MARGIN, LANES) + TILE),
          q(TILE * head.D),
          low(TILE * head.L),
          tile(TILE * TILE),
          content(a.scales && backward ? TILE * TILE : 0),
          products(a.query ? TILE * wide : 0),
          gated_left(a.gate ? TILE * head.D : 0),
          gated_right(a.gate ? TILE * head.D : 0),
          mass(a.value ? TILE * wide : 0) {}

    void open(int64_t start) {
        i0 = start;
        height = std::min(TILE, a.queries - i0);
        tall = up(height, LANES);
        for (int64_t i = 0; i < height; ++i) read(a.q, head.b, head.h, i0 + i, 0, a.depth, a.scale, q + i * head.D);
        std::memset(q + height * head.D, 0, (TILE - height) * head.D * 4);
        for (int64_t i = 0; a.rank && i < height; ++i)
            read(a.low_query, head.b, head.h, i0 + i, 0, a.rank, 1.0f, low + i * head.L);
        needed();
        if (a.query) meet(q, head.D, *query, products);
        if (a.value) clear(mass);
        if (a.gate)
            for (int64_t i = 0; i < tall; ++i)
                for (int64_t c = 0; c < head.D; c += LANES) {
                    const Vec x = load(q + i * head.D + c);
                    store(gated_left + i * head.D + c, x * load(gate->end(Side::left, false) + c));
                    store(gated_right + i * head.D + c, x * load(gate->end(Side::right, false) + c));
                }
    }

    void needed() {  // offsets seen from this block, as columns with margins
        const int64_t first = head.key_ids.lowest() - head.query_ids.high[i0 / TILE] - a.left + MARGIN;
        int64_t last = head.key_ids.highest() - head.query_ids.low[i0 / TILE] - a.left + MARGIN;
        if (a.causal && !a.key_ids) last = std::min(last, MARGIN - a.left);
        low_row = std::min(std::max(first, MARGIN), MARGIN + a.rows - 1) / LANES * LANES;
        high_row = up(std::max(std::min(last + 1, MARGIN + a.rows), low_row + 1), LANES);
        begin = std::max<int64_t>(low_row - MARGIN, 0);
        end = high_row + MARGIN + TILE > MARGIN + a.rows ? wide : high_row + MARGIN + TILE;
    }

    void clear(float* gathered) const {
        for (int64_t i = 0; i < tall; ++i) std::memset(gathered + i * wide + begin, 0, (end - begin) * 4);
    }

    // Go to the tile at key j; false where nothing of it is allowed.
    bool go(int64_t j) {
        j0 = j;
        columns = std::min(TILE, a.keys - j0);
        cols = a.gate ? TILE : up(columns, LANES);
        if (hidden()) return false;
        const Ids &queries = head.query_ids, &keys = head.key_ids;
        const int64_t t = i0 / TILE, u = j0 / TILE;
        base = keys.id[j0] - queries.id[i0];
        steady = queries.steady[t] && keys.steady[u];
        side = Side::band;
        if (keys.high[u] - queries.low[t] <= a.left) side = Side::left;
        else if (keys.low[u] - queries.high[t] >= a.left + a.rows - 1) side = Side::right;
        return true;
    }

    bool scattered() const { return side == Side::band && !steady; }
    int64_t offset(int64_t i, int64_t j) const { return head.key_ids.id[j0 + j] - head.query_ids.id[i0 + i]; }
    // Column of a pair in an array over offsets with margins: on diagonals, and for any ids.
    int64_t at(int64_t i, int64_t j) const { return base + j - i - a.left + MARGIN; }
    int64_t spot(int64_t i, int64_t j) const {
        return std::min(std::max<int64_t>(offset(i, j) - a.left, 0), a.rows - 1) + MARGIN;
    }
    int64_t number(int64_t i, int64_t j) const { return base + j - i - a.lowest + MARGIN; }

    // Calls what(i, j) for every pair of the tile.
    template <class What>
    void each(const What& what) const {
        for (int64_t i = 0; i < height; ++i)
            for (int64_t j = 0; j < columns; ++j) what(i, j);
    }

    // x [TILE depth] times the rows of a table: to [TILE wide], with margins.
    void meet(const float* x, int64_t stride, const Table& table, float* to) const {
        product(tall, high_row - low_row, table.depth, x, stride, 1, table.transposed + low_row, table.stride, to + low_row,
                wide, Starts());
        const int64_t first = std::max(low_row, MARGIN), last = std::min(high_row, MARGIN + a.rows) - 1;
        for (int64_t i = 0; i < tall; ++i) {
            float* row = to + i * wide;
            std::fill(row + begin, row + first, row[first]);
            std::fill(row + last + 1, row + end, row[last]);
        }
    }

    // The tile's share of an array [TILE wide] with margins, by offset.
    void share(const float* from, Starts& starts) const {
        if (side == Side::band) starts.add(from + at(0, 0), wide - 1);
        else starts.add(from + (side == Side::left ? 0 : MARGIN + a.rows), wide);
    }

    // to[i, offset] += d[i, j]: the way back.
    void gather(const float* d, float* to) const {
        if (scattered()) {
            each([&](int64_t i, int64_t j) { to[i * wide + spot(i, j)] += d[i * TILE + j]; });
            return;
        }
        for (int64_t i = 0; i < tall; ++i) {
            if (side == Side::band) {
                float* row = to + i * wide + at(i, 0);
                for (int64_t j = 0; j < cols; j += LANES) store(row + j, load(row + j) + load(d + i * TILE + j));
            } else {  // what lies in a margin counts for the first or last row
                float* row = to + i * wide + (side == Side::left ? 0 : MARGIN + a.rows);
                Vec total = load(row);
                for (int64_t j = 0; j < cols; j += LANES) total += load(d + i * TILE + j);
                store(row, total);
            }
        }
    }

    // Bring what was gathered in the margins to the first and last row; returns the columns that count.
    std::pair<int64_t, int64_t> collapse(float* gathered) const {
        const int64_t first = MARGIN, last = MARGIN + a.rows - 1;
        for (int64_t i = 0; i < tall; ++i) {
            float* row = gathered + i * wide;
            Vec under = all(0.0f), over = all(0.0f);
            for (int64_t x = begin; x < first; x += LANES) under += load(row + x);
            for (int64_t x = last + 1; x + LANES <= end; x += LANES) {
                over += load(row + x);
                store(row + x, all(0.0f));
            }
            row[first] += sum(under);
            row[last] += sum(over);
        }
        return {std::max(low_row, first), std::min(high_row, last + 1)};
    }

    // s = starts + sum_c left k_c on a tile whose offsets are constant along diagonals, with left = q_c (gate[o]_c) + key[o]_c:
    // rows LANES apart meet the same vectors of a transposed table, so that DOWN x ACROSS blocks share their loads.
    template <bool QUERY, bool GATE, bool KEY>
    void diagonal(float* s, Starts starts) const {
        for (int64_t c = 0; c < a.depth; c += SLICE) {
            const int64_t stop = std::min(c + SLICE, a.depth);
            for (int64_t j = 0; j < cols; j += ACROSS * LANES) {
                int64_t i = 0;
                for (; i + DOWN * LANES <= tall; i += DOWN * LANES)
                    for (int r = 0; r < LANES; ++r) strip<QUERY, GATE, KEY, DOWN>(i + r, j, c, stop, s, starts);
                for (; i < tall; i += LANES)
                    for (int r = 0; r < LANES; ++r) strip<QUERY, GATE, KEY, 1>(i + r, j, c, stop, s, starts);
            }
            starts = Starts(s, TILE);
        }
    }

    template <bool QUERY, bool GATE, bool KEY, int COUNT>
    void strip(int64_t i, int64_t j, int64_t start, int64_t stop, float* s, const Starts& starts) const {
        Vec acc[COUNT][ACROSS] = {};
        for (int n = 0; n < starts.count; ++n) {
            const int64_t step = starts.list[n].row;
            const float* from = starts.list[n].at + i * step + j;
            for (int m = 0; m < COUNT; ++m)
                for (int w = 0; w < ACROSS; ++w) acc[m][w] += load(from + m * LANES * step + w * LANES);
        }
        const float *left = q + i * head.D, *keys = head.kt + j0 * head.D + j;
        const float *gates = GATE ? gate->transposed + at(i, j) : nullptr, *added = KEY ? key->transposed + at(i, j) : nullptr;
        const int64_t stride = GATE ? gate->stride : key->stride;
        for (int64_t c = start; c < stop; ++c) {
            Vec k[ACROSS];
            for (int w = 0; w < ACROSS; ++w) hold(k[w] = load(keys + c * TILE + w * LANES));
#pragma GCC unroll 8
            for (int t = 1 - COUNT; t < ACROSS; ++t) {
                Vec times = {}, plus = {};
                if constexpr (GATE) hold(times = load(gates + c * stride + t * LANES));
                if constexpr (KEY) hold(plus = load(added + c * stride + t * LANES));
#pragma GCC unroll 8
                for (int m = 0; m < COUNT; ++m) {
                    const int w = t + m;
                    if (w < 0 || w >= ACROSS) continue;
                    Vec x = plus;
                    if constexpr (QUERY && GATE && KEY) x = times * left[m * LANES * head.D + c] + plus;
                    else if constexpr (QUERY && GATE) x = times * left[m * LANES * head.D + c];
                    else if constexpr (QUERY) x = plus + left[m * LANES * head.D + c];
                    acc[m][w] += x * k[w];
                }
            }
        }
        for (int m = 0; m < COUNT; ++m)
            for (int w = 0; w < ACROSS; ++w) store(s + (i + m * LANES) * TILE + j + w * LANES, acc[m][w]);
    }

    // s = starts + content; with KEY the key term, too.
    template <bool KEY>
    void contents(float* s, const Starts& starts) const {
        if (side == Side::band && a.gate) {
            diagonal<true, true, KEY>(s, starts);
        } else if (side == Side::band && KEY) {
            diagonal<true, false, true>(s, starts);
        } else {
            const float* left = !a.gate ? q.data : side == Side::left ? gated_left.data : gated_right.data;
            product(tall, cols, a.depth, left, head.D, 1, head.kt + j0 * head.D, TILE, s, TILE, starts);
        }
    }

    // Logits of the tile.
    void logits() {
        float* s = tile;
        Starts starts;
        if (a.bias && steady) starts.add(head.bias + number(0, 0), -1);
        if (a.query && !scattered()) share(products, starts);
        if (a.key && side != Side::band) starts.add(head.far + (side == Side::left ? 0 : head.J) + j0, 0);
        const bool plain = a.pair.data && !a.pair.half && a.pair_factor == 1 && height == TILE && columns == TILE;
        if (plain) {
            const int64_t* step = a.pair.strides;
            starts.add(static_cast<const float*>(a.pair.data) + head.b * step[0] + head.h * step[1] + i0 * step[2] + j0, step[2]);
        }
        if (a.scales || scattered()) apart(s, starts);
        else if (a.key) contents<true>(s, starts);
        else contents<false>(s, starts);
        if (a.rank) product(tall, cols, a.rank, low, head.L, 1, head.lowt + j0 * head.L, TILE, s, TILE, Starts(s, TILE));
        if (a.bias && !steady) each([&](int64_t i, int64_t j) { s[i * TILE + j] += head.bias[offset(i, j) - a.lowest + MARGIN]; });
        if (a.pair.data && !plain) pairs<false>(a.pair, a.pair_factor, s);
        hide(s);
    }

    // The same where the content is to be changed before anything is added, or pairs are looked up one by one.
    void apart(float* s, const Starts& starts) {
        float* to = a.scales && kept ? content.data : s;
        if (scattered() && a.gate) gate_pairs(to);
        else contents<false>(to, Starts());
        if (a.scales) scale(to, s);
        for (int n = 0; n < starts.count; ++n)
            for (int64_t i = 0; i < tall; ++i) {
                const float* from = starts.list[n].at + i * starts.list[n].row;
                for (int64_t j = 0; j < cols; j += LANES) store(s + i * TILE + j, load(s + i * TILE + j) + load(from + j));
            }
        if (scattered() && a.query) each([&](int64_t i, int64_t j) { s[i * TILE + j] += products[i * wide + spot(i, j)]; });
        if (!a.key || side != Side::band) return;
        if (steady) diagonal<false, false, true>(s, Starts(s, TILE));
        else key_pairs(s);
    }

    void scale(const float* from, float* to) const {
        if (!steady) {
            each([&](int64_t i, int64_t j) {
                to[i * TILE + j] = from[i * TILE + j] * head.scales[offset(i, j) - a.lowest + MARGIN];
            });
            return;
        }
        for (int64_t i = 0; i < tall; ++i)
            for (int64_t j = 0; j < cols; j += LANES)
                store(to + i * TILE + j, load(from + i * TILE + j) * load(head.scales + number(i, j)));
    }

    void gate_pairs(float* s) const {
        const int64_t D = head.D;
        std::memset(s, 0, TILE * TILE * 4);
        each([&](int64_t i, int64_t j) {
            const float *x = q + i * D, *y = head.k + (j0 + j) * D, *row = gate->forward + spot(i, j) * D;
            Vec total = all(0.0f);
            for (int64_t c = 0; c < D; c += LANES) total += load(x + c) * load(y + c) * load(row + c);
            s[i * TILE + j] = sum(total);
        });
    }

    const float* key_row(int64_t i, int64_t j) const { return key->forward + (key->length - 1 - spot(i, j)) * head.D; }

    void key_pairs(float* s) const {
        const int64_t D = head.D;
        each([&](int64_t i, int64_t j) {
            const float *y = head.k + (j0 + j) * D, *row = key_row(i, j);
            Vec total = all(0.0f);
            for (int64_t c = 0; c < D; c += LANES) total += load(y + c) * load(row + c);
            s[i * TILE + j] += sum(total);
        });
    }

    // s += factor * the tile of a tensor of pairs; or s *= it.
    template <bool TIMES>
    void pairs(const Operand& t, float factor, float* s) const {
        float row[TILE];
        for (int64_t i = 0; i < height; ++i) {
            read(t, head.b, head.h, i0 + i, j0, columns, factor, row);
            float* to = s + i * TILE;
            for (int64_t j = 0; j < columns; ++j) to[j] = TIMES ? to[j] * row[j] : to[j] + row[j];
        }
    }

    // to[i, j] *= 0 or what dropout multiplies by.
    void drop(float* to) const {
        const uint32_t h = mix(static_cast<uint32_t>((head.b * a.heads + head.h) * 0x9E3779B9u + a.seed));
        Bits lane;
        for (int l = 0; l < LANES; ++l) lane[l] = l * 0xC2B2AE35u;
        for (int64_t i = 0; i < tall; ++i) {
            const uint32_t row = mix(h + static_cast<uint32_t>(i0 + i) * 0x85EBCA6Bu);
            for (int64_t j = 0; j < cols; j += LANES) {
                const Bits bits = mix(lane + (row + static_cast<uint32_t>(j0 + j) * 0xC2B2AE35u)) >> 8;
                const Int keep = (Int)bits >= static_cast<int32_t>(a.threshold);
                store(to + i * TILE + j, keep ? load(to + i * TILE + j) * a.kept : all(0.0f));
            }
        }
    }

    const uint8_t* mask_row(int64_t i) const {
        return a.mask + head.b * a.mask_strides[0] + head.h * a.mask_strides[1] + (i0 + i) * a.mask_strides[2] +
               j0 * a.mask_strides[3];
    }

    bool hidden() const {
        if (!a.mask) return false;
        const int64_t step = a.mask_strides[3];
        for (int64_t i = 0; i < (a.mask_strides[2] ? height : 1); ++i) {
            const uint8_t* row = mask_row(i);
            for (int64_t j = 0; j < (step ? columns : 1); ++j)
                if (row[j * step]) return false;
        }
        return true;
    }

    void hide(float* s) const {
        for (int64_t i = 0; i < tall; ++i) {
            int64_t end = columns;
            if (a.causal) end = std::min(std::max<int64_t>(i0 + i + head.shift + 1 - j0, 0), columns);
            for (int64_t j = end; j < cols; ++j) s[i * TILE + j] = -INF;
        }
        if (!a.mask) return;
        const int64_t step = a.mask_strides[3];
        for (int64_t i = 0; i < height; ++i) {
            const uint8_t* row = mask_row(i);
            float* to = s + i * TILE;
            if (step == 1)
                for (int64_t j = 0; j < columns; ++j) to[j] = row[j] ? to[j] : -INF;
            else
                for (int64_t j = 0; j < columns; ++j) to[j] = row[j * step] ? to[j] : -INF;
        }
    }
};

struct Softmax {  // of each query of a block: running maximum, and sum in LANES parts, both relative to powers of two
    float base[TILE], top[TILE];
    Vec total[TILE];
    Softmax() {
        std::fill(top, top + TILE, -INF);
        std::fill(base, base + TILE, -INF);
        std::fill(total, total + TILE, Vec{});
    }
    // Turn logits into weights relative to the running maximum; bring what was summed so far to the new one.
    void step(const Block& block, float* s, float* out, int64_t width, float* mass) {
        for (int64_t i = 0; i < block.tall; ++i) {
            float* row = s + i * TILE;
            Vec high = load(row);
            for (int64_t j = LANES; j < block.cols; j += LANES) high = greater(load(row + j), high);
            const float now = std::max(most(high), top[i]);
            if (now != top[i]) {
                const float next = now * LOG2E, factor = std::exp2(base[i] - next);
                top[i] = now;
                base[i] = next;
                total[i] *= factor;
                for (int64_t c = 0; c < width; c += LANES) store(out + i * width + c, load(out + i * width + c) * factor);
                for (int64_t x = block.begin; mass && x < block.end; ++x) mass[i * block.wide + x] *= factor;
            }
            const float low = base[i] == -INF ? 0.0f : base[i];
            Vec weights = total[i];
            for (int64_t j = 0; j < block.cols; j += LANES) {
                const Vec p = exp2_vec(load(row + j) * LOG2E - low);
                store(row + j, p);
                weights += p;
            }
            total[i] = weights;
        }
    }
};

void forward_block(Block& block, float* accumulated) {
    const Head& head = block.head;
    const Arguments& a = head.a;
    const int64_t E = head.E;
    Softmax softmax;
    std::memset(accumulated, 0, TILE * E * 4);
    for (int64_t j0 = 0; j0 < head.last_tile(block.i0); j0 += TILE) {
        if (!block.go(j0)) continue;
        block.logits();
        softmax.step(block, block.tile, accumulated, E, a.value ? block.mass.data : nullptr);
        if (a.factors.data) block.pairs<true>(a.factors, 1.0f, block.tile);
        if (a.threshold) block.drop(block.tile);
        if (a.value) block.gather(block.tile, block.mass);
        add_product(block.tall, E, block.cols, block.tile, TILE, 1, head.v + j0 * E, E, accumulated, E);
    }
    if (a.value) {
        const auto [low, high] = block.collapse(block.mass);
        add_product(block.tall, E, high - low, block.mass + low, block.wide, 1, block.value->forward + low * E, E, accumulated, E);
    }
    for (int64_t i = 0; i < block.height; ++i) {
        const float total = sum(softmax.total[i]);
        const bool blind = total == 0.0f;  // sees nothing: zeros, and no weight in backward
        write(a.out, head.b, head.h, block.i0 + i, a.width, blind ? 0.0f : 1.0f / total, accumulated + i * E);
        const float lse = (softmax.base[i] + std::log2(total)) / LOG2E;
        a.lse[(head.b * a.heads + head.h) * a.queries + block.i0 + i] = blind ? INF : lse;
    }
}

// Gradients that one thread sums for one head.
struct Gradients {
    Buffer dq, dk, dv, dout, dtile, spread, dwindow, dfar, dbias, dscales;
    Buffer dquery, dkey, dgate;  // with margins; dgate transposed, [D stride]
    Buffer dkt, spare, dends;    // for the gate: dk as [J / TILE, D, TILE]; one product; [2 D], of the far sides
    Buffer weights, toward, dvalue;  // weights as v meets them; toward: dout times the rows of the value table
    Buffer out, dlow, dlow_keys;
    Gradients(const Head& head, const Block& block)
        : dq(TILE * head.D),
          dk(head.J * head.D),
          dv(head.J * head.E),
          dout(TILE * head.E),
          dtile(TILE * TILE),
          spread(head.a.query ? TILE * block.wide : 0),
          dwindow(head.a.key ? GROUP * WINDOW : 0),
          dfar(head.a.key ? 2 * head.J : 0),
          dbias(head.a.bias ? head.a.numbers + 2 * MARGIN : 0),
          dscales(head.a.scales ? head.a.numbers + 2 * MARGIN : 0),
          dquery(head.a.query ? (block.query->length + TILE) * head.D : 0),
          dkey(head.a.key ? (block.key->length + TILE) * head.D : 0),
          dgate(head.a.gate ? head.a.depth * block.gate->stride + 2 * TILE : 0),
          dkt(head.a.gate ? head.J * head.D : 0),
          spare(head.a.gate ? TILE * head.D : 0),
          dends(head.a.gate ? 2 * head.D : 0),
          weights(head.a.threshold || head.a.factors.data ? TILE * TILE : 0),
          toward(head.a.value ? TILE * block.wide : 0),
          dvalue(head.a.value ? (block.value->length + TILE) * head.E : 0),
          out(head.E),
          dlow(TILE * head.L),
          dlow_keys(head.J * head.L) {}
    void open() {
        for (const Buffer* buffer : {&dk, &dv, &dfar, &dbias, &dscales, &dquery, &dkey, &dgate, &dkt, &dends, &dvalue, &dlow_keys})
            buffer->clear();
    }
    void close(const Head& head, const Block& block, int64_t chunk, int64_t thread);
};

// The tile's logits are weights now; turn dtile (the gradient of the weights) into that of the logits, and sum everything.
struct Backward {
    Block& block;
    Gradients& g;
    const Head& head;
    const Arguments& a;
    float delta[TILE], lse[TILE];

    Backward(Block& block, Gradients& g) : block(block), g(g), head(block.head), a(block.a) {}

    void open() {
        const int64_t at = (head.b * a.heads + head.h) * a.queries + block.i0, E = head.E;
        std::memset(g.dout, 0, TILE * E * 4);
        g.dq.clear();
        g.dlow.clear();
        if (a.query) block.clear(g.spread);
        for (int64_t i = 0; i < TILE; ++i) {
            delta[i] = 0.0f;
            const bool seen = i < block.height && a.lse[at + i] != INF;
            lse[i] = seen ? a.lse[at + i] * LOG2E : 1e30f;
            if (i >= block.height) continue;
            read(a.dout, head.b, head.h, block.i0 + i, 0, a.width, 1.0f, g.dout + i * E);
            read(a.out, head.b, head.h, block.i0 + i, 0, a.width, 1.0f, g.out);
            Vec total = all(0.0f);
            for (int64_t c = 0; c < E; c += LANES) total += load(g.dout + i * E + c) * load(g.out + c);
            delta[i] = sum(total);
        }
        if (a.value) block.meet(g.dout, E, *block.value, g.toward);
    }

    void tile() {
        const int64_t D = head.D, j0 = block.j0, tall = block.tall, cols = block.cols;
        float *p = block.tile, *d = g.dtile;
        block.logits();
        for (int64_t i = 0; i < tall; ++i)
            for (int64_t j = 0; j < cols; j += LANES)
                store(p + i * TILE + j, exp2_vec(load(p + i * TILE + j) * LOG2E - lse[i]));
        values(p, d);
        for (int64_t i = 0; i < tall; ++i)
            for (int64_t j = 0; j < cols; j += LANES)
                store(d + i * TILE + j, load(p + i * TILE + j) * (load(d + i * TILE + j) - delta[i]));
        if (a.dpair.data) pairs(a.dpair, d, nullptr);
        if (a.bias) numbers(g.dbias, d, nullptr);
        if (a.query) block.gather(d, g.spread);
        if (a.key) key(d);
        if (a.rank) {
            add_product(tall, head.L, cols, d, TILE, 1, head.low + j0 * head.L, head.L, g.dlow, head.L);
            add_product(cols, head.L, tall, d, 1, TILE, block.low, head.L, g.dlow_keys + j0 * head.L, head.L);
        }
        if (a.scales) {
            numbers(g.dscales, d, block.content);
            block.scale(d, d);
        }
        if (!a.gate) {
            add_product(tall, D, cols, d, TILE, 1, head.k + j0 * D, D, g.dq, D);
            add_product(cols, D, tall, d, 1, TILE, block.q, D, g.dk + j0 * D, D);
        } else if (block.side != Side::band) {
            gate_far(d);
        } else if (block.steady) {
            gate(d);
        } else {
            gate_pairs(d);
        }
    }

    // d = the gradient of the weights p after softmax; sums those of v and of what stands between.
    void values(const float* p, float* d) {
        const int64_t E = head.E, j0 = block.j0, tall = block.tall, cols = block.cols;
        Starts starts;
        if (a.value && !block.scattered()) block.share(g.toward, starts);
        product(tall, cols, a.width, g.dout, E, 1, head.vt + j0 * E, TILE, d, TILE, starts);
        if (a.value && block.scattered())
            block.each([&](int64_t i, int64_t j) { d[i * TILE + j] += g.toward[i * block.wide + block.spot(i, j)]; });
        const float* met = p;
        if (a.threshold || a.factors.data) {
            std::memcpy(g.weights, p, TILE * TILE * 4);
            if (a.factors.data) block.pairs<true>(a.factors, 1.0f, g.weights);
            if (a.threshold) {
                block.drop(g.weights);
                block.drop(d);
            }
            if (a.dfactors.data) pairs(a.dfactors, d, p);
            if (a.factors.data) block.pairs<true>(a.factors, 1.0f, d);
            met = g.weights;
        }
        if (a.value) block.gather(met, block.mass);
        add_product(cols, E, tall, met, 1, TILE, g.dout, E, g.dv + j0 * E, E);
    }

    // Adds the tile to a tensor of pairs; times another one.
    void pairs(const Operand& t, const float* d, const float* times) const {
        for (int64_t i = 0; i < block.height; ++i) {
            float* row = static_cast<float*>(t.data) + head.b * t.strides[0] + head.h * t.strides[1] +
                         (block.i0 + i) * t.strides[2] + block.j0;
            const float *from = d + i * TILE, *other = times + (times ? i * TILE : 0);
            for (int64_t j = 0; j < block.columns; ++j) row[j] += times ? from[j] * other[j] : from[j];
        }
    }

    void numbers(float* to, const float* d, const float* times) const {
        if (!block.steady) {
            block.each([&](int64_t i, int64_t j) {
                to[block.offset(i, j) - a.lowest + MARGIN] += d[i * TILE + j] * (times ? times[i * TILE + j] : 1.0f);
            });
            return;
        }
        for (int64_t i = 0; i < block.tall; ++i) {
            float* row = to + block.number(i, 0);
            for (int64_t j = 0; j < block.cols; j += LANES) {
                Vec x = load(d + i * TILE + j);
                if (times) x *= load(times + i * TILE + j);
                store(row + j, load(row + j) + x);
            }
        }
    }

    void key(const float* d) const {
        if (block.scattered()) {
            key_pairs(d);
        } else if (block.side != Side::band) {
            float* far = g.dfar + (block.side == Side::left ? 0 : head.J) + block.j0;
            for (int64_t i = 0; i < block.tall; ++i)
                for (int64_t j = 0; j < block.cols; j += LANES) store(far + j, load(far + j) + load(d + i * TILE + j));
        } else {
            for (int64_t j = 0; j < block.cols; j += GROUP) key_window(j, d);
        }
    }

    // Keys j .. j + GROUP - 1 and the offsets at which this block's queries see them: column x of the window serves row start + x
    // of the reversed table.
    void key_window(int64_t j, const float* d) const {
        const int64_t D = head.D, tall = block.tall;
        std::memset(g.dwindow, 0, GROUP * WINDOW * 4);
        for (int64_t u = 0; u < std::min(GROUP, block.cols - j); u += LANES)
            for (int64_t i = 0; i < tall; i += LANES) {
                Vec part[LANES];
                for (int l = 0; l < LANES; ++l) part[l] = load(d + (i + l) * TILE + j + u);
                transpose(part);
                for (int l = 0; l < LANES; ++l) store(g.dwindow + (u + l) * WINDOW + GROUP - 1 - u - l + i, part[l]);
            }
        const int64_t start = block.key->length - 1 - block.at(0, j + GROUP - 1);
        add_product(GROUP, D, tall + GROUP, g.dwindow, WINDOW, 1, block.key->forward + start * D, D, g.dk + (block.j0 + j) * D, D);
        add_product(tall + GROUP, D, GROUP, g.dwindow, 1, WINDOW, head.k + (block.j0 + j) * D, D, g.dkey + start * D, D);
    }

    void key_pairs(const float* d) const {
        const int64_t D = head.D;
        block.each([&](int64_t i, int64_t j) {
            const float x = d[i * TILE + j], *y = head.k + (block.j0 + j) * D, *row = block.key_row(i, j);
            float *dy = g.dk + (block.j0 + j) * D, *drow = g.dkey + (row - block.key->forward);
            for (int64_t c = 0; c < D; c += LANES) {
                store(dy + c, load(dy + c) + load(row + c) * x);
                store(drow + c, load(drow + c) + load(y + c) * x);
            }
        });
    }

    void gate_far(const float* d) const {
        const int64_t D = head.D, j0 = block.j0;
        const bool left = block.side == Side::left;
        const float* row = block.gate->end(block.side, false);
        float* drow = g.dends + (left ? 0 : D);
        product(block.tall, D, TILE, d, TILE, 1, head.k + j0 * D, D, g.spare, D, Starts());
        for (int64_t i = 0; i < block.tall; ++i)
            for (int64_t c = 0; c < D; c += LANES) {
                const Vec seen = load(g.spare + i * D + c);
                store(g.dq + i * D + c, load(g.dq + i * D + c) + seen * load(row + c));
                store(drow + c, load(drow + c) + seen * load(block.q + i * D + c));
            }
        add_product(TILE, D, block.tall, d, 1, TILE, left ? block.gated_left : block.gated_right, D, g.dk + j0 * D, D);
    }

    void gate(const float* d) const {
        const int64_t D = head.D, stride = block.gate->stride;
        const float* kt = head.kt + block.j0 * D;
        float* dkt = g.dkt + block.j0 * D;
        constexpr int WIDTH = 4;
        for (int64_t c0 = 0; c0 < a.depth; c0 += LANES)
            for (int64_t j = 0; j < block.cols; j += WIDTH * LANES)
                for (int64_t i = 0; i < block.tall; ++i) {
                    Vec grad[WIDTH], seen[LANES] = {};
                    for (int w = 0; w < WIDTH; ++w) grad[w] = load(d + i * TILE + j + w * LANES);
                    const int64_t at = block.at(i, j);
                    for (int64_t c = c0; c < std::min(c0 + LANES, a.depth); ++c) {
                        const float x = block.q[i * D + c];
                        const float* row = block.gate->transposed + c * stride + at;
                        float* drow = g.dgate + (c * stride + at);
                        const float* keys = kt + c * TILE + j;
                        float* dkeys = dkt + c * TILE + j;
                        Vec total = all(0.0f);
                        for (int w = 0; w < WIDTH; ++w) {
                            const Vec scaled = grad[w] * load(keys + w * LANES), gates = load(row + w * LANES);
                            total += scaled * gates;
                            store(drow + w * LANES, load(drow + w * LANES) + scaled * x);
                            store(dkeys + w * LANES, load(dkeys + w * LANES) + grad[w] * gates * x);
                        }
                        seen[c - c0] = total;
                    }
                    transpose(seen);
                    float* to = g.dq + (i * D + c0);
                    for (int l = 0; l < LANES; ++l) store(to, load(to) + seen[l]);
                }
    }

    void gate_pairs(const float* d) const {
        const int64_t D = head.D;
        block.each([&](int64_t i, int64_t j) {
            const int64_t at = block.spot(i, j);
            const float w = d[i * TILE + j], *x = block.q + i * D, *y = head.k + (block.j0 + j) * D, *row = block.gate->forward + at * D;
            float *dx = g.dq + i * D, *dy = g.dk + (block.j0 + j) * D;
            for (int64_t c = 0; c < a.depth; ++c) {
                dx[c] += w * y[c] * row[c];
                dy[c] += w * x[c] * row[c];
                g.dgate[c * block.gate->stride + at] += w * x[c] * y[c];
            }
        });
    }

    void close() {  // this block's queries are done
        const int64_t D = head.D, E = head.E;
        if (a.query) {
            const auto [low, high] = block.collapse(g.spread);
            add_product(block.tall, D, high - low, g.spread + low, block.wide, 1, block.query->forward + low * D, D, g.dq, D);
            add_product(up(high - low, ROWS), D, block.tall, g.spread + low, 1, block.wide, block.q, D, g.dquery + low * D, D);
        }
        if (a.value) {
            const auto [low, high] = block.collapse(block.mass);
            add_product(up(high - low, ROWS), E, block.tall, block.mass + low, 1, block.wide, g.dout, E, g.dvalue + low * E, E);
        }
        for (int64_t i = 0; i < block.height; ++i) {
            write(a.dq, head.b, head.h, block.i0 + i, a.depth, a.scale, g.dq + i * D);
            if (a.rank) write(a.dlow_query, head.b, head.h, block.i0 + i, a.rank, 1.0f, g.dlow + i * head.L);
        }
    }
};

// Hand what one (batch, head) summed to the outputs of this chunk and this thread.
void Gradients::close(const Head& head, const Block& block, int64_t chunk, int64_t thread) {
    const Arguments& a = head.a;
    const int64_t D = head.D, E = head.E, R = a.rows;
    auto slot = [&](int64_t heads, int64_t size) { return (thread * heads + (heads > 1 ? head.h : 0)) * size; };
    auto inner = [&](int64_t x) { return std::min(std::max<int64_t>(x - MARGIN, 0), R - 1); };
    if (a.gate) {
        for (int64_t j0 = 0; j0 < head.J; j0 += TILE)
            for (int64_t c = 0; c < a.depth; ++c)
                for (int64_t j = 0; j < TILE; ++j) dk[(j0 + j) * D + c] += dkt[j0 * D + c * TILE + j];
        float* to = a.dgate + slot(a.gate_heads, R * a.depth);
        for (int64_t c = 0; c < a.depth; ++c) {
            for (int64_t x = 0; x < block.gate->length; ++x) to[inner(x) * a.depth + c] += dgate[c * block.gate->stride + x];
            to[c] += dends[c];
            to[(R - 1) * a.depth + c] += dends[D + c];
        }
    }
    if (a.key) {
        const int64_t length = block.key->length;
        for (Side side : {Side::left, Side::right}) {
            const float *far = dfar + (side == Side::left ? 0 : head.J), *row = block.key->end(side, true);
            float* drow = dkey + (row - block.key->forward);
            for (int64_t j = 0; j < a.keys; ++j)
                for (int64_t c = 0; c < D; c += LANES) {
                    store(dk + j * D + c, load(dk + j * D + c) + load(row + c) * far[j]);
                    store(drow + c, load(drow + c) + load(head.k + j * D + c) * far[j]);
                }
        }
        float* to = a.dkey + slot(a.key_heads, R * a.depth);
        for (int64_t x = 0; x < length; ++x)
            for (int64_t c = 0; c < a.depth; ++c) to[(R - 1 - inner(x)) * a.depth + c] += dkey[x * D + c];
    }
    auto rows = [&](float* to, int64_t heads, const float* from, int64_t width, int64_t stride) {
        to += slot(heads, R * width);
        for (int64_t r = 0; r < R; ++r)
            for (int64_t c = 0; c < width; ++c) to[r * width + c] += from[(MARGIN + r) * stride + c];
    };
    if (a.query) rows(a.dquery, a.query_heads, dquery, a.depth, D);
    if (a.value) rows(a.dvalue, a.value_heads, dvalue, a.width, E);
    auto numbers = [&](float* to, int64_t heads, const float* from) {
        to += slot(heads, a.numbers);
        for (int64_t x = 0; x < a.numbers; ++x) to[x] += from[x + MARGIN];
    };
    if (a.bias) numbers(a.dbias, a.bias_heads, dbias);
    if (a.scales) numbers(a.dscales, a.scale_heads, dscales);
    const int64_t at = chunk * a.batch + head.b;
    for (int64_t j = 0; j < a.keys; ++j) {
        write(a.dk, at, head.h, j, a.depth, 1.0f, dk + j * D);
        write(a.dv, at, head.h, j, a.width, 1.0f, dv + j * E);
        if (a.rank) write(a.dlow_key, at, head.h, j, a.rank, 1.0f, dlow_keys + j * head.L);
    }
}

struct Tables {  // of one term, for one head or for each
    std::vector<std::unique_ptr<Table>> heads;
    Tables(const Arguments& a, const float* source, int64_t count, int64_t width, bool reversed) {
        for (int64_t h = 0; h < (source ? count : 1); ++h)
            heads.push_back(std::make_unique<Table>(a, source ? source + h * a.rows * width : nullptr, width, reversed));
    }
    const Table* operator[](int64_t h) const { return heads[heads.size() > 1 ? h : 0].get(); }
};

// Run `work(block, gradients, chunk, thread)` for every chunk of queries of every (batch, head). Heads that write to one slice of
// a gradient of pairs are done by one thread.
template <class Work>
void for_each(const Arguments& a, bool backward, const Work& work) {
    const Tables query(a, a.query, a.query_heads, a.depth, false), key(a, a.key, a.key_heads, a.depth, true),
        gate(a, a.gate, a.gate_heads, a.depth, false), value(a, a.value, a.value_heads, a.width, false);
    const int64_t batches = a.slices_batch, heads = a.slices_heads, tasks = batches * heads * a.chunks;
#pragma omp parallel num_threads(a.threads)
    {
#ifdef _OPENMP
        const int64_t thread = omp_get_thread_num();
#else
        const int64_t thread = 0;
#endif
        Head head(a, backward);
        Block block(head, backward);
        std::unique_ptr<Gradients> gradients;
#pragma omp for schedule(static)
        for (int64_t task = 0; task < tasks; ++task) {
            const int64_t chunk = task % a.chunks, slice = task / a.chunks;
            for (int64_t b = batches > 1 ? slice / heads : 0; b < (batches > 1 ? slice / heads + 1 : a.batch); ++b)
                for (int64_t h = heads > 1 ? slice % heads : 0; h < (heads > 1 ? slice % heads + 1 : a.heads); ++h) {
                    head.open(b, h, *key[h], backward);
                    block.query = query[h], block.key = key[h], block.gate = gate[h], block.value = value[h];
                    if (backward && !gradients) gradients = std::make_unique<Gradients>(head, block);
                    work(block, gradients.get(), chunk, thread);
                }
        }
    }
}

// The blocks of queries of a chunk: every chunks-th, so that causal work is spread evenly.
template <class Work>
void for_blocks(const Arguments& a, int64_t chunk, const Work& work) {
    for (int64_t i0 = chunk * TILE; i0 < a.queries; i0 += a.chunks * TILE) work(i0);
}

}  // namespace

extern "C" {

void locant_forward(const Arguments* arguments) {
    const Arguments& a = *arguments;
    for_each(a, false, [&](Block& block, Gradients*, int64_t chunk, int64_t) {
        Buffer accumulated(TILE * block.head.E);
        for_blocks(a, chunk, [&](int64_t i0) {
            block.open(i0);
            forward_block(block, accumulated);
        });
    });
}

void locant_backward(const Arguments* arguments) {
    const Arguments& a = *arguments;
    for_each(a, true, [&](Block& block, Gradients* gradients, int64_t chunk, int64_t thread) {
        gradients->open();
        Backward backward(block, *gradients);
        for_blocks(a, chunk, [&](int64_t i0) {
            block.open(i0);
            backward.open();
            for (int64_t j0 = 0; j0 < block.head.last_tile(i0); j0 += TILE)
                if (block.go(j0)) backward.tile();
            backward.close();
        });
        gradients->close(block.head, block, chunk, thread);
    });
}

}  // extern "C"
