"""No position encoding (NoPE): Haviv et al. 2022, arXiv:2203.16634; Kazemnejad et al. 2023, arXiv:2305.19466.

    e_ij = q_i . k_j / sqrt(D)

The only order signal left is the causal mask of a decoder; an encoder without positions is permutation-equivariant.
"""

from __future__ import annotations

from locant.encoding import Encoding, Paper, Properties


class NoPosition(Encoding):
    """Nothing added anywhere.

    Shapes: no parameters.     Acts on: nothing.     Neutral at: always.     Past any length: defined.     Cost: none.
    """

    name = "none"
    paper = Paper("2203.16634", "section 3", "Haviv et al. 2022")
    properties = Properties(
        shift_invariant=True, symmetric=True, beyond_range="defined", layers="shared", neutral="always"
    )

    def __init__(self) -> None:
        super().__init__()

    def neutralize(self) -> None:
        """Nothing to do."""
