"""What is proven about encodings of graphs, exactly: Black et al. 2024, and the mathematics they stand on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import Tensor

import locant
from locant import graphs
from locant.graphs import distances, nodes
from locant.graphs.convert import Ign2To2
from locant.terms import Distance, Operands, PairBias, RelativeBias

TOLERANCE = {"atol": 1e-9, "rtol": 0}
NODES = {
    "random_walk": lambda graph: graphs.random_walk(graph, 5),
    "heat_kernel": lambda graph: graphs.heat_kernel(graph, (0.5, 2.0)),
}


def random_graph(seed: int, n: int = 9) -> nx.Graph:
    """A connected graph that is no tree."""
    for attempt in range(seed * 1000, seed * 1000 + 1000):
        graph = nx.gnp_random_graph(n, 0.35, seed=attempt)
        if nx.is_connected(graph) and graph.number_of_edges() > n:
            return graph
    raise AssertionError("no such graph")


def permuted(graph: nx.Graph, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The adjacency with nodes in another order, and that order."""
    order = np.random.default_rng(seed).permutation(len(graph))
    return nx.to_numpy_array(graph)[np.ix_(order, order)], order


def csl() -> list[nx.Graph]:
    return [nx.circulant_graph(41, [1, skip]) for skip in (2, 3, 4, 5, 6, 9, 11, 12, 13, 16)]


def test_resistance_separates_all_skip_graphs_and_paths_all_but_two():
    assert graphs.classes(csl(), "resistance") == [[i] for i in range(10)]
    assert graphs.classes(csl(), "shortest_path") == [[0], [1], [2], [3], [4, 9], [5], [6], [7], [8]]
    assert graphs.classes(csl(), "adjacency") == [list(range(10))]


def two_triangles() -> nx.Graph:
    return nx.disjoint_union(nx.cycle_graph(3), nx.cycle_graph(3))


def decalin() -> nx.Graph:
    return nx.Graph([*nx.cycle_graph(10).edges, (0, 5)])


def bicyclopentyl() -> nx.Graph:
    graph = nx.disjoint_union(nx.cycle_graph(5), nx.cycle_graph(5))
    graph.add_edge(0, 5)
    return graph


def desargues_and_dodecahedron() -> tuple[nx.Graph, nx.Graph]:
    return nx.desargues_graph(), nx.dodecahedral_graph()


# 1. Permutations


@pytest.mark.parametrize("name", graphs.PAIRS)
@pytest.mark.parametrize("seed", [1, 2])
def test_pair_encodings_move_with_the_nodes(name: str, seed: int):
    graph = random_graph(seed)
    matrix, order = permuted(graph, seed)
    torch.testing.assert_close(
        graphs.pair_encoding(matrix, name), graphs.pair_encoding(graph, name)[order][:, order], **TOLERANCE
    )


@pytest.mark.parametrize("name", NODES)
def test_node_encodings_move_with_the_nodes(name: str):
    graph = random_graph(3)
    matrix, order = permuted(graph, 3)
    torch.testing.assert_close(NODES[name](matrix), NODES[name](graph)[order], **TOLERANCE)


def test_equivariant_layers_move_with_the_nodes():
    torch.manual_seed(0)
    x, order = torch.randn(2, 3, 7, 7, dtype=torch.float64), torch.randperm(7)
    layer, to_nodes = Ign2To2(3, 5).double(), graphs.Ign2To1(3, 5).double()
    moved = x[..., order, :][..., order]
    torch.testing.assert_close(layer(moved), layer(x)[..., order, :][..., order], **TOLERANCE)
    torch.testing.assert_close(to_nodes(moved), to_nodes(x)[..., order], **TOLERANCE)


def test_a_graph_transformer_reads_a_graph_whatever_the_order_of_its_nodes():
    graph = random_graph(4)
    matrix, _ = permuted(graph, 4)
    model = transformer(num_kernels=5, multiply=True)
    out = [run(model, [graphs.pair_encoding(one, "resistance")]) for one in (graph, matrix)]
    torch.testing.assert_close(out[0], out[1], **TOLERANCE)


# 2. Signs and rotations of eigenvectors


def turned(values: Tensor, vectors: Tensor, seed: int = 0) -> Tensor:
    """Eigenvectors rotated within equal eigenvalues, which may negate them."""
    torch.manual_seed(seed)
    out, start = vectors.clone(), 0
    while start < len(values):
        end = start + int((values[start:] - values[start] < 1e-8).sum())
        rotation, _ = torch.linalg.qr(torch.randn(end - start, end - start, dtype=vectors.dtype))
        out[:, start:end] = vectors[:, start:end] @ rotation
        start = end
    return out


def test_stable_encoding_is_unchanged_by_the_choice_of_eigenvectors():
    values, vectors = graphs.spectrum(nx.cycle_graph(6))
    other = turned(values, vectors)
    assert (other - vectors).abs().max() > 0.1 and (other @ torch.diag(values) @ other.T).allclose(
        graphs.laplacian(nx.cycle_graph(6))
    )
    torch.manual_seed(1)
    encoding = graphs.StableEncoding(7, 3).double()
    torch.testing.assert_close(encoding(values, other), encoding(values, vectors), **TOLERANCE)


SPECTRAL = ("resistance", "diffusion", "pseudoinverse", "pseudoinverse_powers")


def test_encodings_are_unchanged_by_the_choice_of_eigenvectors(monkeypatch: pytest.MonkeyPatch):
    graph = nx.cycle_graph(8)

    def encode() -> list[Tensor]:
        return [graphs.pair_encoding(graph, name) for name in SPECTRAL] + [graphs.heat_kernel(graph, (0.5, 2.0))]

    before, chosen = encode(), graphs.spectrum(graph)
    other = turned(*chosen)
    assert (other - chosen[1]).abs().max() > 0.1  # raw eigenvectors do change
    for module in (distances, nodes):
        monkeypatch.setattr(module, "spectrum", lambda _: (chosen[0], other))
    for one, now in zip(before, encode(), strict=True):
        torch.testing.assert_close(now, one, **TOLERANCE)


def test_networks_on_eigenvectors_move_with_the_nodes():
    values, vectors = graphs.spectrum(random_graph(5))
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    stable, sign = graphs.StableEncoding(5, 3).double(), graphs.SignInvariant(5, 3).double()
    torch.testing.assert_close(stable(values, vectors[order]), stable(values, vectors)[order][:, order], **TOLERANCE)
    torch.testing.assert_close(sign(vectors[order]), sign(vectors)[order], **TOLERANCE)


def test_sign_invariant_features_ignore_the_sign_and_nothing_else():
    _, vectors = graphs.spectrum(random_graph(5))
    torch.manual_seed(2)
    encoding = graphs.SignInvariant(5, 3).double()
    signs = torch.tensor([1.0, -1.0] * 4 + [1.0])
    torch.testing.assert_close(encoding(vectors * signs), encoding(vectors), **TOLERANCE)
    assert not torch.allclose(encoding(vectors * 2), encoding(vectors))
    cycle_values, cycle = graphs.spectrum(nx.cycle_graph(6))
    assert not torch.allclose(encoding(turned(cycle_values, cycle)), encoding(cycle))


def test_stable_encoding_is_unchanged_by_what_a_batch_pads():
    values, vectors = graphs.spectrum(random_graph(6, n=7))
    torch.manual_seed(3)
    encoding = graphs.StableEncoding(5, 2).double()
    padded = torch.nn.functional.pad(values, (0, 2)), torch.nn.functional.pad(vectors, (0, 2, 0, 2))
    mask = torch.arange(9) < 7
    torch.testing.assert_close(encoding(*padded, mask)[:7, :7], encoding(values, vectors), **TOLERANCE)


# 3. Resistance and pseudo-inverse


@pytest.mark.parametrize("seed", range(1, 5))
def test_resistance_and_pseudoinverse_hold_the_same(seed: int):
    graph = random_graph(seed, n=11)
    inverse = graphs.pseudoinverse(graph)
    torch.testing.assert_close(graphs.resistance_to_pseudoinverse(graphs.resistance(graph)), inverse, **TOLERANCE)
    expected = torch.linalg.pinv(graphs.laplacian(graph))
    torch.testing.assert_close(inverse, expected, **TOLERANCE)


# 4. Foster, bridges, metrics, commute times


@pytest.mark.parametrize("graph", [random_graph(7), two_triangles(), nx.balanced_tree(2, 2), bicyclopentyl()])
def test_resistances_of_edges_add_up_to_nodes_minus_components(graph: nx.Graph):
    pairs = graphs.resistance(graph)
    total = sum(float(pairs[u, v]) for u, v in graph.edges)
    assert total == pytest.approx(len(graph) - nx.number_connected_components(graph), abs=1e-9)


@pytest.mark.parametrize("seed", range(1, 5))
def test_resistance_is_a_metric_below_the_shortest_path(seed: int):
    graph = nx.Graph([*random_graph(seed).edges, (0, 9), (9, 10)])  # with two bridges
    pairs, hops = graphs.resistance(graph), graphs.shortest_path(graph)
    assert (pairs <= hops + 1e-9).all()
    for distance in (pairs, pairs.clamp(min=0).sqrt()):
        assert (distance[:, None, :] <= distance[:, :, None] + distance[None].movedim(0, 0) + 1e-9).all()
    bridges = {frozenset(edge) for edge in nx.bridges(graph)}
    nodes = list(graph)
    for u, v in graph.edges:
        is_one = abs(float(pairs[nodes.index(u), nodes.index(v)]) - 1) < 1e-9
        assert is_one == (frozenset((u, v)) in bridges)


def test_on_a_tree_resistance_is_the_shortest_path():
    tree = nx.random_labeled_tree(11, seed=3)
    torch.testing.assert_close(graphs.resistance(tree), graphs.shortest_path(tree), **TOLERANCE)


def test_commute_time_is_resistance_times_twice_the_edges():
    graph = random_graph(8)
    matrix = torch.from_numpy(nx.to_numpy_array(graph))
    walk = matrix / matrix.sum(1, keepdim=True)
    n = len(graph)
    hitting = torch.zeros(n, n, dtype=torch.float64)
    for target in range(n):
        rest = [v for v in range(n) if v != target]
        system = torch.eye(n - 1, dtype=torch.float64) - walk[rest][:, rest]
        hitting[rest, target] = torch.linalg.solve(system, torch.ones(n - 1, dtype=torch.float64))
    expected = 2 * graph.number_of_edges() * graphs.resistance(graph)
    torch.testing.assert_close(hitting + hitting.T, expected, **TOLERANCE)


# 5. Refinement bounds every graph transformer


def transformer(num_encodings: int = 1, seed: int = 0, **options: Any) -> graphs.GraphTransformer:
    torch.manual_seed(seed)
    return graphs.GraphTransformer(graphs.GraphModelConfig(1, 3, num_encodings, **options)).eval()


def run(model: graphs.GraphTransformer, pairs: list[Tensor]) -> Tensor:
    psi, real = graphs.stack_pairs(pairs, torch.float64)
    with torch.no_grad():
        return model.double()(torch.ones(*real.shape, 1, dtype=torch.float64), psi, real)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["adjacency", "shortest_path", "resistance", "pseudoinverse"])
def test_graphs_that_refinement_cannot_tell_apart_get_equal_outputs(name: str, seed: int):
    pairs = [(csl()[4], csl()[9]), (nx.cycle_graph(6), two_triangles()), desargues_and_dodecahedron()]
    model = transformer(seed=seed, num_kernels=4, multiply=True)
    for first, second in pairs:
        out = run(model, [graphs.pair_encoding(graph, name) for graph in (first, second)])
        if not graphs.separates(first, second, name):
            torch.testing.assert_close(out[0], out[1], **TOLERANCE)
        elif name == "resistance":
            assert (out[0] - out[1]).abs().max() > 1e-6


def test_a_bias_alone_cannot_tell_graphs_apart_whose_nodes_all_look_alike():
    pairs = [graphs.pair_encoding(graph, "resistance") for graph in (nx.cycle_graph(6), two_triangles())]
    out = run(transformer(num_kernels=4), pairs)  # a weighted mean of equal values is that value
    torch.testing.assert_close(out[0], out[1], **TOLERANCE)


# 6 and 7. Nodes to pairs and back


@pytest.mark.parametrize("seed", range(1, 4))
def test_pairs_made_of_nodes_separate_what_the_multisets_of_nodes_do(seed: int):
    matrix, _ = permuted(random_graph(seed), seed)
    others = [random_graph(seed + 10), matrix]
    for other in others:
        nodes = [graphs.random_walk(one, 4) for one in (random_graph(seed), other)]
        multisets = [Counter(map(tuple, one.round(decimals=8).tolist())) for one in nodes]
        first, second = graphs.refine([graphs.symmetric_pairs(one) for one in nodes], gap=1e-7)
        assert (first != second) == (multisets[0] != multisets[1])


def test_symmetric_pairs_tell_unordered_pairs_apart():
    a, b, c, d = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    crossed = [graphs.symmetric_pairs(torch.stack(one))[0, 1] for one in ((a, b), (c, d), (b, a))]
    assert not torch.equal(crossed[0], crossed[1]) and torch.equal(crossed[0], crossed[2])


@pytest.mark.parametrize("name", ["shortest_path", "resistance"])
def test_nodes_made_of_pairs_never_separate_more_than_the_pairs(name: str):
    torch.manual_seed(0)
    to_nodes = graphs.PairToNode(1, 5, 3).double()
    first, second = nx.line_graph(nx.complete_bipartite_graph(4, 4)), shrikhande()
    assert not graphs.separates(first, second, name)
    nodes = [to_nodes(graphs.pair_encoding(graph, name)[None])[0] for graph in (first, second)]
    rows = [one[one[:, 0].argsort()] for one in nodes]
    torch.testing.assert_close(rows[0], rows[1], atol=1e-7, rtol=1e-7)


def shrikhande() -> nx.Graph:
    edges = [
        ((a, b), ((a + x) % 4, (b + y) % 4)) for a in range(4) for b in range(4) for x, y in [(0, 1), (1, 0), (1, 1)]
    ]
    return nx.convert_node_labels_to_integers(nx.Graph(edges))


# 8 and 9. What is told apart


@pytest.mark.parametrize("name", ["shortest_path", "resistance"])
def test_both_distances_tell_apart_all_that_one_wl_does(name: str):
    found = [random_graph(seed, n=7) for seed in range(1, 6)]
    pairs = [(a, b) for i, a in enumerate(found) for b in found[i + 1 :]]
    assert any(graphs.one_wl(a, b) for a, b in pairs)
    assert all(graphs.separates(a, b, name) for a, b in pairs if graphs.one_wl(a, b))


@pytest.mark.parametrize(
    ("first", "second", "by_paths", "by_resistance"),
    [
        (nx.cycle_graph(6), two_triangles(), True, True),
        (decalin(), bicyclopentyl(), True, True),
        (*desargues_and_dodecahedron(), False, True),
        (nx.line_graph(nx.complete_bipartite_graph(4, 4)), shrikhande(), False, False),
    ],
    ids=["cycles", "decalin", "desargues", "rook"],
)
def test_what_distances_separate_where_one_wl_fails(first, second, by_paths: bool, by_resistance: bool):
    assert not graphs.one_wl(first, second)
    assert graphs.separates(first, second, "shortest_path") == by_paths
    assert graphs.separates(first, second, "resistance") == by_resistance


def test_rounding_of_an_encoding_separates_nothing():
    edge = torch.full((2, 2), 2.0**-9, dtype=torch.float64)  # half of the eighth decimal
    noise = torch.tensor([[0.0, 1e-17], [-1e-17, 0.0]], dtype=torch.float64)
    for far in (0.0, float("inf")):
        first, second = graphs.refine([edge + far, edge + far + noise])
        assert first == second
    first, second = graphs.refine([edge, edge + 1e-7 * torch.eye(2, dtype=torch.float64)])
    assert first != second


def test_labels_of_nodes_count_in_refinement():
    pairs = [graphs.pair_encoding(nx.cycle_graph(5), "adjacency")] * 2
    same, other = graphs.refine(pairs, [[0, 0, 0, 0, 1], [0, 0, 1, 0, 0]])
    assert same == other
    same, other = graphs.refine(pairs, [[0, 0, 0, 0, 1], [0, 0, 1, 1, 0]])
    assert same != other


# The link to sequences


def bias_of(term: PairBias | RelativeBias, n: int) -> Tensor:
    q = torch.zeros(1, 3, n, 4)
    return term.apply(Operands(q, q, q, locant.Positions.arange(n), 1.0))


@pytest.mark.parametrize("name", ["shortest_path", "resistance"])
def test_on_a_path_a_graph_bias_is_the_relative_bias_of_the_distance(name: str):
    torch.manual_seed(0)
    n, table = 8, torch.randn(3, 8)
    pairs = graphs.pair_encoding(nx.path_graph(n), name)[..., 0].round().long()
    graph = bias_of(PairBias(table[:, pairs]), n)
    assert torch.equal(graph, bias_of(RelativeBias(table, Distance(7)), n))
    exact = graphs.pair_encoding(nx.path_graph(n), name)[..., 0]
    torch.testing.assert_close(exact, (torch.arange(n)[:, None] - torch.arange(n)).abs().double(), **TOLERANCE)


def test_eigenvectors_of_a_path_are_cosines():
    n = 9
    _, vectors = graphs.spectrum(nx.path_graph(n))
    for k in range(n):
        wave = torch.cos(torch.pi * k * (torch.arange(n, dtype=torch.float64) + 0.5) / n)
        assert abs(float(vectors[:, k] @ wave / wave.norm())) == pytest.approx(1, abs=1e-9)


def test_on_a_cycle_encodings_depend_on_the_distance_around_it():
    pairs = graphs.resistance(nx.cycle_graph(7))
    for row in range(7):
        torch.testing.assert_close(pairs[row].roll(-row), pairs[0], **TOLERANCE)


@pytest.mark.parametrize(("apart", "told"), [(1e-9, True), (1e-11, False)])
def test_refinement_parts_numbers_beyond_rounding_alone(apart, told):
    psi = torch.tensor([[0.0, 0.7], [0.7, 0.0]], dtype=torch.float64)
    first, second = graphs.refine([psi, psi + apart * (psi > 0)])
    assert (first != second) is told
