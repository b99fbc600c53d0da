"""Graphs that have no encoding, or only a part of it, and the masks of the graph transformer."""

from __future__ import annotations

import math

import networkx as nx
import numpy as np
import pytest
import torch

import locant
from locant import graphs
from locant.graphs.distances import PUBLIC_UNREACHABLE, adjacency_matrix
from locant.graphs.pairs import MIN_WIDTH
from locant.terms import PairBias, WeightScale
from tests.unchecked import unchecked


def apart() -> nx.Graph:
    return nx.disjoint_union(nx.path_graph(3), nx.cycle_graph(4))


def encoder(**options) -> graphs.PairEncoder:
    torch.manual_seed(0)
    return graphs.PairEncoder(1, 3, 5, **options)


def test_directed_graphs_are_refused():
    with pytest.raises(ValueError, match=r"a directed graph of 3 nodes came.*to_undirected"):
        graphs.resistance(nx.path_graph(3, create_using=nx.DiGraph))
    with pytest.raises(ValueError, match=r"directed: 1 pairs differ from their mirror image"):
        graphs.shortest_path(np.array([[0.0, 1.0], [0.0, 0.0]]))


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (np.zeros((2, 3)), r"shape \(2, 3\); give a square matrix"),
        (np.zeros((0, 0)), r"shape \(0, 0\); give a square matrix of 1 node"),
        (-np.ones((2, 2)), r"weights reach from -1\.0 to -1\.0"),
        (np.full((2, 2), math.nan), r"weights reach from nan"),
        (np.eye(2), r"node 0 is its own neighbor"),
    ],
)
def test_matrices_that_are_no_graph_are_refused(matrix, message):
    with pytest.raises(ValueError, match=message):
        adjacency_matrix(matrix)


def test_what_is_no_graph_is_named():
    with pytest.raises(TypeError, match="list is no graph"):
        graphs.adjacency([[0, 1], [1, 0]])


def test_pairs_without_a_path_are_infinite_and_the_rest_is_as_in_each_component():
    for name in ("shortest_path", "resistance", "diffusion"):
        pairs = graphs.pair_encoding(apart(), name)[..., 0]
        assert torch.isinf(pairs[:3, 3:]).all() and torch.isfinite(pairs[3:, 3:]).all()
        alone = graphs.pair_encoding(nx.cycle_graph(4), name)[..., 0]
        torch.testing.assert_close(pairs[3:, 3:], alone, atol=1e-9, rtol=0)
    assert (graphs.pseudoinverse(apart())[:3, 3:].abs() < 1e-9).all()
    assert graphs.resistance(apart(), PUBLIC_UNREACHABLE)[0, 5] == 512


def test_resistances_of_a_disconnected_graph_have_no_one_pseudoinverse():
    with pytest.raises(ValueError, match="24 pairs have no finite resistance"):
        graphs.resistance_to_pseudoinverse(graphs.resistance(apart()))


def test_more_eigenvectors_than_nodes_are_refused_and_padding_is_offered():
    with pytest.raises(ValueError, match=r"5 eigenvectors were asked for, but a graph of 4 nodes has 1 to 4"):
        graphs.laplacian_eigenvectors(nx.cycle_graph(4), 5)
    _, vectors = graphs.laplacian_eigenvectors(nx.cycle_graph(4), 3)
    assert graphs.pad_columns(vectors, 5)[:, 3:].eq(0).all()
    with pytest.raises(ValueError, match="3 columns do not fit into 2"):
        graphs.pad_columns(vectors, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: graphs.random_walk(nx.cycle_graph(4), 0), "steps = 0"),
        (lambda: graphs.heat_kernel(nx.cycle_graph(4), ()), r"times = \(\)"),
        (lambda: graphs.diffusion(nx.cycle_graph(4), 0.0), "time = 0.0"),
        (lambda: graphs.powers(torch.eye(2), 0), "count = 0"),
        (lambda: graphs.pair_encoding(nx.cycle_graph(4), "hops"), "unknown pair encoding 'hops'"),
        (lambda: graphs.refine([torch.zeros(3, 3)], [[0, 0]]), r"\[2\] labels for graphs of \[3\] nodes"),
        (lambda: graphs.PairEncoder(0, 3), "num_encodings=0"),
        (lambda: encoder()(torch.zeros(1, 4, 4, 2)), "psi has 2 numbers for a pair but it was built for 1"),
        (lambda: encoder().fit(torch.zeros(1, 4, 4, 3), torch.ones(1, 4, dtype=torch.bool)), "psi has 3 numbers"),
        (lambda: encoder().fit(torch.zeros(1, 4, 4, 1), torch.zeros(1, 4, dtype=torch.bool)), "none of 0 nodes has a"),
        (lambda: graphs.stack_pairs([]), "0 graphs came"),
        (lambda: graphs.stack_pairs([torch.zeros(3, 2, 1)]), r"an encoding of shape \(3, 2, 1\) came"),
        (lambda: graphs.stack_pairs([torch.zeros(0, 0)]), r"an encoding of shape \(0, 0, 1\) came"),
        (
            lambda: graphs.stack_pairs([torch.zeros(3, 3, 2), torch.zeros(2, 2)]),
            r"\(2, 2, 1\) came beside .*\(3, 3, 2\)",
        ),
        (lambda: graphs.refine([]), "refine: 0 graphs came"),
        (lambda: unchecked(graphs.refine)(torch.zeros(2, 2, 1)), r"refine: one tensor \(2, 2, 1\) came, .* give \[psi"),
        (lambda: graphs.heat_kernel(nx.cycle_graph(4), (1.0, math.nan)), r"times = \(1\.0, nan\)"),
        (lambda: graphs.resistance(nx.Graph([(0, 1, {"weight": 1e-17}), (1, 2)])), "no eigenvalue beside 2"),
        (lambda: graphs.laplacian_eigenvectors(nx.empty_graph(1), 2), "a graph of 1 nodes has 1 to 1"),
        (lambda: graphs.GraphModelConfig(1, 2, num_heads=3), "num_heads=3 does not divide model_dim=16"),
    ],
)
def test_values_out_of_range_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_weights_are_conductances_however_small_or_large():
    for weight in (1e-9, 1.0, 1e12):
        graph = nx.Graph([(0, 1, {"weight": weight}), (1, 2, {"weight": 2 * weight})])
        expected = torch.tensor([[0, 1, 1.5], [1, 0, 0.5], [1.5, 0.5, 0]], dtype=torch.float64)
        torch.testing.assert_close(graphs.resistance(graph) * weight, expected, atol=1e-9, rtol=0)
        assert torch.equal(graphs.shortest_path(graph), graphs.shortest_path(nx.path_graph(3)))
    mixed = nx.Graph([(0, 1, {"weight": 1e-6}), (1, 2)])
    assert graphs.resistance(mixed)[0, 2].item() == pytest.approx(1e6 + 1, rel=1e-8)


def test_parallel_edges_add_up_and_a_graph_of_one_node_has_every_encoding():
    multi = nx.MultiGraph([(0, 1), (0, 1), (1, 2)])
    assert graphs.resistance(multi)[0].tolist() == pytest.approx([0, 0.5, 1.5])
    one = nx.empty_graph(1)
    for name in graphs.PAIRS:
        assert graphs.pair_encoding(one, name).abs().sum() == 0
    assert graphs.random_walk(one, 2).tolist() == [[0, 0]] and graphs.heat_kernel(one, (1.0,)).tolist() == [[0]]
    psi, real = graphs.stack_pairs([graphs.resistance(one)])
    assert model()(torch.ones(1, 1, 2), psi, real).isfinite().all()


def test_as_many_eigenvalues_are_zero_as_there_are_components():
    for count in (1, 2, 5):
        values, _ = graphs.spectrum(nx.disjoint_union_all([nx.cycle_graph(7)] * count))
        assert int((values == 0).sum()) == count


def test_pairs_without_a_path_do_not_spread_to_nodes():
    psi = graphs.pair_encoding(apart(), "resistance")[None]
    to_nodes = graphs.PairToNode(1, 4, 2).double()
    with pytest.raises(ValueError, match="24 pairs are not finite"):
        to_nodes(psi)
    assert to_nodes(graphs.resistance(apart(), PUBLIC_UNREACHABLE)[None, ..., None]).isfinite().all()


def test_nodes_without_edges_never_return():
    graph = nx.Graph([(0, 1)])
    graph.add_node(2)
    assert graphs.random_walk(graph, 3)[2].eq(0).all()


def test_signs_are_drawn_by_the_generator_that_is_given():
    _, vectors = graphs.spectrum(nx.path_graph(7))
    first, again, other = (graphs.flip_signs(vectors, torch.Generator().manual_seed(s)) for s in (1, 1, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(first.abs(), vectors.abs())


# Learned functions of pairs


def test_unreachable_pairs_have_a_learned_number_of_their_own():
    psi = graphs.pair_encoding(apart(), "resistance").float()[None]
    ours = encoder()
    assert ours.unreachable is not None
    torch.nn.init.constant_(ours.unreachable, 7.0)
    bias = ours(psi)
    assert bias[0, :, :3, 3:].eq(7).all() and not bias[0, :, :3, :3].eq(7).any()
    bias.sum().backward()
    assert ours.unreachable.grad is not None and ours.unreachable.grad.eq(24).all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in ours.parameters())


def test_in_compat_mode_512_goes_through_the_network():
    psi = graphs.pair_encoding(apart(), "resistance").float()[None]
    public = encoder(compat_black2024=True)
    torch.testing.assert_close(public(psi), public(psi.nan_to_num(posinf=512.0)))
    assert public.unreachable is None and not public(psi)[0, :, 0, 5].eq(0).any()


def test_parameters_are_as_many_as_stated():
    assert sum(p.numel() for p in graphs.PairEncoder(2, 3, 5, 4).parameters()) == 2 * 2 * 4 + 8 * 5 + 5 + 5 * 3 + 3 + 3
    assert sum(p.numel() for p in graphs.Ign2To2(3, 5).parameters()) == 15 * 3 * 5 + 2 * 5
    assert sum(p.numel() for p in graphs.Ign2To1(3, 5).parameters()) == 5 * 3 * 5 + 5


@pytest.mark.parametrize("kernels", [0, 5])
def test_an_encoder_starts_in_the_units_of_real_finite_pairs(kernels: int):
    found = [
        torch.stack((graphs.resistance(g), graphs.resistance(g) * 100 + 7), -1) for g in (apart(), nx.star_graph(4))
    ]
    psi, real = graphs.stack_pairs(found)
    fitted = torch.cat([p[p.isfinite().all(-1)] for p in (psi[0], psi[1, :5, :5])])
    torch.manual_seed(0)
    ours = graphs.PairEncoder(2, 3, 5, kernels)
    first = ours.inner[0]
    before = [p.detach().clone() for p in first.parameters()]
    ours.fit(psi, real)
    if ours.kernels is None:  # as if the untouched layer read standardized numbers
        standard = (fitted - fitted.mean(0)) / fitted.std(0, correction=0)
        torch.testing.assert_close(first(fitted), torch.nn.functional.linear(standard, *before), atol=1e-4, rtol=1e-4)
        return
    low, high = fitted.amin(0), fitted.amax(0)
    torch.testing.assert_close(ours.kernels.mean[:, [0, -1]], torch.stack((low, high), 1))
    torch.testing.assert_close(ours.kernels.width + MIN_WIDTH, ((high - low) / 4)[:, None].expand(2, 5))
    peaks = torch.stack([ours.kernels(mean)[[0, 1], index] for index, mean in enumerate(ours.kernels.mean.T)], 1)
    torch.testing.assert_close(first.weight * peaks.flatten(), before[0])


@pytest.mark.parametrize("kernels", [0, 5])
def test_the_unit_of_an_encoding_does_not_matter_once_fitted(kernels: int):
    psi, real = graphs.stack_pairs([graphs.resistance(nx.star_graph(4)), graphs.resistance(apart())])
    first, second = encoder(num_kernels=kernels), encoder(num_kernels=kernels)
    assert not torch.allclose(first(psi), second(7 * psi), atol=1e-2)
    first.fit(psi, real)
    second.fit(7 * psi, real)
    torch.testing.assert_close(first(psi), second(7 * psi), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernels", [0, 1, 3])
def test_an_encoding_that_is_one_number_everywhere_can_be_fitted(kernels: int):
    ours = encoder(num_kernels=kernels)
    ours.fit(torch.zeros(1, 1, 1, 1), torch.ones(1, 1, dtype=torch.bool))
    assert ours(torch.zeros(1, 1, 1, 1)).isfinite().all()


def test_a_graph_bias_fits_both_of_its_networks_and_computes_them_once():
    psi, real = graphs.stack_pairs([graphs.pair_encoding(nx.path_graph(6), "resistance")])
    bias = graphs.GraphBias(3, num_kernels=4, multiply=True)
    bias.fit(psi, real)
    for one in (bias.add, bias.multiply):
        assert one is not None and one.kernels is not None and one.kernels.mean[0, -1].item() == pytest.approx(5)
    q = torch.zeros(1, 3, 6, 8)
    positions = bias.prepare(graphs.graph_positions(psi, real))
    first, second = (bias.terms(positions, locant.Layer(q, q)) for _ in range(2))
    alone = bias.terms(graphs.graph_positions(psi, real), locant.Layer(q, q))
    for one, other, own in zip(first, second, alone, strict=True):
        values = [vars(term)["bias" if isinstance(term, PairBias) else "scale"] for term in (one, other, own)]
        assert values[0] is values[1] and torch.equal(values[0], values[2])


def test_a_graph_bias_is_an_encoding_with_terms():
    torch.manual_seed(0)
    encoding = graphs.GraphBias(num_heads=3, multiply=True)
    psi, real = graphs.stack_pairs([graphs.pair_encoding(nx.cycle_graph(5), "resistance")])
    positions = graphs.graph_positions(psi, real)
    q = torch.randn(1, 3, 5, 8)
    terms = encoding.terms(positions, locant.Layer(q, q))
    assert [type(term) for term in terms] == [PairBias, WeightScale]
    plain = locant.attention(q, q, q)
    assert not torch.allclose(locant.attention(q, q, q, terms, positions), plain, atol=1e-3)
    encoding.neutralize()
    terms = encoding.terms(positions, locant.Layer(q, q))
    torch.testing.assert_close(locant.attention(q, q, q, terms, positions), plain)


def test_a_graph_bias_without_a_graph_says_so():
    q = torch.zeros(1, 3, 4, 8)
    with pytest.raises(ValueError, match="positions bring no pairs, needed 'graph'"):
        graphs.GraphBias(num_heads=3).terms(locant.Positions.arange(4), locant.Layer(q, q))


# Masks


def model(**options) -> graphs.GraphTransformer:
    torch.manual_seed(0)
    return graphs.GraphTransformer(graphs.GraphModelConfig(2, 3, multiply=True, **options)).eval()


def batch(sizes: tuple[int, ...]):
    psi, real = graphs.stack_pairs([graphs.pair_encoding(nx.cycle_graph(n), "resistance") for n in sizes])
    torch.manual_seed(1)
    return torch.randn(len(sizes), max(sizes), 2), psi, real


def test_padding_changes_no_graph():
    features, psi, real = batch((4, 7))
    with torch.no_grad():
        together, alone = model()(features, psi, real), model()(features[:1, :4], psi[:1, :4, :4], real[:1, :4])
    torch.testing.assert_close(together[:1], alone, atol=1e-6, rtol=1e-5)


def test_in_compat_mode_padding_changes_graphs_and_scores_do_not_count():
    features, psi, real = batch((4, 7))
    public = model(compat_black2024=True)
    with torch.no_grad():
        together, alone = public(features, psi, real), public(features[:1, :4], psi[:1, :4, :4], real[:1, :4])
    assert (together[:1] - alone).abs().max() > 1e-4
    layer = public.attention[0]
    with torch.no_grad():
        x = public.embed(features[1:])
        graph = public.bias, graphs.graph_positions(psi[1:], real[1:])
        before = layer(x, real[1:], *graph)
        torch.nn.init.normal_(layer.query.weight, std=5.0)
        after = layer(x, real[1:], *graph)
    torch.testing.assert_close(after, before)  # attention is purely positional


def test_a_model_without_its_pairs_says_so():
    features, _, real = batch((4,))
    with pytest.raises(ValueError, match="built for num_encodings=1 but psi is None"):
        model()(features, None, real)
    features, psi, real = batch((4, 7))
    with pytest.raises(ValueError, match=r"shape \(2, 6, 2\) came with real nodes \(2, 7\) and pairs \(2, 7, 7, 1\)"):
        model()(features[:, :6], psi, real)
    with pytest.raises(ValueError, match=r"pairs \(2, 6, 6, 1\)"):
        model()(features, psi[:, :6, :6], real)
    features, _, real = batch((4,))
    plain = graphs.GraphTransformer(graphs.without_positions(graphs.GraphModelConfig(2, 3)))
    assert plain(features, None, real).shape == (1, 3)
    with pytest.raises(ValueError, match=r"num_encodings=0 but psi of shape \(1, 4, 4, 1\) came; give None"):
        plain(features, torch.zeros(1, 4, 4, 1), real)
