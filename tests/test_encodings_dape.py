from __future__ import annotations

import pytest
import torch
from torch import Tensor

import locant
from locant.backends import Call, reference
from locant.positions import Positions
from locant.terms import Operands
from tests.unchecked import build

B, H, N = 2, 4, 9
PAST = torch.ones(1, 1, N, N, dtype=torch.bool).tril()


def dape(seed: int = 1, **options) -> locant.Encoding:
    torch.manual_seed(seed)
    return locant.load("dape", **{"num_heads": H, "width": 6, **options}).double()


def mapped(encoding: locant.Encoding, scores: Tensor, allowed: Tensor | None = None) -> Tensor:
    """The logits that an encoding makes of given ones."""
    positions = locant.Positions.arange(scores.shape[2], scores.shape[3])
    unit = torch.eye(scores.shape[3], dtype=scores.dtype).expand(*scores.shape[:2], -1, -1)
    terms = encoding.terms(positions, locant.Layer(scores, unit))
    return reference.logits(Call(Operands(scores, unit, unit, positions, 1.0), terms, allowed, False, 0.0, False))


def scores(seed: int = 3) -> Tensor:
    return torch.randn(B, H, N, N, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("kernel", [None, 3])
@pytest.mark.parametrize("over", ["kerple", "alibi", "fire", "t5", "sandwich"])
def test_without_its_second_map_it_is_the_static_bias(over, kernel):
    encoding = dape(over=over, kernel=kernel, causal=True)
    static, network = encoding.parts()
    assert (mapped(encoding, scores()) - mapped(static, scores())).abs().max() > 1e-2
    network.neutralize()
    torch.testing.assert_close(mapped(encoding, scores()), mapped(static, scores()))


def test_over_nothing_it_adapts_the_logits_alone():
    encoding = dape(over="none")
    assert len(encoding.parts()) == 1 and encoding.name == "dape"
    encoding.neutralize()
    torch.testing.assert_close(mapped(encoding, scores()), scores())


@pytest.mark.parametrize("over", ["kerple", "none"])
def test_a_kernel_of_one_is_the_first_version(over):
    first, second = dape(over=over), dape(over=over, kernel=1)
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(mapped(first, scores(), PAST).tril(), mapped(second, scores(), PAST).tril())


@pytest.mark.parametrize("kernel", [None, 3, 5])
def test_a_later_key_changes_nothing(kernel):
    encoding, other = dape(kernel=kernel), scores()
    other = torch.where(PAST, other, other + 5)
    torch.testing.assert_close(
        mapped(encoding, scores(), PAST).tril(), mapped(encoding, other, PAST).tril(), atol=1e-12, rtol=0
    )


def test_the_first_version_follows_permuted_keys_and_the_second_does_not():
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    for kernel, follows in ((None, True), (3, False)):
        encoding = dape(over="none", kernel=kernel)
        moved, same = mapped(encoding, scores()[..., order]), mapped(encoding, scores())[..., order]
        assert torch.allclose(moved, same, atol=1e-12) is follows


def test_heads_are_mixed():
    order = torch.tensor([1, 0, 2, 3])
    encoding = dape(over="none")
    moved, same = mapped(encoding, scores()[:, order]), mapped(encoding, scores())[:, order]
    assert (moved - same).abs().max() > 1e-2


@pytest.mark.parametrize("kernel", [3, 5])
def test_a_row_does_not_depend_on_what_follows_it_unless_it_is_cut(kernel):
    """Decoding sees row i with i + 1 keys, the full pass with all."""
    for edges, same in (("open", True), ("row", False)):
        encoding = dape(kernel=kernel, edges=edges)
        full = mapped(encoding, scores(), PAST)
        for i in range(N):
            alone = mapped(encoding, scores()[:, :, i : i + 1, : i + 1])
            equal = torch.allclose(alone, full[:, :, i : i + 1, : i + 1], atol=1e-12)
            assert equal is (same or i == N - 1), (edges, i)
        assert encoding.properties.cache_safe is same


def test_the_published_parameter_counts():
    for options, of_network in ((dict(over="alibi"), 1196), (dict(over="alibi", kernel=3), 3500)):
        encoding = locant.load("dape", num_heads=12, **options)
        assert sum(p.numel() for p in encoding.parameters()) == of_network
    assert sum(p.numel() for p in locant.load("dape", num_heads=12, over="fire").parameters()) == 1658
    assert sum(p.numel() for p in locant.load("dape", num_heads=12).parameters()) == 1196 + 24


def test_layers_have_networks_of_their_own_and_share_what_the_bias_shares():
    layers = locant.stack("dape", 3, num_heads=H, over="t5")
    assert len({id(layer.parts()[0]) for layer in layers}) == 1
    assert len({id(layer.parts()[1]) for layer in layers}) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": 2}, "kernel=2 has no middle"),
        ({"kernel": 0}, "kernel=0 has no middle"),
        ({"edges": "row"}, "edges='row' with kernel=None"),
        ({"edges": "cut", "kernel": 3}, "edges='cut' with kernel=3"),
        ({"width": 0}, "width=0 leaves no network"),
        ({"over": "shaw"}, r"dape: over='shaw' .*cannot be built \(shaw: needs head_dim=.*; choose a bias"),
        ({"over": "huang_m1"}, "over='huang_m1' is no content-free bias"),
        ({"over": "shape"}, "over='shape' is no content-free bias"),
        ({"over_options": {"clip": 3}}, "kerple: unknown option 'clip'=3"),
    ],
)
def test_what_cannot_be_built_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build("dape", num_heads=H, **options)


def test_a_network_without_its_bias_says_so():
    *_, network = dape(over="alibi").parts()
    with pytest.raises(ValueError, match=r"dape: was built over a bias, but no term gives one; .*over='none'"):
        mapped(network, scores())


@pytest.mark.parametrize(
    "name, options", [("dape", {"kernel": 3, "edges": "row"}), ("dape", {"over": "fire"}), ("fire", {})]
)
def test_what_a_cache_would_change_refuses_cached_keys(name, options):
    stack = locant.stack(name, 1, num_heads=2, head_dim=4, model_dim=8, max_length=16, causal=False, **options)
    stack.prepare(Positions.arange(7))
    with pytest.raises(ValueError, match=r"(dape|fire): 5 keys were read before, .*use_cache=False"):
        stack.prepare(Positions.arange(2, 7))
