"""Set C, graphs: distances, node encodings, pair biases, attention, SPE and equivariant layers of the public code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from locant import attention, graphs
from locant.graphs.convert import Ign2To1, Ign2To2
from locant.graphs.distances import PUBLIC_UNREACHABLE
from locant.terms import PairBias, WeightScale
from tests.golden.cases import Case, Comparison
from tests.golden.registry import check

# IGN layers from vectors, and scalings of eigenvectors, are options of the public code that locant does not have.
NOT_OURS = ("eigvec_norm_*", "ign_1_to_*")
ATOL = 1e-5


@check("C", "graph", out_of_reach=NOT_OURS)
def graph(case: Case) -> Iterator[Comparison]:
    """Each stored case by the first words of its name."""
    kinds: dict[str, Callable[[Mapping[str, Tensor]], dict[str, Tensor]]] = {
        "graph_attention_": attend,
        "graph_": encodings,
        "rpe_bias_encoder_": pair_bias,
        "spe_": stable,
        "ign_2_to_": equivariant,
    }
    for name, tensors in case.members.items():
        kind = next((kind for kind in kinds if name.startswith(kind)), None)
        if kind is None:
            continue
        for part, actual in kinds[kind](tensors).items():
            yield Comparison(f"{name}/{part}", actual.detach().float(), tensors[part], ATOL)


def encodings(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every matrix of a graph; between components 512 stands where the public code has it."""
    matrix = torch.zeros_like(tensors["adjacency"])
    matrix[tensors["edge_index"][0], tensors["edge_index"][1]] = 1
    far = PUBLIC_UNREACHABLE
    return {
        "adjacency": graphs.adjacency(matrix),
        "shortest_path": graphs.shortest_path(matrix, far),
        "resistance": graphs.resistance(matrix, far),
        "diffusion_t0.5": graphs.diffusion(matrix, 0.5, far),
        "laplacian": graphs.laplacian(matrix),
        "pseudoinverse": graphs.pseudoinverse(matrix),
        "adjacency_powers_1_2_3": graphs.powers(graphs.adjacency(matrix), 3),
        "eigvals": graphs.spectrum(matrix)[0],
        "rwse_1_to_6": graphs.random_walk(matrix, 6),
        "heat_kernel_diag_t0.5_1_2": graphs.heat_kernel(matrix, (0.5, 1.0, 2.0)),
    }


def pair_bias(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The MLP on pair encodings, with Gaussian kernels or without."""
    names = {"mlp.layer1": "inner.0", "mlp.layer2": "inner.2"}
    state = {
        f"{ours}.{p}": tensors[f"param.{theirs}.{p}"] for theirs, ours in names.items() for p in ("weight", "bias")
    }
    kernels = 0
    if "param.gbf.means.weight" in tensors:
        state["kernels.mean"], state["kernels.width"] = (tensors[f"param.gbf.{p}.weight"] for p in ("means", "stds"))
        kernels = state["kernels.mean"].shape[1]
    rpe, heads = tensors["rpe"], tensors["bias"].shape[1]
    encoder = graphs.PairEncoder(rpe.shape[-1], heads, len(state["inner.0.bias"]), kernels, compat_black2024=True)
    encoder.load_state_dict(state)
    return {"bias": encoder(rpe)}


def attend(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Bias before the softmax, factor after it. The stored cases without either have 3 heads, too."""

    def project(name: str, x: Tensor) -> Tensor:
        return F.linear(x, tensors[f"param.{name}.weight"], tensors[f"param.{name}.bias"])

    heads = 3
    q, k, v = (project(name, tensors["x"]).unflatten(-1, (heads, -1)).transpose(1, 2) for name in "QKV")
    makers = {"add_bias": PairBias, "mult_bias": WeightScale}
    terms = tuple(make(tensors[name]) for name, make in makers.items() if name in tensors)
    out = attention(q, k, v, terms)
    assert isinstance(out, Tensor)
    return {"out": project("fc_out", out.transpose(1, 2).flatten(2))}


def stable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """V diag(phi) V^T, with the stored values of phi: the network of the public code has batch normalization."""
    encoding = graphs.StableEncoding(2, tensors["phi_of_eigvals"].shape[1])
    encoding.phi = lambda values, mask=None: tensors["phi_of_eigvals"]  # type: ignore[method-assign]
    return {"rpe": encoding(tensors["eigvals"], tensors["eigvecs"])}


def equivariant(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The layers from matrices, to matrices or to vectors."""
    coefficients = tensors["param.coeffs"]
    if "param.diag_bias" in tensors:
        layer = Ign2To2(*coefficients.shape[:2])
        state = {"bias": tensors["param.all_bias"], "diagonal_bias": tensors["param.diag_bias"]}
    else:
        layer = Ign2To1(*coefficients.shape[:2])
        state = {"bias": tensors["param.bias"]}
    layer.load_state_dict({"coefficients": coefficients, **{name: t.flatten() for name, t in state.items()}})
    return {"out": layer(tensors["x"])}
