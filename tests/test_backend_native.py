"""Backend `native` equals `reference` in output and every gradient; without a compiler it steps aside and says so."""

from __future__ import annotations

import json
import platform
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from locant.attention import attention
from locant.backends import BACKENDS, Call, native
from locant.backends.native import build
from locant.cli import app
from locant.positions import Positions
from locant.terms import (
    Clip,
    Distance,
    LogBucket,
    LogitMap,
    LowRankBias,
    Operands,
    PairBias,
    RelativeBias,
    RelativeGate,
    RelativeKey,
    RelativeQuery,
    RelativeScale,
    RelativeValue,
    SignedLogBucket,
    Untied,
    WeightScale,
)

B, H, D, E = 2, 3, 20, 12


@pytest.fixture(scope="module", autouse=True)
def kernel() -> None:
    """Build the kernel before the first test (some seconds, once for a machine)."""
    try:
        build.compiler()
    except build.Unavailable:
        pytest.skip("no C++ compiler here")
    assert not isinstance(native._load(), str)


def qkv(num_queries: int, num_keys: int, batch: int = B, heads: int = H) -> list[torch.Tensor]:
    shapes = ((batch, heads, num_queries, D), (batch, heads, num_keys, D), (batch, heads, num_keys, E))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def table(rows: int, *width: int, heads: int = H) -> torch.Tensor:
    return torch.randn(heads, rows, *width, dtype=torch.float64, requires_grad=True)


def given(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


TERMS: dict[str, Callable[[int, int], list]] = {
    "none": lambda i, j: [],
    "bias, bucket": lambda i, j: [RelativeBias(table(8), LogBucket(8, 30))],
    "bias, scaled and not": lambda i, j: [
        RelativeBias(table(5, heads=1), Clip(2), scaled=True),
        RelativeBias(table(41), Clip(20)),
    ],
    "scale": lambda i, j: [RelativeScale(table(4), Distance(3)), RelativeScale(table(7, heads=1), Clip(3))],
    "query": lambda i, j: [RelativeQuery(table(9, D, heads=1), Clip(4))],
    "query, no clip, per head": lambda i, j: [RelativeQuery(table(601, D), Clip(300))],
    "query, one row": lambda i, j: [RelativeQuery(table(1, D), Clip(0))],
    "query, unscaled": lambda i, j: [RelativeQuery(table(9, D), Clip(4), scaled=False)],
    "key": lambda i, j: [RelativeKey(table(9, D, heads=1), Clip(4))],
    "key, no clip, per head": lambda i, j: [RelativeKey(table(601, D), Clip(300))],
    "key, zero outside": lambda i, j: [RelativeKey(table(12, D), Clip(5, "zero"), scaled=False)],
    "both, own rules": lambda i, j: [
        RelativeQuery(table(62, D), Clip(30, "zero")),
        RelativeKey(table(80, D, heads=1), SignedLogBucket(40, 90, flip=True)),
        RelativeBias(table(4), Distance(3)),
    ],
    "gate": lambda i, j: [RelativeGate(table(9, D, heads=1), Clip(4))],
    "gate, no clip, per head": lambda i, j: [RelativeGate(table(601, D), Clip(300))],
    "gate and all": lambda i, j: [
        RelativeGate(table(101, D), Clip(50)),
        RelativeScale(table(7), Clip(3)),
        RelativeQuery(table(41, D), Clip(20)),
        RelativeKey(table(9, D), Clip(4)),
        PairBias(given(H, i, j)),
    ],
    "value": lambda i, j: [RelativeValue(table(9, E, heads=1), Clip(4))],
    "value, no clip, per head": lambda i, j: [RelativeValue(table(601, E), Clip(300))],
    "query and values": lambda i, j: [
        RelativeQuery(table(41, D), Clip(20)),
        RelativeValue(table(4, E), Distance(3)),
        RelativeValue(table(12, E, heads=1), Clip(5, "zero")),
    ],
    "pair": lambda i, j: [PairBias(given(B, H, i, j))],
    "pair, shared by the batch, scaled": lambda i, j: [PairBias(given(1, H, i, j), scaled=True)],
    "pair, shared by the heads": lambda i, j: [PairBias(given(B, 1, i, j))],
    "pairs": lambda i, j: [PairBias(given(1, 1, i, j)), PairBias(given(H, i, j))],
    "pairs from functions": lambda i, j: [
        PairBias(lambda positions: torch.linspace(-1, 1, j, dtype=torch.float32).expand(1, i, j)),
        PairBias(lambda positions: torch.linspace(-1, 1, i, dtype=torch.float32)[:, None].expand(1, 1, i, j)),
    ],
    "factors": lambda i, j: [WeightScale(given(H, i, j))],
    "factors, several": lambda i, j: [
        WeightScale(given(B, 1, i, j)),
        WeightScale(given(H, i, j)),
        PairBias(given(H, i, j)),
    ],
    "low rank": lambda i, j: [LowRankBias(given(B, H, i, 5), given(1, H, j, 5))],
    "low rank, several": lambda i, j: [
        LowRankBias(given(B, 1, i, 3), given(B, H, j, 3), scaled=False),
        LowRankBias(given(1, H, i, 17), given(1, 1, j, 17)),
        RelativeScale(table(7), Clip(3)),
    ],
    "everything": lambda i, j: [
        RelativeGate(table(21, D), Clip(10)),
        RelativeScale(table(7), Clip(3)),
        RelativeQuery(table(41, D, heads=1), Clip(20)),
        RelativeKey(table(9, D), Clip(4)),
        RelativeBias(table(8), LogBucket(8, 30)),
        RelativeValue(table(4, E), Distance(3)),
        PairBias(given(H, i, j)),
        LowRankBias(given(B, H, i, 4), given(B, H, j, 4)),
        WeightScale(given(B, 1, i, j)),
    ],
}
SIZES = [(1, 1), (7, 11), (64, 64), (1, 150), (70, 203), (131, 131)]


def outcomes(backend: str, inputs: list, terms: list, options: dict, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradients of everything, computed in ``dtype``."""
    made = {id(t): t.detach().to(dtype).requires_grad_() for t in inputs}
    parts = []
    for term in terms:
        fields = dict(vars(term))
        for name, value in fields.items():
            if isinstance(value, torch.Tensor):
                fields[name] = made.setdefault(id(value), value.detach().to(dtype).requires_grad_())
        parts.append(type(term)(**fields))
    leaves = list(made.values())
    out = attention(*(made[id(t)] for t in inputs), tuple(parts), backend=backend, **options)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    return [out, *torch.autograd.grad((out.double() * weight).sum(), leaves)]


def check(inputs: list, terms: list, options: dict, dtype: torch.dtype = torch.float32, atol: float = 2e-5) -> None:
    got = outcomes("native", inputs, terms, options, dtype)
    want = outcomes("reference", inputs, terms, options, torch.float64)
    for which, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == dtype
        error = (a - b).abs().max().item() / (1 + b.abs().max().item())
        assert error < atol, f"tensor {which} of shape {tuple(a.shape)} is off by {error}"


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("terms", TERMS)
def test_terms_equal_reference(terms: str, size: tuple[int, int]) -> None:
    check(qkv(*size), TERMS[terms](*size), {})


@pytest.mark.parametrize("terms", ["none", "both, own rules", "gate and all", "query and values"])
@pytest.mark.parametrize(
    "options",
    [
        lambda i, j: {"causal": True},
        lambda i, j: {"mask": torch.rand(B, 1, 1, j) > 0.3},
        lambda i, j: {"mask": torch.rand(B, H, i, j) > 0.6},
        lambda i, j: {"mask": (torch.arange(i) > 5)[:, None].expand(i, j)},
        lambda i, j: {"scale": -0.3, "logit_factor": 0.5},
    ],
    ids=["causal", "padding", "full mask", "blind rows", "scale"],
)
@pytest.mark.parametrize("size", [(70, 70), (67, 140)], ids=str)
def test_masks_and_scales_equal_reference(size: tuple[int, int], options: Callable, terms: str) -> None:
    check(qkv(*size), TERMS[terms](*size), options(*size))


def gapped(num_queries: int, num_keys: int) -> tuple[Positions, dict]:
    """A step, a long gap, a stretch in steps of two, a restart."""
    ids = torch.arange(num_keys)
    ids = torch.where(ids < 70, ids, torch.where(ids < 140, 2 * ids, ids - 140)) + torch.tensor([[0], [3]])
    return Positions.from_ids(ids[:, num_keys - num_queries :], ids, length=500), {}


def padded(num_queries: int, num_keys: int) -> tuple[Positions, dict]:
    mask = torch.arange(num_keys) >= torch.tensor([[num_keys // 2], [0]])
    return Positions.from_mask(mask, num_queries), {"mask": mask[:, None, None]}


def packed(num_queries: int, num_keys: int) -> tuple[Positions, dict]:
    document = torch.tensor([[0] * 66 + [1] * (num_keys - 66), [0] * 10 + [1] * (num_keys - 10)])
    positions = Positions.packed(document)
    return positions, {"causal": True}


@pytest.mark.parametrize(
    "terms",
    [
        "none",
        "bias, bucket",
        "scale",
        "query",
        "key",
        "key, no clip, per head",
        "gate",
        "gate and all",
        "value",
        "everything",
    ],
)
@pytest.mark.parametrize(("situation", "size"), [(gapped, (150, 203)), (padded, (203, 203)), (packed, (150, 150))])
def test_explicit_ids_equal_reference(situation: Callable, size: tuple[int, int], terms: str) -> None:
    positions, options = situation(*size)
    inputs, made = qkv(*size), TERMS[terms](*size)
    call = Call(Operands(*(t.float() for t in inputs), positions, 0.5), tuple(made), None, False, 0.0, False)
    assert BACKENDS["native"].refuses(call) is None
    check(inputs, made, {"positions": positions, **options}, atol=3e-5)


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize(
    "terms",
    ["gate and all", "pairs", "pair, shared by the heads", "query and values", "factors, several", "low rank, several"],
)
def test_few_heads_are_split_by_queries(terms: str, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(qkv(300, 300), TERMS[terms](300, 300), {"causal": True})
        again = [outcomes("native", *args) for args in [(qkv(70, 70, 1, 1), [], {}, torch.float32)] * 2]
        assert all(torch.equal(a, b) for a, b in zip(*again, strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["both, own rules", "everything"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_reference(dtype: torch.dtype, kind: str) -> None:
    inputs, terms = qkv(70, 70), TERMS[kind](70, 70)
    with torch.no_grad():  # what half precision cannot hold is nobody's error
        for tensor in inputs + [t for term in terms for t in vars(term).values() if isinstance(t, torch.Tensor)]:
            tensor.copy_(tensor.to(dtype))
    exact = outcomes("reference", inputs, terms, {}, torch.float64)
    runs = (outcomes(backend, inputs, terms, {}, dtype) for backend in ("native", "reference"))
    for got, plain, want in zip(*runs, exact, strict=True):
        assert got.dtype == dtype
        assert (got - want).abs().max() <= 2 * (plain - want).abs().max()


@pytest.mark.parametrize("probability", [0.1, 0.5, 1.0])
def test_dropout_is_that_of_blocked(probability: float) -> None:
    inputs = qkv(70, 131)
    terms = TERMS["both, own rules"](70, 131) + TERMS["query and values"](70, 131)
    options = {"dropout": probability, "mask": torch.rand(B, 1, 1, 131) > 0.3}
    torch.manual_seed(5)
    got = outcomes("native", inputs, terms, options, torch.float32)
    torch.manual_seed(5)
    want = outcomes("blocked", inputs, terms, options, torch.float64)
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() < 2e-5 * (1 + b.abs().max())
    other = outcomes("native", inputs, terms, options, torch.float32)
    assert probability == 1 or not torch.equal(got[0], other[0])


def test_transposed_views_are_read_right() -> None:
    inputs = [t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in qkv(33, 33)]
    inputs = [t.float() for t in inputs]
    assert not inputs[0].is_contiguous()
    torch.testing.assert_close(
        attention(*inputs, backend="native"), attention(*inputs, backend="reference"), rtol=1e-5, atol=1e-5
    )


def test_operands_are_read_where_they_lie() -> None:
    """Neither bfloat16 nor the layout of heads in a model asks for a copy; a last axis with gaps does."""
    q = torch.randn(B, 33, H, 16).bfloat16().transpose(1, 2)
    pair = torch.randn(1, H, 33, 33).bfloat16()
    call = Call(Operands(q, q, q, Positions.arange(33), 0.5), (PairBias(pair, scaled=True),), None, False, 0.0, False)
    held = native.Given(call, 0, native.lower.lower(call)).held
    assert {t.data_ptr() for t in held} == {q.data_ptr(), pair.data_ptr()}
    plain = replace(call, operands=replace(call.operands, q=q.contiguous()))
    assert torch.equal(native.run(call), native.run(plain))
    spread = torch.randn(B, H, 33, 32)[..., ::2]
    torch.testing.assert_close(
        attention(spread, spread, spread, backend="native"), attention(spread, spread, spread, backend="reference")
    )


def call(*terms: object, dtype: torch.dtype = torch.float32, positions: Positions | None = None) -> Call:
    q, k, v = (t.to(dtype) for t in qkv(7, 7))
    return Call(Operands(q, k, v, positions or Positions.arange(7), 0.5), terms, None, False, 0.0, False)


def test_what_it_cannot_serve_is_refused_with_the_reason() -> None:
    refuses = BACKENDS["native"].refuses
    query = RelativeQuery(table(9, D), Clip(4))
    assert refuses(call(query)) is None
    assert "LogitMap" in (refuses(call(LogitMap(lambda content, bias, positions: content))) or "")
    assert "not Untied" in (refuses(call(RelativeQuery(table(9, D), Untied(Clip(3), 7, 8)))) or "")
    real, far = Positions.from_ids(torch.rand(7)), Positions.from_ids(torch.arange(7) * 20_000)
    assert "not torch.float32" in (refuses(call(query, positions=real)) or "")
    assert "120000 apart" in (refuses(call(query, positions=far)) or "")
    assert refuses(call(positions=real)) is None  # nothing reads the ids
    gate = RelativeGate(table(9, D), Clip(4))
    assert "several vector gates" in (refuses(call(gate, gate)) or "")
    assert "torch.float64" in (refuses(call(query, dtype=torch.float64)) or "")
    empty = [t[:0].float() for t in qkv(7, 7)]
    assert "nothing" in (refuses(Call(Operands(*empty, Positions.arange(7), 0.5), (), None, False, 0.0, False)) or "")
    assert "weights" in (refuses(Call(call().operands, (), None, False, 0.0, True)) or "")
    rows = Operands(*(t.float() for t in qkv(7, 7)), Positions.arange(7), torch.ones(7))
    assert "one number" in (refuses(Call(rows, (), None, False, 0.0, False)) or "")


def test_a_forked_child_does_not_hang() -> None:
    code = """
import os, torch
from locant.attention import attention
torch.set_num_threads(2)
q = torch.randn(1, 3, 130, 16)
before = attention(q, q, q, backend="native")
child = os.fork()
if not child:
    os._exit(0 if torch.allclose(attention(q, q, q, backend="native"), before) else 3)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_python_threads_share_nothing() -> None:
    q = torch.randn(1, 2, 90, 16)
    want = attention(q, q, q, backend="native")
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: attention(q, q, q, backend="native"), range(40)))
    assert all(torch.equal(got, want) for got in results)


# The kernel alone, under the eyes of sanitizers and valgrind


def driver(folder: Path, *flags: str) -> Path:
    """The kernel and `native_driver.cpp` as a program; skips where the compiler lacks what the flags ask for."""
    target = folder / "driver"
    command = [build.compiler(), "-std=c++17", "-g", *flags, f'-DSOURCE="{build.SOURCE}"']
    command += [str(Path(__file__).with_name("native_driver.cpp")), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "cannot find -l" in done.stderr:
        pytest.skip("no sanitizers here")
    assert done.returncode == 0, done.stderr[-3000:]
    return target


@pytest.mark.slow
@pytest.mark.parametrize("target", ["native", "x86-64-v3", "x86-64"])
def test_sanitizers_find_nothing(tmp_path: Path, target: str) -> None:
    """Reads and writes beside a buffer, leaks, undefined behavior: in all kinds of calls, on every width of vectors."""
    if platform.machine() != "x86_64" and target != "native":
        pytest.skip("no x86 here")
    flags = ("-O1", f"-march={target}", "-fopenmp", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    done = subprocess.run([driver(tmp_path, *flags), "3"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[:3000]
    assert done.stdout == "1280 calls, 0 with numbers that are not finite\n"


@pytest.mark.slow
def test_valgrind_finds_nothing(tmp_path: Path) -> None:
    """Also what is used before it was written. Valgrind knows no AVX-512, and takes long: every 7th call."""
    if shutil.which("valgrind") is None or platform.machine() != "x86_64":
        pytest.skip("no valgrind here")
    program = driver(tmp_path, "-O2", "-march=x86-64-v3")
    command = ["valgrind", "--error-exitcode=9", "--leak-check=full", "--show-leak-kinds=all", str(program), "1", "7"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "183 calls, 0 with numbers that are not finite\n"
    assert "ERROR SUMMARY: 0 errors" in done.stderr and "no leaks are possible" in done.stderr, done.stderr[-3000:]


# Building


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Nothing built or loaded yet, and an empty cache."""
    monkeypatch.setenv("LOCANT_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "_loaded", [])
    native._load.cache_clear()
    yield tmp_path
    native._load.cache_clear()


def test_without_a_compiler_one_warning_says_so(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    with pytest.warns(RuntimeWarning, match="no-such-compiler"):
        assert "no C++ compiler" in (native.refuses(call()) or "")
    assert "no C++ compiler" in (native.refuses(call()) or "")  # and no second warning
    with pytest.raises(RuntimeError, match="no-such-compiler"):
        native.run(call())


def test_a_compiler_that_fails_is_named(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = fresh / "broken-compiler"
    broken.write_text("#!/bin/sh\necho 'out of luck' >&2\nexit 3\n")
    broken.chmod(broken.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.warns(RuntimeWarning, match="out of luck"):
        assert "broken-compiler" in (native.refuses(call()) or "")
    assert not list((fresh / "native").glob("*.so"))


def test_flags_that_a_compiler_does_not_know_are_left_out(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picky = fresh / "picky-compiler"
    script = 'case "$*" in *-march=native*|*-fopenmp*) echo unknown >&2; exit 1;; *) touch "$7";; esac'
    picky.write_text(f"#!/bin/sh\n{script}\n")
    picky.chmod(picky.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("CXX", str(picky))
    assert build.build().exists()


def test_an_unwritable_cache_is_a_reason(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh / "file").touch()
    monkeypatch.setenv("LOCANT_CACHE", str(fresh / "file"))
    with pytest.raises(build.Unavailable, match=str(fresh / "file")):
        build.build()


def test_a_library_that_is_none_is_a_reason(fresh: Path) -> None:
    (fresh / "bad.so").write_text("nothing")
    with pytest.raises(build.Unavailable, match=r"bad\.so"):
        build.load(fresh / "bad.so")


def test_a_kernel_that_computes_wrong_is_switched_off(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCANT_CACHE")  # the library that the other tests use
    monkeypatch.setattr(build, "checked", lambda library: fresh / "checked")
    right = native.blocked.run
    monkeypatch.setattr(native.blocked, "run", lambda call: right(call) * 1.01)
    with pytest.warns(RuntimeWarning, match="differ from the backend 'blocked' by 0.0"):
        assert "differ" in (native.refuses(call()) or "")
    assert not (fresh / "checked").exists()


def test_a_library_is_checked_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCANT_CACHE")
    monkeypatch.setattr(build, "checked", lambda library: fresh / "checked")
    assert native.refuses(call()) is None
    assert (fresh / "checked").exists()
    native._load.cache_clear()
    monkeypatch.setattr(native, "self_check", lambda: 1.0)
    assert native.refuses(call()) is None


def test_a_library_of_another_version_is_not_used(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCANT_CACHE")
    monkeypatch.setattr(native, "Arguments", native.ctypes.c_int64)
    with pytest.warns(RuntimeWarning, match=r"attention-\w+\.so was built from another version"):
        assert "another version" in (native.refuses(call()) or "")


def test_the_key_of_the_library_knows_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = build.compiler()
    before = build.library_path(command)
    changed = tmp_path / "attention.cpp"
    changed.write_text(build.SOURCE.read_text() + "\n")
    monkeypatch.setattr(build, "SOURCE", changed)
    assert build.library_path(command) != before


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("-mno-avx512f", "-mavx2"), ("-mno-avx",)], ids=["avx2", "portable"])
def test_narrower_vectors_compute_the_same(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, *flags))
    assert not isinstance(native._load(), str)
    assert native.library().locant_lanes() == (8 if "-mavx2" in flags else 4)
    for terms in TERMS.values():
        check(qkv(70, 203), terms(70, 203), {"mask": torch.rand(B, 1, 1, 203) > 0.3})


@pytest.mark.slow
def test_many_shapes_leak_no_memory() -> None:
    code = """
import resource, torch
from locant.attention import attention
from locant.terms import Clip, RelativeQuery
for turn in range(400):
    n = 1 + turn % 200
    table = torch.randn(1, 9, 16, requires_grad=True)
    q = torch.randn(1, 2, n, 16, requires_grad=True)
    attention(q, q, q, (RelativeQuery(table, Clip(4)),), backend="native").sum().backward()
    if turn == 199:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20_000  # kilobytes


# The command


def locant_native(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["native", *arguments])
    return done.exit_code, done.output


def test_the_command_builds_shows_and_clears(fresh: Path) -> None:
    try:
        build.compiler()
    except build.Unavailable:
        pytest.skip("no C++ compiler here")
    assert "not built" in locant_native()[1]
    code, output = locant_native("--build", "--json")
    facts = json.loads(output)
    assert code == 0 and facts["state"] == "ready"
    assert Path(facts["library"]).parent == fresh / "native" and facts["bytes"] == Path(facts["library"]).stat().st_size
    build.checked(Path(facts["library"])).unlink()
    assert "not checked" in locant_native("--info")[1]
    assert "removed 1 files" in locant_native("--clear")[1]
    assert "not built" in locant_native()[1] and not list((fresh / "native").glob("attention-*"))


def test_the_command_fails_where_it_cannot_build(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    monkeypatch.delenv("CXX", raising=False)
    code, output = locant_native("--build")
    assert code == 1 and "no-such-compiler" in output
    code, output = locant_native("--build", "--clear")
    assert code == 2 and "--build and --clear were both given" in output
