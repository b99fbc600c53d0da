// Runs the kernel over many shapes and kinds of calls, with every buffer exactly as large as it must be: for sanitizers and
// valgrind, which see whatever is read or written beside one. SOURCE is the kernel's file.

#include SOURCE

#include <cstdio>

namespace {

uint32_t state = 1;
float draw() {  // -1 .. 1
    state = state * 1664525u + 1013904223u;
    return (state >> 8) / 8388608.0f - 1.0f;
}

enum class Fill { random, zero, none };

struct Memory {  // exact allocations of one call
    std::vector<void*> all;
    ~Memory() {
        for (void* p : all) std::free(p);
    }
    void* take(size_t bytes) {
        all.push_back(std::malloc(bytes));
        return all.back();
    }
    float* floats(int64_t count, Fill fill) {
        float* p = static_cast<float*>(take(count * 4));
        for (int64_t n = 0; n < count && fill != Fill::none; ++n) p[n] = fill == Fill::random ? draw() : 0.0f;
        return p;
    }
    Operand operand(int64_t batch, int64_t heads, int64_t length, int64_t width, bool half, Fill fill) {
        const int64_t count = batch * heads * length * width;
        Operand made = {nullptr, {batch > 1 ? heads * length * width : 0, heads > 1 ? length * width : 0, width}, half};
        if (!half) {
            made.data = floats(count, fill);
            return made;
        }
        uint16_t* halves = static_cast<uint16_t*>(take(count * 2));
        for (int64_t n = 0; n < count && fill != Fill::none; ++n) {
            const float value = fill == Fill::random ? draw() : 0.0f;
            uint32_t bits;
            std::memcpy(&bits, &value, 4);
            halves[n] = bits >> 16;
        }
        made.data = halves;
        return made;
    }
    // Reads all of it, so that what was never written shows.
    static bool finite(const Operand& t, int64_t count) {
        bool fine = true;
        for (int64_t n = 0; n < count; ++n) {
            uint32_t bits = 0;
            if (t.half) bits = static_cast<uint32_t>(static_cast<const uint16_t*>(t.data)[n]) << 16;
            else std::memcpy(&bits, static_cast<const float*>(t.data) + n, 4);
            if ((bits & 0x7F800000u) == 0x7F800000u) fine = false;
        }
        return fine;
    }
};

enum Kind { QUERY = 1, KEY = 2, GATE = 4, VALUE = 8, BIAS = 16, SCALES = 32, PAIR = 64, FACTORS = 128, LOW = 256 };
enum class Mask { none, causal, padding, full, documents };

struct Size {
    int64_t batch, heads, queries, keys, depth, width;
};

struct Case {
    Size size;
    int terms;
    int64_t clip;
    Mask mask;
    bool ids, dropout, half;
    int64_t threads;
};

// Ids that restart, skip and repeat, as documents, gaps and padding make them.
int64_t id_of(int64_t n) { return n < 40 ? n : n < 90 ? n - 40 : n < 120 ? 2 * n : 240; }

void fill_mask(const Case& c, Arguments& a, Memory& memory) {
    const Size& s = c.size;
    a.causal = c.mask == Mask::causal;
    if (c.mask == Mask::none || c.mask == Mask::causal) return;
    const bool padding = c.mask == Mask::padding;
    const int64_t rows = padding ? 1 : s.queries;
    uint8_t* mask = static_cast<uint8_t*>(memory.take(s.batch * rows * s.keys));
    for (int64_t b = 0; b < s.batch; ++b)
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < s.keys; ++j) {
                bool seen = draw() > 0.0f;
                if (padding) seen = j >= b * (s.keys / 2);
                if (c.mask == Mask::documents) seen = (i + s.keys - s.queries) / 50 == j / 50;
                mask[(b * rows + i) * s.keys + j] = seen;
            }
    a.mask = mask;
    const int64_t strides[4] = {s.batch > 1 ? rows * s.keys : 0, 0, padding ? 0 : s.keys, 1};
    std::copy(strides, strides + 4, a.mask_strides);
}

void fill_ids(const Case& c, Arguments& a, Memory& memory) {
    const Size& s = c.size;
    a.lowest = 1 - s.keys;
    a.numbers = s.queries + s.keys - 1;
    if (!c.ids) return;
    int64_t* keys = static_cast<int64_t*>(memory.take(s.keys * 8));
    int64_t* queries = static_cast<int64_t*>(memory.take(s.queries * 8));
    for (int64_t j = 0; j < s.keys; ++j) keys[j] = id_of(j);
    for (int64_t i = 0; i < s.queries; ++i) queries[i] = id_of(i + s.keys - s.queries);
    const int64_t most = *std::max_element(keys, keys + s.keys), last = *std::max_element(queries, queries + s.queries);
    a.key_ids = keys;
    a.query_ids = queries;
    a.lowest = *std::min_element(keys, keys + s.keys) - last;
    a.numbers = most - *std::min_element(queries, queries + s.queries) - a.lowest + 1;
}

void fill_terms(const Case& c, Arguments& a, Memory& memory) {
    const Size& s = c.size;
    auto vectors = [&](Kind kind, const float*& table, float*& grad, int64_t& heads, int64_t width) {
        if (!(c.terms & kind)) return;
        heads = kind == KEY ? s.heads : 1;
        table = memory.floats(heads * a.rows * width, Fill::random);
        grad = memory.floats(c.threads * heads * a.rows * width, Fill::zero);
    };
    a.left = std::max(-c.clip, a.lowest);
    a.rows = std::min(c.clip, a.lowest + a.numbers - 1) - a.left + 1;
    if (a.rows < 1) a.left = a.lowest, a.rows = 1;
    vectors(QUERY, a.query, a.dquery, a.query_heads, s.depth);
    vectors(KEY, a.key, a.dkey, a.key_heads, s.depth);
    vectors(GATE, a.gate, a.dgate, a.gate_heads, s.depth);
    vectors(VALUE, a.value, a.dvalue, a.value_heads, s.width);
    auto numbers = [&](Kind kind, const float*& table, float*& grad, int64_t& heads) {
        if (!(c.terms & kind)) return;
        heads = kind == BIAS ? s.heads : 1;
        table = memory.floats(heads * a.numbers, Fill::random);
        grad = memory.floats(c.threads * heads * a.numbers, Fill::zero);
    };
    numbers(BIAS, a.bias, a.dbias, a.bias_heads);
    numbers(SCALES, a.scales, a.dscales, a.scale_heads);
    if (c.terms & PAIR) {
        a.pair = memory.operand(1, s.heads, s.queries, s.keys, c.half, Fill::random);
        a.dpair = memory.operand(1, s.heads, s.queries, s.keys, false, Fill::zero);
    }
    if (c.terms & FACTORS) {
        a.factors = memory.operand(s.batch, 1, s.queries, s.keys, c.half, Fill::random);
        a.dfactors = memory.operand(s.batch, 1, s.queries, s.keys, false, Fill::zero);
    }
    if (c.terms & PAIR) a.slices_batch = 1;
    if (c.terms & FACTORS) a.slices_heads = 1;
    if (c.terms & LOW) {
        a.rank = 5;
        a.low_query = memory.operand(s.batch, s.heads, s.queries, a.rank, c.half, Fill::random);
        a.low_key = memory.operand(1, s.heads, s.keys, a.rank, c.half, Fill::random);
        a.dlow_query = memory.operand(s.batch, s.heads, s.queries, a.rank, false, Fill::none);
        a.dlow_key = memory.operand(a.chunks * s.batch, s.heads, s.keys, a.rank, false, Fill::none);
    }
}

bool run(const Case& c) {
    const Size& s = c.size;
    Memory memory;
    Arguments a = {};
    a.batch = s.batch, a.heads = s.heads, a.queries = s.queries, a.keys = s.keys, a.depth = s.depth, a.width = s.width;
    a.slices_batch = s.batch, a.slices_heads = s.heads;
    a.threads = c.threads;
    a.chunks = c.threads > 1 ? std::min<int64_t>(2, (s.queries + 63) / 64) : 1;
    a.scale = 0.3f, a.pair_factor = c.half ? 0.5f : 1.0f;
    a.seed = 7, a.threshold = c.dropout ? 1 << 22 : 0, a.kept = 4.0f / 3.0f;
    fill_mask(c, a, memory);
    fill_ids(c, a, memory);
    fill_terms(c, a, memory);
    a.q = memory.operand(s.batch, s.heads, s.queries, s.depth, c.half, Fill::random);
    a.k = memory.operand(s.batch, s.heads, s.keys, s.depth, c.half, Fill::random);
    a.v = memory.operand(s.batch, s.heads, s.keys, s.width, c.half, Fill::random);
    a.out = memory.operand(s.batch, s.heads, s.queries, s.width, c.half, Fill::none);
    a.lse = memory.floats(s.batch * s.heads * s.queries, Fill::none);
    locant_forward(&a);
    const bool halves = c.half && a.chunks == 1;
    a.dout = memory.operand(s.batch, s.heads, s.queries, s.width, c.half, Fill::random);
    a.dq = memory.operand(s.batch, s.heads, s.queries, s.depth, c.half, Fill::none);
    a.dk = memory.operand(a.chunks * s.batch, s.heads, s.keys, s.depth, halves, Fill::none);
    a.dv = memory.operand(a.chunks * s.batch, s.heads, s.keys, s.width, halves, Fill::none);
    locant_backward(&a);
    const int64_t tokens = s.batch * s.heads * s.queries, seen = a.chunks * s.batch * s.heads * s.keys;
    const bool low = !a.rank || (Memory::finite(a.dlow_query, tokens * a.rank) && Memory::finite(a.dlow_key, seen * a.rank));
    return low && Memory::finite(a.out, tokens * s.width) && Memory::finite(a.dq, tokens * s.depth) &&
           Memory::finite(a.dk, seen * s.depth) && Memory::finite(a.dv, seen * s.width);
}

}  // namespace

int main(int count, char** options) {
    const int64_t most = count > 1 ? std::atoll(options[1]) : 2;  // threads
    const int64_t step = count > 2 ? std::atoll(options[2]) : 1;  // every which call is made
    const Size sizes[] = {{2, 2, 1, 1, 20, 12},  {1, 2, 7, 11, 5, 3},     {2, 1, 64, 64, 16, 16}, {1, 1, 1, 150, 20, 12},
                          {2, 2, 70, 70, 20, 12}, {1, 2, 70, 203, 33, 17}, {2, 1, 131, 131, 8, 40}, {1, 3, 190, 190, 64, 64}};
    const int terms[] = {0,     QUERY, KEY, GATE, VALUE, BIAS, SCALES, PAIR, FACTORS, LOW, QUERY | KEY | BIAS,
                         GATE | SCALES | KEY | PAIR, QUERY | KEY | VALUE | FACTORS, 511, KEY | SCALES, GATE | KEY};
    const Mask masks[] = {Mask::none, Mask::causal, Mask::padding, Mask::full, Mask::documents};
    int64_t at = 0, done = 0, bad = 0;
    for (const Size& size : sizes)
        for (int term : terms)
            for (Mask mask : masks)
                for (bool ids : {false, true}) {
                    if (at++ % step) continue;
                    const int64_t clips[] = {0, 3, 40, 300};
                    const Case c = {size, term, clips[at % 4], mask, ids, at % 3 == 0, at % 5 == 0, 1 + at % most};
                    bad += !run(c);
                    ++done;
                }
    std::printf("%lld calls, %lld with numbers that are not finite\n", static_cast<long long>(done), static_cast<long long>(bad));
    return bad ? 1 : 0;
}
