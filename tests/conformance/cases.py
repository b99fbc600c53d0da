"""One case for each encoding and option: its equation for one pair, as the paper has it, without code of the package.

Sizes of every case: 3 heads of width 8, model width 10. p holds parameters by name, q and k are numpy vectors, i and j
position ids, h the head. r = j - i.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, cos, erf, exp, floor, log, log1p, pi, sin, sqrt

import numpy
import torch

import locant
from locant.testing import Case

H, D, M, N = 3, 8, 10, 24  # heads, head width, model width, longest table
S = 1 / sqrt(D)


def clipped(x: int, clip: int) -> int:
    return max(-clip, min(clip, x))


def make(name: str, **options):
    sizes = dict(num_heads=H, head_dim=D, model_dim=M)
    return lambda: locant.load(name, **{**sizes, **options})


def dot(p, q, k, i, j, h):
    return q @ k * S


# --- input embeddings ---


def stretched(p, x, i, length):
    """Linear interpolation of a table with N rows over ``length`` ids, the ends kept."""
    place = i if length <= N else i * (N - 1) / (length - 1)
    low = min(floor(place), N - 1)
    weight = place - low
    return x + (1 - weight) * p["table"][low] + weight * p["table"][min(low + 1, N - 1)]


def wave(p, width, layout, inclusive=False):
    """PE[p] of section 3.5, or with the frequencies of tensor2tensor (``inclusive``)."""
    pairs = (width + 1) // 2
    w = [10000.0 ** (-(c / max(pairs - 1, 1) if inclusive else 2 * c / width)) for c in range(pairs)]
    if layout == "interleaved":
        channels = [f(p * w[c]) for c in range(pairs) for f in (sin, cos)]
    else:
        channels = [sin(p * x) for x in w] + [cos(p * x) for x in w]
    return numpy.array(channels[:width])


ABSOLUTE = [
    Case("none", make("none"), dot, parameters=0),
    Case(
        "absolute",
        make("absolute", max_length=N),
        dot,
        parameters=N * M,
        embed=lambda p, x, i, n: x + p["table"][i],
    ),
    Case(
        "absolute/clip",
        make("absolute", max_length=N, extend="clip"),
        dot,
        parameters=N * M,
        reach=N - 2,
        embed=lambda p, x, i, n: x + p["table"][min(i, N - 1)],
    ),
    Case(
        "absolute/interpolate",
        make("absolute", max_length=N, extend="interpolate"),
        dot,
        parameters=N * M,
        embed=stretched,
    ),
    Case("sinusoidal", make("sinusoidal"), dot, parameters=0, embed=lambda p, x, i, n: x + wave(i, M, "interleaved")),
    Case(
        "sinusoidal/odd",
        make("sinusoidal", model_dim=9),
        dot,
        parameters=0,
        embed=lambda p, x, i, n: x + wave(i, 9, "interleaved"),
        model_dim=9,
    ),
    Case(
        "sinusoidal/halves",
        make("sinusoidal", layout="halves", scale_tokens=True),
        dot,
        parameters=0,
        embed=lambda p, x, i, n: sqrt(M) * x + wave(i, M, "halves"),
    ),
    Case(
        "sinusoidal/inclusive",
        make("sinusoidal", grid="inclusive"),
        dot,
        parameters=0,
        embed=lambda p, x, i, n: x + wave(i, M, "interleaved", inclusive=True),
    ),
]


def normalized(x, weight, bias):
    centered = x - x.mean()
    return centered / sqrt((centered**2).mean() + 1e-5) * weight + bias


def gelu(x):
    return numpy.array([y * (1 + erf(y / sqrt(2))) / 2 for y in x])


def dpe_layer(w, x):
    """One layer on x [N M]: every token meets all, 3 heads of width 8."""
    parts = [
        w["project.weight"] @ normalized(t, w["attention_norm.weight"], w["attention_norm.bias"]) + w["project.bias"]
        for t in x
    ]
    q, k, v = (numpy.array([part[n * H * D : (n + 1) * H * D].reshape(H, D) for part in parts]) for n in range(3))
    out = []
    for t, token in enumerate(x):
        met = []
        for h in range(H):
            powers = numpy.exp([q[t, h] @ k[s, h] * S for s in range(len(x))])
            met.append(sum(power / powers.sum() * v[s, h] for s, power in enumerate(powers)))
        token = token + w["out.weight"] @ numpy.concatenate(met) + w["out.bias"]
        inner = normalized(token, w["feed_forward_norm.weight"], w["feed_forward_norm.bias"])
        wide = gelu(w["wide.weight"] @ inner + w["wide.bias"])
        out.append(token + w["narrow.weight"] @ wide + w["narrow.bias"])
    return out


def dpe(layers):
    def row(p, x, ids, length):
        waves = [wave(i, M, "interleaved") for i in ids]
        hidden = [token + w for token, w in zip(x, waves, strict=True)]
        for n in range(layers):
            name = f"blocks.{n}."
            hidden = dpe_layer({key.removeprefix(name): p[key] for key in p if key.startswith(name)}, hidden)
        last = [normalized(t, p["norm.weight"], p["norm.bias"]) for t in hidden]
        corrected = [w + p["correct.weight"] @ t + p["correct.bias"] for w, t in zip(waves, last, strict=True)]
        return x + numpy.array(corrected)

    return row


LAYER = 4 * M + (M + 1) * 3 * H * D + (H * D + 1) * M + (M + 1) * 4 * M + (4 * M + 1) * M
AHEAD = [
    Case("dpe", make("dpe"), dot, embed_row=dpe(2), parameters=2 * LAYER + 2 * M + (M + 1) * M),
    Case("dpe/one", make("dpe", layers=1), dot, embed_row=dpe(1), parameters=LAYER + 2 * M + (M + 1) * M),
]


# --- vectors for offsets ---


def shaw(name="table", K=4, heads=False, scaled=True, row=None):
    def logit(p, q, k, i, j, h):
        a = p[name][h if heads else 0, row(i, j) if row else clipped(j - i, K) + K]
        return (q @ k + q @ a) * S if scaled else q @ k * S + q @ a

    return logit


def shaw_value(name, K=4):
    return lambda p, v, i, j, h: v + p[name][0, clipped(j - i, K) + K]


def untied(K):
    """Rows 2K+1 and 2K+2 serve the special token (id 0) as a query and as a key."""
    return lambda i, j: 2 * K + 1 if i == 0 else 2 * K + 2 if j == 0 else clipped(j - i, K) + K


def window(p, i, j, K, name="table"):
    """Nothing outside the window."""
    return p[name][0, j - i + K] if abs(j - i) <= K else numpy.zeros(D)


def huang_m4(K=4, heads=False, row=None, scaled=True):
    def logit(p, q, k, i, j, h):
        a = p["table"][h if heads else 0, row(i, j) if row else clipped(j - i, K) + K]
        return ((q + a) @ (k + a) - a @ a) * S if scaled else q @ k * S + q @ a + k @ a

    return logit


SHAW = [
    Case("shaw", make("shaw", clip=4), shaw(), parameters=9 * D, reach=4),
    Case("shaw/unclipped", make("shaw", max_length=6), shaw(K=5), parameters=11 * D, reach=5),
    Case("shaw/heads", make("shaw", clip=4, share_heads=False), shaw(heads=True), parameters=H * 9 * D, reach=4),
    Case(
        "shaw/key_value",
        make("shaw", clip=4, values=True),
        shaw(),
        parameters=2 * 9 * D,
        value=shaw_value("value_table"),
        reach=4,
    ),
    Case(
        "shaw/value",
        make("shaw", clip=4, keys=False, values=True),
        dot,
        parameters=9 * D,
        value=shaw_value("value_table"),
        reach=4,
    ),
    Case(
        "shaw/tied",
        make("shaw", clip=4, values=True, tie_kv=True),
        shaw(),
        parameters=9 * D,
        value=shaw_value("table"),
        reach=4,
    ),
    Case(
        "shaw/zero",
        make("shaw", clip=4, values=True, outside="zero"),
        lambda p, q, k, i, j, h: (q @ k + q @ window(p, i, j, 4)) * S,
        parameters=2 * 9 * D,
        value=lambda p, v, i, j, h: v + window(p, i, j, 4, "value_table"),
        reach=5,
    ),
    Case("shaw/untied", make("shaw", clip=4, untie_cls=True), shaw(row=untied(4)), parameters=11 * D, reach=4),
    Case("shaw/unscaled", make("shaw", clip=4, scaled=False), shaw(scaled=False), parameters=9 * D, reach=4),
    Case(
        "huang_m1",
        make("huang_m1", clip=4),
        lambda p, q, k, i, j, h: q @ k * p["table"][h, min(abs(j - i), 4)] * S,
        parameters=H * 5,
        reach=4,
    ),
    Case(
        "huang_m1/shared",
        make("huang_m1", max_length=6, share_heads=True),
        lambda p, q, k, i, j, h: q @ k * p["table"][0, min(abs(j - i), 5)] * S,
        parameters=6,
        reach=5,
    ),
    Case(
        "huang_m2",
        make("huang_m2", clip=4),
        lambda p, q, k, i, j, h: q @ k * p["table"][h, clipped(j - i, 4) + 4] * S,
        parameters=H * 9,
        reach=4,
    ),
    Case(
        "huang_m3",
        make("huang_m3", clip=4),
        lambda p, q, k, i, j, h: sum(q[c] * k[c] * p["table"][0, clipped(j - i, 4) + 4, c] for c in range(D)) * S,
        parameters=9 * D,
        reach=4,
    ),
    Case(
        "huang_m3/heads",
        make("huang_m3", clip=3, share_heads=False),
        lambda p, q, k, i, j, h: sum(q[c] * k[c] * p["table"][h, clipped(j - i, 3) + 3, c] for c in range(D)) * S,
        parameters=H * 7 * D,
        reach=3,
    ),
    Case("huang_m4", make("huang_m4", clip=4), huang_m4(), parameters=9 * D, reach=4),
    Case(
        "huang_m4/heads",
        make("huang_m4", clip=4, share_heads=False),
        huang_m4(heads=True),
        parameters=H * 9 * D,
        reach=4,
    ),
    Case(
        "huang_m4/untied", make("huang_m4", clip=4, untie_cls=True), huang_m4(row=untied(4)), parameters=11 * D, reach=4
    ),
    Case(
        "huang_m4/unscaled", make("huang_m4", clip=4, scaled=False), huang_m4(scaled=False), parameters=9 * D, reach=4
    ),
]


# --- Transformer-XL, DeBERTa ---


def xlnet(u=True, clamp=None, layout="halves"):
    def logit(p, q, k, i, j, h):
        distance = i - j if clamp is None else clipped(i - j, clamp)
        a = p["projection"][h * D : (h + 1) * D] @ wave(distance, M, layout)
        if not u:
            return (q @ k + q @ a) * S
        return ((q + p["content_bias"][h]) @ k + (q + p["position_bias"][h]) @ a) * S

    return logit


def signed_bucket(x: int, size: int, most: int) -> int:
    """make_log_bucket_position of DeBERTa v2."""
    middle = size // 2
    if abs(x) <= middle:
        return x
    far = middle + ceil(log(abs(x) / middle) / log((most - 1) / middle) * (middle - 1))
    return far if x > 0 else -far


def deberta(size, most=None, version="v1", paper=False, c2p=True, p2c=True, norm=None, own=None):
    own = version == "v1" if own is None else own
    norm = version == "v2" if norm is None else norm

    def row(x):
        return max(0, min(2 * size - 1, (x if most is None else signed_bucket(x, size, most)) + size))

    def projected(p, t, which, h):
        R = p["table"][t]
        if norm:
            R = (R - R.mean()) / sqrt(R.var() + 1e-7) * p["norm.weight"] + p["norm.bias"]
        name = f"{which}_projection" if own else f"host.{which}"
        bias = 0 if own and which == "key" else p[f"{name}.bias"][h * D : (h + 1) * D]
        return p[f"{name}.weight"][h * D : (h + 1) * D] @ R + bias

    def logit(p, q, k, i, j, h):
        total = q @ k
        if c2p:
            total += q @ projected(p, row(i - j), "key", h)
        if p2c:
            total += k @ projected(p, row(j - i if paper else i - j), "query", h)
        return total / sqrt(D * (1 + c2p + p2c))

    return logit


XL = [
    Case("xlnet", make("xlnet"), xlnet(), parameters=H * D * M + 2 * H * D),
    Case("xlnet/no_biases", make("xlnet", biases=False), xlnet(u=False), parameters=H * D * M),
    Case("xlnet/clamp", make("xlnet", clamp=3), xlnet(clamp=3), parameters=H * D * M + 2 * H * D, reach=3),
    Case(
        "xlnet/interleaved",
        make("xlnet", layout="interleaved"),
        xlnet(layout="interleaved"),
        parameters=H * D * M + 2 * H * D,
    ),
    Case(
        "xlnet/odd",
        make("xlnet", model_dim=9, biases=False),
        lambda p, q, k, i, j, h: (q @ k + q @ (p["projection"][h * D : (h + 1) * D] @ wave(i - j, 9, "halves"))) * S,
        parameters=H * D * 9,
        model_dim=9,
    ),
    Case(
        "deberta",
        make("deberta", max_length=6),
        deberta(6),
        parameters=12 * M + 2 * H * D * M + H * D,
        stack_parameters=12 * M + 3 * (2 * H * D * M + H * D),
        reach=6,
    ),
    Case(
        "deberta/paper_index",
        make("deberta", clip=5, p2c_index="paper"),
        deberta(5, paper=True),
        parameters=10 * M + 2 * H * D * M + H * D,
        stack_parameters=10 * M + 3 * (2 * H * D * M + H * D),
        reach=5,
    ),
    Case(
        "deberta/c2p",
        make("deberta", clip=5, p2c=False),
        deberta(5, p2c=False),
        parameters=10 * M + H * D * M,
        stack_parameters=10 * M + 3 * H * D * M,
        reach=5,
    ),
    Case(
        "deberta/p2c",
        make("deberta", clip=5, c2p=False),
        deberta(5, c2p=False),
        parameters=10 * M + H * D * M + H * D,
        stack_parameters=10 * M + 3 * (H * D * M + H * D),
        reach=5,
    ),
    Case(
        "deberta/v2",
        make("deberta", version="v2", clip=6, max_length=16),
        deberta(6, 16, "v2"),
        parameters=12 * M + 2 * M,
        stack_parameters=14 * M,
        reach=16,
    ),
    Case(
        "deberta/v2_default_clip",
        make("deberta", version="v2", max_length=12, p2c_index="paper"),
        deberta(6, 12, "v2", paper=True),
        parameters=14 * M,
        stack_parameters=14 * M,
        reach=12,
    ),
    Case(
        "deberta/v2_own",
        make("deberta", version="v2", clip=6, max_length=16, share_projections=False, layer_norm=False),
        deberta(6, 16, "v2", norm=False, own=True),
        parameters=12 * M + 2 * H * D * M + H * D,
        stack_parameters=12 * M + 3 * (2 * H * D * M + H * D),
        reach=16,
    ),
]


# --- biases ---


def bucket(r: int, count: int, most: int, causal: bool = False) -> int:
    """Raffel et al. 2020, section 2.1, as their code rounds."""
    half, base, x = (count, 0, max(-r, 0)) if causal else (count // 2, count // 2 if r > 0 else 0, abs(r))
    near = half // 2
    if x < near:
        return base + x
    return base + min(half - 1, near + floor(log(x / near) / log(most / near) * (half - near)))


def tisa(p, h, r):
    names = ("amplitude", "sharpness", "center")
    return sum(a * exp(-abs(b) * (r - c) ** 2) for a, b, c in zip(*(p[n][:, h] for n in names), strict=True))


def slope(h, heads, exponent=8):
    """The public rule: powers of 2^(-8/n) for n a power of two; else those of the power below, then every second."""
    power = 1
    while 2 * power <= heads:
        power *= 2
    if h < power:
        return 2 ** (-exponent * (h + 1) / power)
    return 2 ** (-exponent * (2 * (h - power) + 1) / (2 * power))


def sided(p, q, k, i, j, h):
    """Asymmetric ALiBi of 4 heads: two look left, two look right."""
    seen = j <= i if h < 2 else j >= i
    return q @ k * S - (slope(h, 4) * abs(j - i) if seen else 1e4)


BIAS = [
    Case(
        "t5",
        make("t5", num_buckets=8, max_distance=16),
        lambda p, q, k, i, j, h: q @ k * S + p["table"][h, bucket(j - i, 8, 16)],
        parameters=H * 8,
        reach=6,
    ),
    Case(
        "t5/causal",
        make("t5", num_buckets=8, max_distance=16, causal=True),
        lambda p, q, k, i, j, h: q @ k * S + p["table"][h, bucket(j - i, 8, 16, causal=True)],
        parameters=H * 8,
        reach=12,
    ),
    Case(
        "bert_r",
        make("bert_r", max_length=N),
        lambda p, q, k, i, j, h: q @ k * S + p["members.1.table"][h, bucket(j - i, 32, 128)],
        parameters=N * M + H * 32,
        embed=lambda p, x, i, n: x + p["members.0.table"][i],
    ),
    Case(
        "tisa",
        make("tisa"),
        lambda p, q, k, i, j, h: q @ k * S + tisa(p, h, j - i),
        parameters=3 * 5 * H,
    ),
    Case(
        "tisa/scaled",
        make("tisa", kernels=2, scaled=True),
        lambda p, q, k, i, j, h: (q @ k + tisa(p, h, j - i)) * S,
        parameters=3 * 2 * H,
    ),
    Case(
        "alibi",
        make("alibi"),
        lambda p, q, k, i, j, h: q @ k * S - slope(h, 3) * abs(j - i),
        parameters=0,
    ),
    Case(
        "alibi/12_heads",
        make("alibi", num_heads=12),
        lambda p, q, k, i, j, h: q @ k * S - slope(h, 12) * abs(j - i),
        parameters=0,
        num_heads=12,
    ),
    Case("alibi/asymmetric", make("alibi", num_heads=4, asymmetric=True), sided, parameters=0, num_heads=4),
    Case(
        "alibi/trainable",
        make("alibi", trainable=True, exponent=4.0),
        lambda p, q, k, i, j, h: q @ k * S - p["slope"][h] * abs(j - i),
        parameters=H,
    ),
    Case(
        "alibi/trainable_asymmetric",
        make("alibi", num_heads=4, trainable=True, asymmetric=True),
        lambda p, q, k, i, j, h: q @ k * S - (p["slope"][h] * abs(j - i) if (j <= i if h < 2 else j >= i) else 1e4),
        parameters=4,
        num_heads=4,
    ),
]


# --- untied positions (TUPE) ---


def normed(p, row, norm):
    if not norm:
        return row
    return (row - row.mean()) / sqrt(row.var() + 1e-5) * p["norm.weight"] + p["norm.bias"]


def untied_vector(p, which, row, h, norm, bias):
    part = slice(h * D, (h + 1) * D)
    vector = p[f"{which}_projection.weight"][part] @ normed(p, p["table"][row], norm)
    return vector + p[f"{which}_projection.bias"][part] if bias else vector


def correlation(p, r, s, h, norm=True, bias=True):
    """R_h[r, s]."""
    return untied_vector(p, "query", r, h, norm, bias) @ untied_vector(p, "key", s, h, norm, bias) / sqrt(2 * D)


def tupe(untie=True, scalar=False, norm=True, bias=True, buckets=None, untie_buckets=None):
    untie_buckets = untie if untie_buckets is None else untie_buckets

    def logit(p, q, k, i, j, h):
        if untie and i == 0:
            V = p["theta"][0, h] if scalar else correlation(p, 0, 0, h, norm, bias)
        elif untie and j == 0:
            V = p["theta"][1, h] if scalar else correlation(p, 1, 1, h, norm, bias)
        else:
            V = correlation(p, i + 1, j + 1, h, norm, bias)
        if buckets:
            count, most = buckets
            special = count // 2 if i == 0 else count if j == 0 else None
            V += p["buckets"][h, special if untie_buckets and special is not None else bucket(j - i, count, most)]
        return q @ k / sqrt(2 * D) + V

    return logit


def bert_ad(norm=True, bias=True, factor=0.5):
    def logit(p, q, k, i, j, h):
        a, b = (untied_vector(p, which, row, h, norm, bias) for which, row in (("query", i), ("key", j)))
        return (q + a) @ (k + b) * S * factor

    return logit


PROJECTIONS = 2 * H * D * M
TUPE_A = (N + 1) * M + PROJECTIONS + 2 * H * D + 2 * M
BARE = dict(layer_norm=False, bias=False)
TUPE = [
    Case("tupe_a", make("tupe_a", max_length=N), tupe(), parameters=TUPE_A),
    Case("tupe_a/tied", make("tupe_a", max_length=N, untie_cls=False), tupe(untie=False), parameters=TUPE_A),
    Case("tupe_a/scalar", make("tupe_a", max_length=N, theta="scalar"), tupe(scalar=True), parameters=TUPE_A + 2 * H),
    Case(
        "tupe_a/bare",
        make("tupe_a", max_length=N, **BARE),
        tupe(norm=False, bias=False),
        parameters=(N + 1) * M + PROJECTIONS,
    ),
    Case(
        "tupe_r",
        make("tupe_r", max_length=N, num_buckets=8, max_distance=16),
        tupe(buckets=(8, 16)),
        parameters=TUPE_A + 9 * H,
    ),
    Case("tupe_r/default_buckets", make("tupe_r", max_length=N), tupe(buckets=(32, 128)), parameters=TUPE_A + 33 * H),
    Case(
        "tupe_r/tied",
        make("tupe_r", max_length=N, num_buckets=8, max_distance=16, untie_cls=False),
        tupe(untie=False, buckets=(8, 16)),
        parameters=TUPE_A + 8 * H,
    ),
    Case(
        "tupe_r/tied_buckets",
        make("tupe_r", max_length=N, num_buckets=8, max_distance=16, untie_buckets=False),
        tupe(buckets=(8, 16), untie_buckets=False),
        parameters=TUPE_A + 8 * H,
    ),
    Case("bert_ad", make("bert_ad", max_length=N), bert_ad(), parameters=N * M + PROJECTIONS + 2 * H * D + 2 * M),
    Case(
        "bert_ad/bare",
        make("bert_ad", max_length=N, logit_factor=1.0, **BARE),
        bert_ad(norm=False, bias=False, factor=1.0),
        parameters=N * M + PROJECTIONS,
    ),
]


# --- rotations and sums ---


def turned(x, position, width, layout, base=10000.0):
    """R_p x: channel pairs turned by p w_c."""
    out = x.copy()
    for c in range(width // 2):
        a, b = (c, c + width // 2) if layout == "halves" else (2 * c, 2 * c + 1)
        angle = position * base ** (-2 * c / width)
        out[a] = x[a] * cos(angle) - x[b] * sin(angle)
        out[b] = x[a] * sin(angle) + x[b] * cos(angle)
    return out


def rope(width=D, layout="halves", base=10000.0):
    return lambda p, q, k, i, j, h: turned(q, i, width, layout, base) @ turned(k, j, width, layout, base) * S


OTHERS = [
    Case("rope", make("rope"), rope(), parameters=0),
    Case(
        "rope/interleaved", make("rope", layout="interleaved", base=500.0), rope(D, "interleaved", 500.0), parameters=0
    ),
    Case("rope/partial", make("rope", rotary_dim=6), rope(6), parameters=0),
    Case(
        "rope+alibi",
        make("rope+alibi"),
        lambda p, q, k, i, j, h: rope()(p, q, k, i, j, h) - slope(h, 3) * abs(j - i),
        parameters=0,
    ),
    Case(
        "tupe_a+huang_m4",
        make("tupe_a+huang_m4", max_length=N, clip=4),
        lambda p, q, k, i, j, h: (
            tupe()({n[10:]: w for n, w in p.items() if n.startswith("members.0")}, q, k, i, j, h)
            + (q + k) @ p["members.1.table"][0, clipped(j - i, 4) + 4] / sqrt(2 * D)
        ),
        parameters=TUPE_A + 9 * D,
        stack_parameters=TUPE_A + 3 * 9 * D,
    ),
]

# --- hand-made ---


def bell(k, w, right=None):
    """exp(-w k^2) over its sum over all offsets; the right side may have a weight of its own."""
    side = {1: w if right is None else right, -1: w}
    total = 1 + sum(exp(-side[s] * m * m) for s in (1, -1) for m in range(1, 200))
    return exp(-side[1 if k > 0 else -1] * k * k) / total


def hand_made(E):
    return lambda p, q, k, i, j, h: q @ k * S + E(p, j - i, h)


TABLE = dict(form="table", max_length=7)
ATTENUATED = [
    Case("attenuated", make("attenuated"), hand_made(lambda p, k, h: bell(k, 0.5)), parameters=0),
    Case(
        "attenuated/asymmetric",
        make("attenuated", w=0.3, w_right=0.05),
        hand_made(lambda p, k, h: bell(k, 0.3, 0.05)),
        parameters=0,
    ),
    Case(
        "attenuated/window",
        make("attenuated", form="window", window=5),
        hand_made(lambda p, k, h: (abs(k) <= 2) / 5),
        parameters=0,
    ),
    Case(
        "attenuated/table",
        make("attenuated", **TABLE),
        hand_made(lambda p, k, h: p["table"][h, min(abs(k), 6)]),
        parameters=H * 7,
        shared=False,
        reach=6,
    ),
    Case(
        "attenuated/shared_heads",
        make("attenuated", **TABLE, share_heads=True),
        hand_made(lambda p, k, h: p["table"][0, min(abs(k), 6)]),
        parameters=7,
        shared=False,
        reach=6,
    ),
]

# --- learned and fixed functions of the distance ---


def softplus(x):
    return log1p(exp(x))


def kerple(p, h, x, form="log", positivity="softplus", at=""):
    r1, r2 = p[f"{at}r1"][h], p[f"{at}r2"][h]
    if positivity == "clamp":
        r1, r2 = max(r1, 0.01), min(max(r2, 0.01), 2 if form == "power" else numpy.inf)
    else:
        r1, r2 = softplus(r1), softplus(r2) if form == "log" else 2 / (1 + exp(-r2))
    return -r1 * (log(1 + r2 * abs(x)) if form == "log" else abs(x) ** r2)


def sandwich(x, h, heads=H, E=128, first=1, divide=True):
    g = sum(cos(x / 10000 ** (2 * c / E)) for c in range(first, first + E // 2))
    ratio = 8 * (h + 1) / heads
    return (g - E / 2) * (1 / ratio if divide else ratio)


def fire(p, i, j, h, L, last=None, slope=0.0, at=""):
    """``last``: the last id, for encoders; ``slope`` of the activation below 0."""
    distance, reach = (max(i - j, 0), i) if last is None else (abs(i - j), max(i, last - i))
    c = abs(p[f"{at}c"][0])
    u = log(c * distance + 1) / (log(c * max(abs(p[f"{at}multiplier"][0]) * L, reach) + 1) + 1e-6)
    hidden = p[f"{at}mlp.0.weight"][:, 0] * u + p[f"{at}mlp.0.bias"]
    hidden = numpy.where(hidden > 0, hidden, slope * hidden)
    return p[f"{at}mlp.2.weight"][h] @ hidden + p[f"{at}mlp.2.bias"][h]


def wide(encoding, generator):
    """Draws that let a network of small numbers show."""
    for parameter in encoding.parameters():
        parameter.copy_(2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def fire_of_row(p, q, k, i, j, seen):
    return numpy.array(
        [[q[h] @ k[h, s] * S + fire(p, i, j[s], h, 5, j.max()) for s in range(len(j))] for h in range(H)]
    )


DISTANCE = [
    Case("kerple", make("kerple"), lambda p, q, k, i, j, h: q @ k * S + kerple(p, h, j - i), parameters=2 * H),
    Case(
        "kerple/power",
        make("kerple", form="power"),
        lambda p, q, k, i, j, h: q @ k * S + kerple(p, h, j - i, "power"),
        parameters=2 * H,
    ),
    Case(
        "kerple/clamp",
        make("kerple", positivity="clamp"),
        lambda p, q, k, i, j, h: q @ k * S + kerple(p, h, j - i, "log", "clamp"),
        parameters=2 * H,
    ),
    Case(
        "kerple/power_clamp",
        make("kerple", form="power", positivity="clamp"),
        lambda p, q, k, i, j, h: q @ k * S + kerple(p, h, j - i, "power", "clamp"),
        parameters=2 * H,
    ),
    Case("sandwich", make("sandwich"), lambda p, q, k, i, j, h: q @ k * S + sandwich(j - i, h), parameters=0),
    Case(
        "sandwich/multiply",
        make("sandwich", num_heads=4, width=6, ratio="multiply", first=0),
        lambda p, q, k, i, j, h: q @ k * S + sandwich(j - i, h, 4, 6, 0, divide=False),
        parameters=0,
        num_heads=4,
    ),
    Case(
        "fire",
        make("fire", max_length=5, causal=True, width=6),
        lambda p, q, k, i, j, h: q @ k * S + fire(p, i, j, h, 5),
        spread=wide,
        parameters=2 * 6 + 6 * H + H + 2,
    ),
    Case("fire/encoder", make("fire", max_length=5), row=fire_of_row, spread=wide, parameters=2 * 32 + 32 * H + H + 2),
    Case(
        "fire/leaky",
        make("fire", max_length=7, causal=True, width=6, activation="leaky_relu"),
        lambda p, q, k, i, j, h: q @ k * S + fire(p, i, j, h, 7, slope=0.01),
        spread=wide,
        parameters=2 * 6 + 6 * H + H + 2,
    ),
]


# --- what the logits decide ---


def sigmoid(x):
    return 1 / (1 + numpy.exp(-x))


def cope(P, scaled=False):
    def row(p, q, k, i, j, seen):
        lines = numpy.einsum("hd,hjd->hj", q, k) * S
        out = lines.copy()
        for h, s in numpy.ndindex(*lines.shape):
            count = min(sum(sigmoid(lines[h, m]) for m in range(s, len(j)) if seen[h, m]), P - 1)
            low, high = floor(count), min(ceil(count), P - 1)
            vector = (1 - (count - low)) * p["table"][low] + (count - low) * p["table"][high]
            out[h, s] += q[h] @ vector * (S if scaled else 1)
        return out

    return row


def leaky(x):
    return numpy.where(x > 0, x, 0.01 * x)


def dape(bias=None, kernel=None, turn=None):
    """``bias(p, i, j, h)``: what it adapts to; ``turn``: rotary positions below it."""

    def row(p, q, k, i, j, seen):
        count = len(j)
        if turn is not None:
            lines = numpy.array([[turn(p, q[h], k[h, s], i, j[s], h) for s in range(count)] for h in range(len(q))])
        else:
            lines = numpy.einsum("hd,hjd->hj", q, k) * S
        static = numpy.zeros_like(lines)
        if bias is not None:
            static = numpy.array([[bias(p, i, j[s], h) for s in range(count)] for h in range(len(q))])
        z = lines if bias is None else numpy.concatenate((lines, static))
        (W1, b1), (W2, b2) = ((p[f"{at}.weight"], p[f"{at}.bias"]) for at in maps(p))
        if kernel is None:
            return lines + static + W2[:, :, 0] @ leaky(W1[:, :, 0] @ z + b1[:, None]) + b2[:, None]
        order = [s for s in range(count) if seen[:, s].any()]
        whole = numpy.zeros((len(z), count + kernel))
        whole[:, : len(order)] = z[:, order]
        added = slide(W2, b2, leaky(slide(W1, b1, whole)))
        out = lines + static
        out[:, order] += added[:, : len(order)]
        return out

    return row


def maps(p):
    """Where the two maps are, in sums of any size."""
    return sorted({name.rsplit(".", 1)[0] for name in p if "first" in name or "second" in name})


def slide(W, b, x):
    """A convolution along a row, zeros beyond both ends."""
    side = W.shape[2] // 2
    padded = numpy.pad(x, ((0, 0), (side, side)))
    return numpy.stack(
        [numpy.einsum("ock,ck->o", W, padded[:, s : s + W.shape[2]]) + b for s in range(x.shape[1])], axis=1
    )


def over_kerple(p, i, j, h):
    return kerple(p, h, j - i, at="members.0.")


def xpos(base=512.0, gamma=0.4, layout="interleaved"):
    def logit(p, q, k, i, j, h):
        total = 0.0
        for c in range(D // 2):
            a, b = (2 * c, 2 * c + 1) if layout == "interleaved" else (c, c + D // 2)
            angle = (i - j) * 10000.0 ** (-2 * c / D)
            fade = ((2 * c / D + gamma) / (1 + gamma)) ** ((i - j) / base)
            same, turned = q[a] * k[a] + q[b] * k[b], q[a] * k[b] - q[b] * k[a]
            total += fade * (same * cos(angle) + turned * sin(angle))
        return total * S

    return logit


def maps_size(heads, width, kernel=1, inputs=2):
    return width * inputs * heads * kernel + width + heads * width * kernel + heads


CONTENT = [
    Case("cope", make("cope", max_positions=4), row=cope(4), parameters=4 * D),
    Case("cope/long", make("cope", scaled=True), row=cope(64, scaled=True), parameters=64 * D),
    Case("xpos", make("xpos"), xpos(), parameters=0),
    Case("xpos/halves", make("xpos", base=100.0, gamma=0.7, layout="halves"), xpos(100.0, 0.7, "halves"), parameters=0),
    Case("dape", make("dape", width=5), row=dape(over_kerple), parameters=2 * H + maps_size(H, 5)),
    Case(
        "dape/alibi",
        make("dape", over="alibi", width=5),
        row=dape(lambda p, i, j, h: -slope(h, 3) * abs(j - i)),
        parameters=maps_size(H, 5),
        shared=False,
    ),
    Case(
        "dape/fire",
        make(
            "dape", over="fire", causal=True, max_length=5, width=4, over_options=dict(width=6, activation="leaky_relu")
        ),
        row=dape(lambda p, i, j, h: fire(p, i, j, h, 5, slope=0.01, at="members.0.")),
        parameters=2 * 6 + 6 * H + H + 2 + maps_size(H, 4),
    ),
    Case(
        "dape/v2",
        make("dape", width=5, kernel=3),
        row=dape(over_kerple, 3),
        parameters=2 * H + maps_size(H, 5, 3),
    ),
    Case(
        "dape/v2_wide",
        make("dape", over="none", width=4, kernel=5),
        row=dape(None, 5),
        parameters=maps_size(H, 4, 5, 1),
    ),
    Case(
        "rope+dape",
        make("rope+dape", over="none", width=5),
        row=dape(turn=rope()),
        parameters=maps_size(H, 5, 1, 1),
        shared=False,
    ),
]


# --- transforms of ids, as they are in evaluation ---


def drawn_ids(count, L=40):
    """The ids of evaluation: a fixed order of L ids, of which the first ``count`` are sorted."""
    return sorted(locant.load("randomized", max_position=L).order.tolist()[:count])


def plane(i, height, width, dim, prefix=0):
    """Waves of a patch at its place between -1 and 1."""
    if i < prefix:
        return numpy.zeros(dim)
    row, column = divmod(i - prefix, width)
    x, y = -1 + 2 * row / (height - 1), -1 + 2 * column / (width - 1)
    k = numpy.arange(dim // 2)
    phase = pi * 10 ** (k / (dim / 2 - 1)) * (numpy.cos(k) * x + numpy.sin(k) * y)
    return numpy.concatenate((numpy.cos(phase), numpy.sin(phase)))


MOVED = [
    Case(
        "shape+absolute",
        make("shape+absolute", max_length=N, max_shift=9),
        dot,
        parameters=N * M,
        embed=lambda p, x, i, n: x + p["members.1.table"][i],
    ),
    Case(
        "shape+sinusoidal",
        make("shape+sinusoidal", max_shift=9, eval_offset="code"),
        dot,
        parameters=0,
        embed=lambda p, x, i, n: x + wave(i + 9, M, "interleaved"),
    ),
    Case("shape+rope", make("shape+rope"), rope(), parameters=0),
    Case(
        "cape+sinusoidal",
        make("cape+sinusoidal", delta=0.5, frequency=3.0),
        dot,
        parameters=0,
        embed=lambda p, x, i, n: x + wave(1.5 * i, M, "interleaved"),
    ),
    Case(
        "cape+alibi",
        make("cape+alibi", delta=0.25),
        lambda p, q, k, i, j, h: q @ k * S - slope(h, 3) * abs(j - i) / 4,
        parameters=0,
    ),
    Case(
        "randomized+sinusoidal",
        make("randomized+sinusoidal", max_position=40, eval_length=N),
        dot,
        parameters=0,
        embed=lambda p, x, i, n: x + wave(drawn_ids(N)[i], M, "interleaved"),
    ),
    Case(
        "cape_2d",
        make("cape_2d", height=4, width=6, prefix=1),
        dot,
        parameters=0,
        embed=lambda p, x, i, n: x + plane(i, 4, 6, M, 1),
    ),
]

SHARED = {
    "none",
    "dpe",
    "sandwich",
    "xpos",
    "shape",
    "cape",
    "cape_2d",
    "randomized",
    "attenuated",
    "absolute",
    "sinusoidal",
    "t5",
    "bert_r",
    "alibi",
    "rope",
    "bert_ad",
    "tupe_a",
    "tupe_r",
}  # by all layers
CASES: list[Case] = [
    case if case.shared is not None else replace(case, shared=set(case.id.split("/")[0].split("+")) <= SHARED)
    for case in (*ABSOLUTE, *AHEAD, *SHAW, *XL, *BIAS, *TUPE, *OTHERS, *ATTENUATED, *DISTANCE, *CONTENT, *MOVED)
]
BY_ID = {case.id: case for case in CASES}
