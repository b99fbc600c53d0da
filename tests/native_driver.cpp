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

struct Memory {  // exact allocations of one call
    std::vector<void*> all;
    ~Memory() {
        for (void* p : all) std::free(p);
    }
    void* take(size_t bytes) {
        all.push_back(std::malloc(bytes));
        return all.back();
    }
    float* floats(int64_t count, bool random) {
        float* p = static_cast<float*>(take(count * 4));
        for (int64_t n = 0; n < count; ++n) p[n] = random ? draw() : 0.0f;
        return p;
    }
    Operand operand(int64_t batch, int64_t heads, int64_t length, int64_t width, bool half, bool random) {
        const int64_t count = batch * heads * length * width;
        Operand made = {nullptr, {batch > 1 ? heads * length * width : 0, heads > 1 ? length * width : 0, width}, half};
        float* values = floats(count, random);
        made.data = values;
        if (!half) return made;
        uint16_t* halves = static_cast<uint16_t*>(take(count * 2));
        for (int64_t n = 0; n < count; ++n) {
            uint32_t bits;
            std::memcpy(&bits, values + n, 4);
            halves[n] = bits >> 16;
        }
        made.data = halves;
        return made;
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
        table = memory.floats(heads * a.rows * width, true);
        grad = memory.floats(c.threads * heads * a.rows * width, false);
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
        table = memory.floats(heads * a.numbers, true);
        grad = memory.floats(c.threads * heads * a.numbers, false);
    };
    numbers(BIAS, a.bias, a.dbias, a.bias_heads);
    numbers(SCALES, a.scales, a.dscales, a.scale_heads);
    if (c.terms & PAIR) {
        a.pair = memory.operand(1, s.heads, s.queries, s.keys, c.half, true);
        a.dpair = memory.operand(1, s.heads, s.queries, s.keys, false, false);
    }
    if (c.terms & FACTORS) {
        a.factors = memory.operand(s.batch, 1, s.queries, s.keys, c.half, true);
        a.dfactors = memory.operand(s.batch, 1, s.queries, s.keys, false, false);
    }
    if (c.terms & PAIR) a.slices_batch = 1;
    if (c.terms & FACTORS) a.slices_heads = 1;
    if (c.terms & LOW) {
        a.rank = 5;
        a.low_query = memory.operand(s.batch, s.heads, s.queries, a.rank, c.half, true);
        a.low_key = memory.operand(1, s.heads, s.keys, a.rank, c.half, true);
        a.dlow_query = memory.operand(s.batch, s.heads, s.queries, a.rank, false, false);
        a.dlow_key = memory.operand(a.chunks * s.batch, s.heads, s.keys, a.rank, false, false);
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
    a.q = memory.operand(s.batch, s.heads, s.queries, s.depth, c.half, true);
    a.k = memory.operand(s.batch, s.heads, s.keys, s.depth, c.half, true);
    a.v = memory.operand(s.batch, s.heads, s.keys, s.width, c.half, true);
    a.out = memory.operand(s.batch, s.heads, s.queries, s.width, c.half, false);
    a.lse = memory.floats(s.batch * s.heads * s.queries, false);
    locant_forward(&a);
    const bool halves = c.half && a.chunks == 1;
    a.dout = memory.operand(s.batch, s.heads, s.queries, s.width, c.half, true);
    a.dq = memory.operand(s.batch, s.heads, s.queries, s.depth, c.half, false);
    a.dk = memory.operand(a.chunks * s.batch, s.heads, s.keys, s.depth, halves, false);
    a.dv = memory.operand(a.chunks * s.batch, s.heads, s.keys, s.width, halves, false);
    locant_backward(&a);
    if (c.half) return true;
    const float* out = static_cast<const float*>(a.out.data);
    const float* dq = static_cast<const float*>(a.dq.data);
    bool finite = true;
    for (int64_t n = 0; n < s.batch * s.heads * s.queries * s.width; ++n) finite &= std::isfinite(out[n]);
    for (int64_t n = 0; n < s.batch * s.heads * s.queries * s.depth; ++n) finite &= std::isfinite(dq[n]);
    return finite;
}

}  // namespace

int main(int count, char** options) {
    const int64_t most = count > 1 ? std::atoll(options[1]) : 2;  // threads
    const Size sizes[] = {{2, 2, 1, 1, 20, 12},  {1, 2, 7, 11, 5, 3},     {2, 1, 64, 64, 16, 16}, {1, 1, 1, 150, 20, 12},
                          {2, 2, 70, 70, 20, 12}, {1, 2, 70, 203, 33, 17}, {2, 1, 131, 131, 8, 40}, {1, 3, 190, 190, 64, 64}};
    const int terms[] = {0,     QUERY, KEY, GATE, VALUE, BIAS, SCALES, PAIR, FACTORS, LOW, QUERY | KEY | BIAS,
                         GATE | SCALES | KEY | PAIR, QUERY | KEY | VALUE | FACTORS, 511, KEY | SCALES, GATE | KEY};
    const Mask masks[] = {Mask::none, Mask::causal, Mask::padding, Mask::full, Mask::documents};
    int64_t done = 0, bad = 0;
    for (const Size& size : sizes)
        for (int term : terms)
            for (Mask mask : masks)
                for (bool ids : {false, true}) {
                    const int64_t clips[] = {0, 3, 40, 300};
                    const Case c = {size, term, clips[done % 4], mask, ids, done % 3 == 0, done % 5 == 0, 1 + done % most};
                    bad += !run(c);
                    ++done;
                }
    std::printf("%lld calls, %lld with numbers that are not finite\n", static_cast<long long>(done), static_cast<long long>(bad));
    return bad ? 1 : 0;
}
