// Exact attention with position terms, float32, forward and backward, tile by tile with an online softmax.
//
// For batch b, head h, query i and key j, with offset o = j - i - (J - I):
//     content = sum_c s q_c k_c gate[o]_c * scale[o]
//     logit   = content + s q . query[o] + k . key[o] + bias[o] + pair[i, j]       (the tables hold s where it is due)
//     out     = sum_j weight (v + value[o]),  weights after softmax and dropout
// Vector tables have one row for each offset left .. right; farther offsets use the first or last row.
// Numbers (scale, bias) have one entry for every offset. Everything is cut into tiles of 64 queries x 64 keys; inputs are
// copied to zero-padded buffers, so that no loop has a tail. Written with GCC vector types: any CPU, fast on AVX2, AVX-512.

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

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 8;
#elif defined(__AVX2__)
constexpr int LANES = 8, ROWS = 4;
#else
constexpr int LANES = 4, ROWS = 4;
#endif
typedef float Vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t Int __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

constexpr int64_t TILE = 64;         // queries and keys of a tile
constexpr int64_t MARGIN = 2 * TILE;  // repeats of the first and last row beside a table
constexpr int64_t GROUP = 32;        // keys that share a window of offsets
constexpr int64_t WINDOW = TILE + GROUP;
constexpr float INF = std::numeric_limits<float>::infinity();

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }
inline Vec all(float x) { return Vec{} + x; }
inline int64_t up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
inline float sum(Vec v) {
    float total = 0;
    for (int l = 0; l < LANES; ++l) total += v[l];
    return total;
}

// exp for x <= 0 (and a little above): 0 below -87, relative error about 1e-7.
inline Vec exp_vec(Vec x) {
    const Vec floor = all(-87.0f);
    const Int dead = x < floor;
    x = dead ? floor : x;
    const Vec magic = all(12582912.0f);
    const Vec n = (x * 1.44269504f + magic) - magic;
    const Vec r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    Vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const Int exponent = (__builtin_convertvector(n, Int) + 127) << 23;
    const Vec power = (Vec)exponent;
    return dead ? all(0.0f) : p * power;
}

// The hash of locant.backends.dropout.
template <class T>
inline T mix(T x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

// --- products: C[M N] (+)= A[M K] B[K N], with A(m, k) = a[m * row + k * col]; M a multiple of ROWS, N of LANES ---------

template <int WIDTH>
inline void product_panel(int64_t depth, const float* a, int64_t row, int64_t col, const float* b, int64_t ldb, float* c,
                          int64_t ldc, bool add) {
    Vec acc[ROWS][WIDTH];
    for (int m = 0; m < ROWS; ++m)
        for (int w = 0; w < WIDTH; ++w) acc[m][w] = add ? load(c + m * ldc + w * LANES) : all(0.0f);
    for (int64_t k = 0; k < depth; ++k) {
        Vec right[WIDTH];
        for (int w = 0; w < WIDTH; ++w) right[w] = load(b + k * ldb + w * LANES);
        for (int m = 0; m < ROWS; ++m) {
            const float left = a[m * row + k * col];
            for (int w = 0; w < WIDTH; ++w) acc[m][w] += right[w] * left;
        }
    }
    for (int m = 0; m < ROWS; ++m)
        for (int w = 0; w < WIDTH; ++w) store(c + m * ldc + w * LANES, acc[m][w]);
}

void product(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t row, int64_t col, const float* b,
             int64_t ldb, float* c, int64_t ldc, bool add) {
    int64_t n = 0;
    for (; n + 2 * LANES <= columns; n += 2 * LANES)
        for (int64_t m = 0; m < rows; m += ROWS)
            product_panel<2>(depth, a + m * row, row, col, b + n, ldb, c + m * ldc + n, ldc, add);
    for (; n < columns; n += LANES)
        for (int64_t m = 0; m < rows; m += ROWS)
            product_panel<1>(depth, a + m * row, row, col, b + n, ldb, c + m * ldc + n, ldc, add);
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

struct Arguments {
    int64_t batch, heads, queries, keys, depth, width;  // B H I J D E
    int64_t causal;                                      // key j is seen by query i while j <= i + J - I
    int64_t left, rows;                                  // offsets of the vector tables: left .. left + rows - 1
    int64_t query_heads, key_heads, gate_heads, value_heads, bias_heads, scale_heads;  // 1 or H
    int64_t mask_strides[4], pair_strides[4];            // B H I J; 0 where broadcast
    int64_t pair_groups_batch, pair_groups_heads;        // batch and heads of `pair`, 1 where broadcast
    int64_t seed, threshold;                             // of dropout; 0: none
    int64_t chunks, threads;                             // how the queries of one head are split; threads to use
    float scale, kept;                                   // kept: what dropout multiplies kept weights by
    const float *q, *k, *v;                              // [B H I D], [B H J D], [B H J E]
    const float *query, *key, *gate, *value;             // [H R D], value [H R E]
    const float *bias, *scales;                          // [H I + J - 1]
    const float* pair;
    const uint8_t* mask;
    float *out, *lse;                                    // [B H I E], [B H I]
    const float* dout;
    float *dq, *dk, *dv;                                 // [B H I D], [chunks B H J D], [chunks B H J E]
    float *dquery, *dkey, *dgate, *dvalue;               // [threads H R D], zeroed
    float *dbias, *dscales;                              // [threads H I + J - 1], zeroed
    float* dpair;                                        // as pair, zeroed
};

int64_t locant_arguments_size() { return sizeof(Arguments); }
int64_t locant_lanes() { return LANES; }

}  // extern "C"

namespace {

enum class Side { left, band, right };

// A vector table of one head: `rows` [R D] and its transpose over offsets with margins; `reversed` for the key term.
struct Table {
    int64_t rows, length, stride, depth;
    Buffer forward, transposed;  // [length Dp] and [D stride]; row x serves offset left - MARGIN + x (reversed: right + MARGIN - x)
    Table(const Arguments& a, const float* source, int64_t width, bool reversed)
        : rows(a.rows),
          length(source ? a.rows + 2 * MARGIN : 0),
          stride(up(length, LANES) + (up(length, LANES) / 16 % 2 ? 0 : 16)),
          depth(up(width, LANES)),
          forward((length + TILE) * depth),
          transposed(source ? depth * stride + 2 * TILE : 0) {
        for (int64_t x = 0; x < length; ++x) {
            int64_t r = std::min(std::max<int64_t>(x - MARGIN, 0), rows - 1);
            if (reversed) r = rows - 1 - r;
            for (int64_t c = 0; c < width; ++c) {
                forward[x * depth + c] = source[r * width + c];
                transposed[c * stride + x] = source[r * width + c];
            }
        }
    }
};

// Inputs of one (batch, head), zero-padded; and what its tiles share.
struct Head {
    const Arguments& a;
    int64_t b, h, I, J, D, E;  // padded
    int64_t shift;             // query i is key i + shift
    Buffer q, k, kt, v, vt, far;
    Buffer bias, scales;  // index j - i + I
    Head(const Arguments& a, bool backward)
        : a(a),
          I(up(a.queries, TILE)),
          J(up(a.keys, TILE)),
          D(up(a.depth, LANES)),
          E(up(a.width, LANES)),
          shift(a.keys - a.queries),
          q(I * D),
          k(J * D),
          kt(J * D),
          v(J * E),
          vt(backward ? J * E : 0),
          far(a.key ? 2 * J : 0),
          bias(a.bias ? I + J + TILE : 0),
          scales(a.scales ? I + J + TILE : 0) {}

    void numbers(const float* source, int64_t heads, float* target) const {
        const int64_t length = a.queries + a.keys - 1;
        if (!source) return;
        source += (heads > 1 ? h : 0) * length;
        for (int64_t x = 0; x < I + J; ++x) {
            const int64_t at = x - I + a.queries - 1;
            target[x] = at >= 0 && at < length ? source[at] : 0.0f;
        }
    }

    void open(int64_t batch, int64_t head, const Table& key, bool backward) {
        b = batch, h = head;
        const int64_t at = b * a.heads + h;
        for (int64_t i = 0; i < a.queries; ++i)
            for (int64_t c = 0; c < a.depth; ++c) q[i * D + c] = a.q[(at * a.queries + i) * a.depth + c] * a.scale;
        for (int64_t j = 0; j < a.keys; ++j) {
            std::memcpy(k + j * D, a.k + (at * a.keys + j) * a.depth, a.depth * 4);
            std::memcpy(v + j * E, a.v + (at * a.keys + j) * a.width, a.width * 4);
        }
        panels(k, D, kt);
        if (backward) panels(v, E, vt);
        numbers(a.bias, a.bias_heads, bias);
        numbers(a.scales, a.scale_heads, scales);
        if (a.key)
            for (int side = 0; side < 2; ++side) {
                const float* row = key.forward + (side == 0 ? key.length - 1 : 0) * key.depth;  // reversed: left is last
                for (int64_t j = 0; j < J; ++j) {
                    Vec total = all(0.0f);
                    for (int64_t c = 0; c < D; c += LANES) total += load(k + j * D + c) * load(row + c);
                    far[side * J + j] = sum(total);
                }
            }
    }

    // [J W] -> [J / TILE, W, TILE]
    void panels(const float* source, int64_t width, float* target) const {
        for (int64_t j0 = 0; j0 < J; j0 += TILE)
            for (int64_t c0 = 0; c0 < width; c0 += LANES)
                for (int64_t j = 0; j < TILE; j += LANES) {
                    Vec block[LANES];
                    for (int l = 0; l < LANES; ++l) block[l] = load(source + (j0 + j + l) * width + c0);
                    transpose(block);
                    for (int l = 0; l < LANES; ++l) store(target + j0 * width + (c0 + l) * TILE + j, block[l]);
                }
    }

    int64_t last_tile(int64_t i0) const {  // keys to look at from the block of queries i0
        const int64_t last = std::min(i0 + TILE, a.queries) - 1 + shift;
        return a.causal ? std::min(J, up(std::max<int64_t>(last + 1, 0), TILE)) : J;
    }

    Side side(int64_t i0, int64_t j0) const {
        const int64_t lowest = j0 - (i0 + shift + TILE - 1), highest = j0 + TILE - 1 - (i0 + shift);
        if (highest <= a.left) return Side::left;
        return lowest >= a.left + a.rows - 1 ? Side::right : Side::band;
    }

    // Index of offset j - i - shift in an array with margins.
    int64_t at(int64_t i, int64_t j) const { return j - i - shift - a.left + MARGIN; }
};

// Scratch of one block of queries, and the arithmetic on its tiles.
struct Block {
    const Head& head;
    const Arguments& a;
    const Table &query, &key, &gate, &value;
    int64_t wide;
    Buffer tile, content, products, window, gated_left, gated_right, mass;
    int64_t tall = TILE, cols = TILE;  // rows and columns of the tile that hold queries and keys, in whole vectors
    int64_t i0 = 0, low = 0, high = 0;  // rows low .. high of the query table (multiples of ROWS and LANES) may be needed

    Block(const Head& head, const Table& query, const Table& key, const Table& gate, const Table& value)
        : head(head),
          a(head.a),
          query(query),
          key(key),
          gate(gate),
          value(value),
          wide(up(a.rows + 2 * MARGIN, LANES) + TILE),
          tile(TILE * TILE),
          content(a.scales ? TILE * TILE : 0),
          products(a.query ? TILE * wide : 0),
          window(a.key ? GROUP * WINDOW : 0),
          gated_left(a.gate ? TILE * head.D : 0),
          gated_right(a.gate ? TILE * head.D : 0),
          mass(a.value ? TILE * wide : 0) {}

    void needed() {  // offsets seen from this block, as columns with margins
        const int64_t first = std::max(head.at(i0 + TILE - 1, 0), MARGIN), last = head.at(i0, head.J - 1);
        low = std::min(first, MARGIN + a.rows - 1) / LANES * LANES;
        high = up(std::max(std::min(last + 1, MARGIN + a.rows), low + 1), LANES);
    }

    // x [TILE depth] times the rows of a table: to [TILE wide], with margins.
    void meet(const float* x, int64_t stride, const Table& table, float* to) const {
        product(tall, high - low, table.depth, x, stride, 1, table.transposed + low, table.stride, to + low, wide, false);
        const int64_t first = std::max(low, MARGIN), last = std::min(high, MARGIN + a.rows) - 1;
        for (int64_t i = 0; i < tall; ++i) {
            float* row = to + i * wide;
            for (int64_t x = 0; x < first; ++x) row[x] = row[first];
            for (int64_t x = last + 1; x < wide; ++x) row[x] = row[last];
        }
    }

    // s[i, j] += from[i, offset], where `from` has margins.
    void spread(int64_t j0, Side side, const float* from, float* s) const {
        for (int64_t i = 0; i < tall; ++i) {
            const float* row = from + i * wide;
            if (side == Side::band) {
                row += head.at(i0 + i, j0);
                for (int64_t j = 0; j < cols; j += LANES) store(s + i * TILE + j, load(s + i * TILE + j) + load(row + j));
            } else {
                const Vec constant = all(side == Side::left ? row[MARGIN] : row[MARGIN + a.rows - 1]);
                for (int64_t j = 0; j < cols; j += LANES) store(s + i * TILE + j, load(s + i * TILE + j) + constant);
            }
        }
    }

    // to[i, offset] += d[i, j]: the way back.
    void gather(int64_t j0, Side side, const float* d, float* to) const {
        for (int64_t i = 0; i < tall; ++i) {
            float* row = to + i * wide;
            Vec total = all(0.0f);
            for (int64_t j = 0; j < cols; j += LANES) {
                const Vec x = load(d + i * TILE + j);
                if (side == Side::band) {
                    float* at = row + head.at(i0 + i, j0 + j);
                    store(at, load(at) + x);
                } else {
                    total += x;
                }
            }
            if (side != Side::band) row[side == Side::left ? MARGIN : MARGIN + a.rows - 1] += sum(total);
        }
    }

    // Bring what was gathered in the margins to the first and last row; returns the columns that count.
    std::pair<int64_t, int64_t> collapse(float* gathered) const {
        const int64_t first = MARGIN, last = MARGIN + a.rows - 1;
        for (int64_t i = 0; i < tall; ++i) {
            float* row = gathered + i * wide;
            for (int64_t x = 0; x < first; ++x) row[first] += row[x];
            for (int64_t x = last + 1; x < wide; ++x) {
                row[last] += row[x];
                row[x] = 0.0f;
            }
        }
        return {std::max(low, first), std::min(high, last + 1)};
    }

    void open(int64_t start) {
        i0 = start;
        tall = up(std::min(TILE, a.queries - i0), LANES);
        needed();
        if (a.query) meet(head.q + i0 * head.D, head.D, query, products);
        if (a.value) std::memset(mass, 0, tall * wide * 4);
        if (a.gate)
            for (int64_t i = 0; i < tall; ++i)
                for (int64_t c = 0; c < head.D; ++c) {
                    const float x = head.q[(i0 + i) * head.D + c];
                    gated_left[i * head.D + c] = x * gate.forward[c];
                    gated_right[i * head.D + c] = x * gate.forward[(gate.length - 1) * gate.depth + c];
                }
    }

    // The window of offsets that a group of keys and this block's queries meet: its start among the reversed table's rows.
    int64_t window_start(int64_t j) const { return a.left + a.rows - 1 + MARGIN - (j + GROUP - 1) + i0 + head.shift; }

    void gate_tile(int64_t j0, float* s) const {
        const float* kt = head.kt + j0 * head.D;
        for (int64_t i = 0; i < tall; i += 4)
            for (int64_t j = 0; j < cols; j += 2 * LANES) {
                Vec acc[4][2] = {};
                for (int64_t c = 0; c < a.depth; ++c) {
                    const Vec k0 = load(kt + c * TILE + j), k1 = load(kt + c * TILE + j + LANES);
                    const float* g = gate.transposed + c * gate.stride + head.at(i0 + i, j0 + j);
                    for (int m = 0; m < 4; ++m) {
                        const float x = head.q[(i0 + i + m) * head.D + c];
                        acc[m][0] += (load(g - m) * x) * k0;
                        acc[m][1] += (load(g - m + LANES) * x) * k1;
                    }
                }
                for (int m = 0; m < 4; ++m)
                    for (int w = 0; w < 2; ++w) store(s + (i + m) * TILE + j + w * LANES, acc[m][w]);
            }
    }

    // Logits of the tile at key j0.
    void logits(int64_t j0) {
        float* s = tile;
        cols = a.gate ? TILE : up(std::min(TILE, a.keys - j0), LANES);
        const Side side = head.side(i0, j0);
        if (a.gate && side == Side::band) {
            gate_tile(j0, s);
        } else {
            const float* q = !a.gate ? head.q + i0 * head.D : side == Side::left ? gated_left : gated_right;
            product(tall, cols, a.depth, q, head.D, 1, head.kt + j0 * head.D, TILE, s, TILE, false);
        }
        if (a.scales) {
            std::memcpy(content, s, TILE * TILE * 4);
            for (int64_t i = 0; i < tall; ++i)
                for (int64_t j = 0; j < cols; j += LANES)
                    store(s + i * TILE + j, load(s + i * TILE + j) * load(head.scales + (j0 + j - i0 - i + head.I)));
        }
        if (a.bias)
            for (int64_t i = 0; i < tall; ++i)
                for (int64_t j = 0; j < cols; j += LANES)
                    store(s + i * TILE + j, load(s + i * TILE + j) + load(head.bias + (j0 + j - i0 - i + head.I)));
        if (a.query) spread(j0, side, products, s);
        if (a.key) key_tile(j0, side, s);
        if (a.pair) pair_tile(j0, s);
        hide(j0, s);
    }

    void key_tile(int64_t j0, Side side, float* s) {
        if (side != Side::band) {
            const float* far = head.far + (side == Side::left ? 0 : head.J) + j0;
            for (int64_t i = 0; i < tall; ++i)
                for (int64_t j = 0; j < cols; j += LANES) store(s + i * TILE + j, load(s + i * TILE + j) + load(far + j));
            return;
        }
        for (int64_t j = 0; j < cols; j += GROUP) {
            product(GROUP, tall + GROUP, a.depth, head.k + (j0 + j) * head.D, head.D, 1, key.transposed + window_start(j0 + j),
                    key.stride, window, WINDOW, false);
            for (int64_t u = 0; u < std::min(GROUP, cols - j); u += LANES)
                for (int64_t i = 0; i < tall; i += LANES) {
                    Vec block[LANES];
                    for (int l = 0; l < LANES; ++l) block[l] = load(window + (u + l) * WINDOW + GROUP - 1 - u - l + i);
                    transpose(block);
                    for (int l = 0; l < LANES; ++l) {
                        float* target = s + (i + l) * TILE + j + u;
                        store(target, load(target) + block[l]);
                    }
                }
        }
    }

    void pair_tile(int64_t j0, float* s) const {
        const float* from = a.pair + head.b * a.pair_strides[0] + head.h * a.pair_strides[1];
        const int64_t columns = std::min(TILE, a.keys - j0), step = a.pair_strides[3];
        for (int64_t i = 0; i < std::min(TILE, a.queries - i0); ++i) {
            const float* row = from + (i0 + i) * a.pair_strides[2] + j0 * step;
            float* to = s + i * TILE;
            if (step == 1)
                for (int64_t j = 0; j < columns; ++j) to[j] += row[j];
            else
                for (int64_t j = 0; j < columns; ++j) to[j] += row[j * step];
        }
    }

    // to[i, j] *= 0 or what dropout multiplies by.
    void drop(int64_t j0, float* to) const {
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

    void hide(int64_t j0, float* s) const {
        const int64_t columns = std::min(TILE, a.keys - j0);
        for (int64_t i = 0; i < tall; ++i) {
            int64_t end = columns;
            if (a.causal) end = std::min(std::max<int64_t>(i0 + i + head.shift + 1 - j0, 0), columns);
            for (int64_t j = end; j < cols; ++j) s[i * TILE + j] = -INF;
        }
        if (!a.mask) return;
        const uint8_t* from = a.mask + head.b * a.mask_strides[0] + head.h * a.mask_strides[1];
        const int64_t step = a.mask_strides[3];
        for (int64_t i = 0; i < std::min(TILE, a.queries - i0); ++i) {
            const uint8_t* row = from + (i0 + i) * a.mask_strides[2] + j0 * step;
            float* to = s + i * TILE;
            if (step == 1)
                for (int64_t j = 0; j < columns; ++j) to[j] = row[j] ? to[j] : -INF;
            else
                for (int64_t j = 0; j < columns; ++j) to[j] = row[j * step] ? to[j] : -INF;
        }
    }
};

struct Softmax {  // running maximum and sum of each query of a block
    float most[TILE], total[TILE];
    Softmax() {
        std::fill(most, most + TILE, -INF);
        std::fill(total, total + TILE, 0.0f);
    }
    // Turn logits into weights relative to the running maximum; bring what was summed so far to the new one.
    void step(const Block& block, float* s, float* out, int64_t width, float* mass) {
        for (int64_t i = 0; i < block.tall; ++i) {
            float* row = s + i * TILE;
            Vec high = load(row);
            for (int64_t j = LANES; j < block.cols; j += LANES) {
                const Vec x = load(row + j);
                high = x > high ? x : high;
            }
            float now = most[i];
            for (int l = 0; l < LANES; ++l) now = std::max(now, high[l]);
            const float base = now == -INF ? 0.0f : now;
            Vec weight = all(0.0f);
            for (int64_t j = 0; j < block.cols; j += LANES) {
                const Vec p = exp_vec(load(row + j) - base);
                store(row + j, p);
                weight += p;
            }
            if (now != most[i]) {
                const float factor = std::exp(most[i] - base);
                total[i] *= factor;
                for (int64_t c = 0; c < width; c += LANES) store(out + i * width + c, load(out + i * width + c) * factor);
                for (int64_t x = 0; mass && x < block.wide; ++x) mass[i * block.wide + x] *= factor;
                most[i] = now;
            }
            total[i] += sum(weight);
        }
    }
};

void forward_block(Block& block, float* accumulated) {
    const Head& head = block.head;
    const Arguments& a = head.a;
    Softmax softmax;
    std::memset(accumulated, 0, TILE * head.E * 4);
    for (int64_t j0 = 0; j0 < head.last_tile(block.i0); j0 += TILE) {
        block.logits(j0);
        softmax.step(block, block.tile, accumulated, head.E, a.value ? block.mass.data : nullptr);
        if (a.threshold) block.drop(j0, block.tile);
        if (a.value) block.gather(j0, head.side(block.i0, j0), block.tile, block.mass);
        product(block.tall, head.E, block.cols, block.tile, TILE, 1, head.v + j0 * head.E, head.E, accumulated, head.E, true);
    }
    if (a.value) {
        const auto [low, high] = block.collapse(block.mass);
        product(block.tall, head.E, high - low, block.mass + low, block.wide, 1, block.value.forward + low * head.E, head.E,
                accumulated, head.E, true);
    }
    const int64_t at = (head.b * a.heads + head.h) * a.queries;
    for (int64_t i = 0; i < std::min(TILE, a.queries - block.i0); ++i) {
        const bool blind = softmax.total[i] == 0.0f;  // sees nothing: zeros, and no weight in backward
        const float factor = blind ? 0.0f : 1.0f / softmax.total[i];
        float* out = a.out + (at + block.i0 + i) * a.width;
        for (int64_t c = 0; c < a.width; ++c) out[c] = accumulated[i * head.E + c] * factor;
        if (a.lse) a.lse[at + block.i0 + i] = blind ? INF : softmax.most[i] + std::log(softmax.total[i]);
    }
}

// Gradients that one thread sums for one head.
struct Gradients {
    Buffer dq, dk, dv, dout, dtile, spread, dwindow, dfar, dbias, dscales;
    Buffer dquery, dkey, dgate;  // with margins; dgate transposed, [D stride]
    Buffer dkt, spare;           // for the gate: dk as [J / TILE, D, TILE]; one product
    Buffer dropped, toward, dvalue;  // toward: dout times the rows of the value table
    Gradients(const Head& head, const Block& block)
        : dq(TILE * head.D),
          dk(head.J * head.D),
          dv(head.J * head.E),
          dout(TILE * head.E),
          dtile(TILE * TILE),
          spread(head.a.query ? TILE * block.wide : 0),
          dwindow(head.a.key ? GROUP * WINDOW : 0),
          dfar(head.a.key ? 2 * head.J : 0),
          dbias(head.a.bias ? head.I + head.J + TILE : 0),
          dscales(head.a.scales ? head.I + head.J + TILE : 0),
          dquery(head.a.query ? (block.query.length + TILE) * head.D : 0),
          dkey(head.a.key ? (block.key.length + TILE) * head.D : 0),
          dgate(head.a.gate ? head.a.depth * block.gate.stride + 2 * TILE : 0),
          dkt(head.a.gate ? head.J * head.D : 0),
          spare(head.a.gate ? TILE * head.D : 0),
          dropped(head.a.threshold ? TILE * TILE : 0),
          toward(head.a.value ? TILE * block.wide : 0),
          dvalue(head.a.value ? (block.value.length + TILE) * head.E : 0) {}
    void open();
    void close(const Head& head, const Table& key, const Table& gate, int64_t chunk, int64_t thread);
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
        const int64_t at = (head.b * a.heads + head.h) * a.queries + block.i0;
        const int64_t count = std::min(TILE, a.queries - block.i0);
        std::memset(g.dout, 0, TILE * head.E * 4);
        std::memset(g.dq, 0, TILE * head.D * 4);
        if (a.query) std::memset(g.spread, 0, TILE * block.wide * 4);
        for (int64_t i = 0; i < TILE; ++i) {
            delta[i] = 0.0f;
            lse[i] = i < count ? a.lse[at + i] : INF;
            for (int64_t c = 0; c < (i < count ? a.width : 0); ++c) {
                g.dout[i * head.E + c] = a.dout[(at + i) * a.width + c];
                delta[i] += a.dout[(at + i) * a.width + c] * a.out[(at + i) * a.width + c];
            }
        }
        if (a.value) block.meet(g.dout, head.E, block.value, g.toward);
    }

    void tile(int64_t j0) {
        float *p = block.tile, *d = g.dtile;
        block.logits(j0);
        for (int64_t i = 0; i < block.tall; ++i)
            for (int64_t j = 0; j < block.cols; j += LANES)
                store(p + i * TILE + j, exp_vec(load(p + i * TILE + j) - (lse[i] == INF ? 1e30f : lse[i])));
        product(block.tall, block.cols, a.width, g.dout, head.E, 1, head.vt + j0 * head.E, TILE, d, TILE, false);
        const Side side = head.side(block.i0, j0);
        if (a.value) block.spread(j0, side, g.toward, d);
        const float* dropped = p;
        if (a.threshold) {
            block.drop(j0, d);
            std::memcpy(g.dropped, p, TILE * TILE * 4);
            block.drop(j0, g.dropped);
            dropped = g.dropped;
        }
        if (a.value) block.gather(j0, side, dropped, block.mass);
        product(block.cols, head.E, block.tall, dropped, 1, TILE, g.dout, head.E, g.dv + j0 * head.E, head.E, true);
        for (int64_t i = 0; i < block.tall; ++i)
            for (int64_t j = 0; j < block.cols; j += LANES)
                store(d + i * TILE + j, load(p + i * TILE + j) * (load(d + i * TILE + j) - delta[i]));
        if (a.dpair) pair(j0, d);
        if (a.bias) numbers(j0, g.dbias, d, nullptr);
        if (a.query) block.gather(j0, side, d, g.spread);
        if (a.key) key(j0, side, d);
        if (a.scales) {
            numbers(j0, g.dscales, d, block.content);
            for (int64_t i = 0; i < block.tall; ++i)
                for (int64_t j = 0; j < block.cols; j += LANES)
                    store(d + i * TILE + j,
                          load(d + i * TILE + j) * load(head.scales + (j0 + j - block.i0 - i + head.I)));
        }
        if (a.gate) {
            side == Side::band ? gate(j0, d) : gate_far(j0, side, d);
            return;
        }
        product(block.tall, head.D, block.cols, d, TILE, 1, head.k + j0 * head.D, head.D, g.dq, head.D, true);
        product(block.cols, head.D, block.tall, d, 1, TILE, head.q + block.i0 * head.D, head.D, g.dk + j0 * head.D, head.D, true);
    }

    void pair(int64_t j0, const float* d) const {
        float* to = a.dpair + head.b * a.pair_strides[0] + head.h * a.pair_strides[1];
        const int64_t columns = std::min(TILE, a.keys - j0), step = a.pair_strides[3];
        for (int64_t i = 0; i < std::min(TILE, a.queries - block.i0); ++i) {
            float* row = to + (block.i0 + i) * a.pair_strides[2] + j0 * step;
            const float* from = d + i * TILE;
            if (step == 1)
                for (int64_t j = 0; j < columns; ++j) row[j] += from[j];
            else
                for (int64_t j = 0; j < columns; ++j) row[j * step] += from[j];
        }
    }

    void numbers(int64_t j0, float* to, const float* d, const float* times) const {
        for (int64_t i = 0; i < block.tall; ++i) {
            float* row = to + (j0 - block.i0 - i + head.I);
            for (int64_t j = 0; j < block.cols; j += LANES) {
                Vec x = load(d + i * TILE + j);
                if (times) x *= load(times + i * TILE + j);
                store(row + j, load(row + j) + x);
            }
        }
    }

    void key(int64_t j0, Side side, const float* d) const {
        if (side != Side::band) {
            float* far = g.dfar + (side == Side::left ? 0 : head.J) + j0;
            for (int64_t i = 0; i < block.tall; ++i)
                for (int64_t j = 0; j < block.cols; j += LANES) store(far + j, load(far + j) + load(d + i * TILE + j));
            return;
        }
        for (int64_t j = 0; j < block.cols; j += GROUP) {
            std::memset(g.dwindow, 0, GROUP * WINDOW * 4);
            for (int64_t u = 0; u < std::min(GROUP, block.cols - j); u += LANES)
                for (int64_t i = 0; i < block.tall; i += LANES) {
                    Vec part[LANES];
                    for (int l = 0; l < LANES; ++l) part[l] = load(d + (i + l) * TILE + j + u);
                    transpose(part);
                    for (int l = 0; l < LANES; ++l) store(g.dwindow + (u + l) * WINDOW + GROUP - 1 - u - l + i, part[l]);
                }
            const int64_t start = block.window_start(j0 + j);
            product(GROUP, head.D, block.tall + GROUP, g.dwindow, WINDOW, 1, block.key.forward + start * head.D, head.D,
                    g.dk + (j0 + j) * head.D, head.D, true);
            product(block.tall + GROUP, head.D, GROUP, g.dwindow, 1, WINDOW, head.k + (j0 + j) * head.D, head.D,
                    g.dkey + start * head.D, head.D, true);
        }
    }

    void gate_far(int64_t j0, Side side, const float* d) const {
        const int64_t D = head.D, at = side == Side::left ? 0 : block.gate.length - 1;
        const float* row = block.gate.forward + at * D;
        const float* q = head.q + block.i0 * D;
        product(block.tall, D, TILE, d, TILE, 1, head.k + j0 * D, D, g.spare, D, false);
        for (int64_t i = 0; i < block.tall; ++i)
            for (int64_t c = 0; c < a.depth; ++c) {
                g.dq[i * D + c] += g.spare[i * D + c] * row[c];
                g.dgate[c * block.gate.stride + at] += g.spare[i * D + c] * q[i * D + c];
            }
        product(TILE, D, block.tall, d, 1, TILE, side == Side::left ? block.gated_left : block.gated_right, D, g.dk + j0 * D, D,
                true);
    }

    void gate(int64_t j0, const float* d) const {
        const int64_t D = head.D, stride = block.gate.stride;
        const float* kt = head.kt + j0 * D;
        float* dkt = g.dkt + j0 * D;
        constexpr int WIDTH = 4;
        for (int64_t c0 = 0; c0 < a.depth; c0 += LANES)
            for (int64_t j = 0; j < block.cols; j += WIDTH * LANES)
                for (int64_t i = 0; i < block.tall; ++i) {
                    Vec grad[WIDTH], seen[LANES] = {};
                    for (int w = 0; w < WIDTH; ++w) grad[w] = load(d + i * TILE + j + w * LANES);
                    const int64_t at = head.at(block.i0 + i, j0 + j);
                    for (int64_t c = c0; c < std::min(c0 + LANES, a.depth); ++c) {
                        const float x = head.q[(block.i0 + i) * D + c];
                        const float* row = block.gate.transposed + c * stride + at;
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

    void close() {  // this block's queries are done
        const int64_t D = head.D, count = std::min(TILE, a.queries - block.i0);
        if (a.query) {
            const auto [low, high] = block.collapse(g.spread);
            product(block.tall, D, high - low, g.spread + low, block.wide, 1, block.query.forward + low * D, D, g.dq, D, true);
            product(up(high - low, ROWS), D, block.tall, g.spread + low, 1, block.wide, head.q + block.i0 * D, D,
                    g.dquery + low * D, D, true);
        }
        if (a.value) {
            const auto [low, high] = block.collapse(block.mass);
            product(up(high - low, ROWS), head.E, block.tall, block.mass + low, 1, block.wide, g.dout, head.E,
                    g.dvalue + low * head.E, head.E, true);
        }
        for (int64_t i = 0; i < count; ++i) {
            float* to = a.dq + ((head.b * a.heads + head.h) * a.queries + block.i0 + i) * a.depth;
            for (int64_t c = 0; c < a.depth; ++c) to[c] = g.dq[i * D + c] * a.scale;
        }
    }
};

void Gradients::open() {
    for (const Buffer* buffer : {&dk, &dv, &dfar, &dbias, &dscales, &dquery, &dkey, &dgate, &dkt, &dvalue}) buffer->clear();
}

// Hand what one (batch, head) summed to the outputs of this chunk and this thread.
void Gradients::close(const Head& head, const Table& key, const Table& gate, int64_t chunk, int64_t thread) {
    const Arguments& a = head.a;
    const int64_t D = head.D, R = a.rows, at = (chunk * a.batch + head.b) * a.heads + head.h;
    auto slot = [&](int64_t heads, int64_t size) { return (thread * heads + (heads > 1 ? head.h : 0)) * size; };
    auto inner = [&](int64_t x) { return std::min(std::max<int64_t>(x - MARGIN, 0), R - 1); };
    if (a.gate)
        for (int64_t j0 = 0; j0 < head.J; j0 += TILE)
            for (int64_t c = 0; c < a.depth; ++c)
                for (int64_t j = 0; j < TILE; ++j) dk[(j0 + j) * D + c] += dkt[j0 * D + c * TILE + j];
    if (a.key) {
        const int64_t left = key.length - 1;
        for (int64_t j = 0; j < a.keys; ++j)
            for (int64_t c = 0; c < a.depth; ++c) {
                dk[j * D + c] += dfar[j] * key.forward[left * D + c] + dfar[head.J + j] * key.forward[c];
                dkey[left * D + c] += dfar[j] * head.k[j * D + c];
                dkey[c] += dfar[head.J + j] * head.k[j * D + c];
            }
        float* to = a.dkey + slot(a.key_heads, R * a.depth);
        for (int64_t x = 0; x < key.length; ++x)
            for (int64_t c = 0; c < a.depth; ++c) to[(R - 1 - inner(x)) * a.depth + c] += dkey[x * D + c];
    }
    if (a.query) {
        float* to = a.dquery + slot(a.query_heads, R * a.depth);
        for (int64_t r = 0; r < R; ++r)
            for (int64_t c = 0; c < a.depth; ++c) to[r * a.depth + c] += dquery[(MARGIN + r) * D + c];
    }
    if (a.value) {
        float* to = a.dvalue + slot(a.value_heads, R * a.width);
        for (int64_t r = 0; r < R; ++r)
            for (int64_t c = 0; c < a.width; ++c) to[r * a.width + c] += dvalue[(MARGIN + r) * head.E + c];
    }
    if (a.gate) {
        float* to = a.dgate + slot(a.gate_heads, R * a.depth);
        for (int64_t c = 0; c < a.depth; ++c)
            for (int64_t x = 0; x < gate.length; ++x) to[inner(x) * a.depth + c] += dgate[c * gate.stride + x];
    }
    const int64_t length = a.queries + a.keys - 1;
    auto numbers = [&](float* to, int64_t heads, const float* from) {
        if (!to) return;
        to += slot(heads, length);
        for (int64_t x = 0; x < length; ++x) to[x] += from[x + head.I - a.queries + 1];
    };
    if (a.bias) numbers(a.dbias, a.bias_heads, dbias);
    if (a.scales) numbers(a.dscales, a.scale_heads, dscales);
    for (int64_t j = 0; j < a.keys; ++j) {
        std::memcpy(a.dk + (at * a.keys + j) * a.depth, dk + j * D, a.depth * 4);
        std::memcpy(a.dv + (at * a.keys + j) * a.width, dv + j * head.E, a.width * 4);
    }
}

struct Tables {  // of one term, for one head or for each
    std::vector<std::unique_ptr<Table>> heads;
    Tables(const Arguments& a, const float* source, int64_t count, int64_t width, bool reversed) {
        for (int64_t h = 0; h < (source ? count : 1); ++h)
            heads.push_back(std::make_unique<Table>(a, source ? source + h * a.rows * width : nullptr, width, reversed));
    }
    const Table& operator[](int64_t h) const { return *heads[heads.size() > 1 ? h : 0]; }
};

// Run `work(head, block, chunk, thread)` for every chunk of queries of every (batch, head). Heads that write to one slice of
// the pair gradient are done by one thread.
template <class Work>
void for_each(const Arguments& a, bool backward, const Work& work) {
    const Tables query(a, a.query, a.query_heads, a.depth, false), key(a, a.key, a.key_heads, a.depth, true),
        gate(a, a.gate, a.gate_heads, a.depth, false), value(a, a.value, a.value_heads, a.width, false);
    const int64_t batches = a.dpair ? a.pair_groups_batch : a.batch, heads = a.dpair ? a.pair_groups_heads : a.heads;
    const int64_t tasks = batches * heads * a.chunks;
#pragma omp parallel num_threads(a.threads)
    {
#ifdef _OPENMP
        const int64_t thread = omp_get_thread_num();
#else
        const int64_t thread = 0;
#endif
        Head head(a, backward);
        std::unique_ptr<Gradients> gradients;
#pragma omp for schedule(static)
        for (int64_t task = 0; task < tasks; ++task) {
            const int64_t chunk = task % a.chunks, group = task / a.chunks;
            for (int64_t b = batches > 1 ? group / heads : 0; b < (batches > 1 ? group / heads + 1 : a.batch); ++b)
                for (int64_t h = heads > 1 ? group % heads : 0; h < (heads > 1 ? group % heads + 1 : a.heads); ++h) {
                    head.open(b, h, key[h], backward);
                    Block block(head, query[h], key[h], gate[h], value[h]);
                    if (backward && !gradients)
                        gradients = std::make_unique<Gradients>(head, block);
                    work(head, block, gradients.get(), key[h], gate[h], chunk, thread);
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
    for_each(a, false, [&](Head& head, Block& block, Gradients*, const Table&, const Table&, int64_t chunk, int64_t) {
        Buffer accumulated(TILE * head.E);
        for_blocks(a, chunk, [&](int64_t i0) {
            block.open(i0);
            forward_block(block, accumulated);
        });
    });
}

void locant_backward(const Arguments* arguments) {
    const Arguments& a = *arguments;
    for_each(a, true, [&](Head& head, Block& block, Gradients* gradients, const Table& key, const Table& gate,
                          int64_t chunk, int64_t thread) {
        gradients->open();
        Backward backward(block, *gradients);
        for_blocks(a, chunk, [&](int64_t i0) {
            block.open(i0);
            backward.open();
            for (int64_t j0 = 0; j0 < head.last_tile(i0); j0 += TILE) backward.tile(j0);
            backward.close();
        });
        gradients->close(head, key, gate, chunk, thread);
    });
}

}  // extern "C"
