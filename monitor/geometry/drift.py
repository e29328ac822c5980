"""How far representations of the same texts moved between two models: CKA, PCA similarity, PCA shift.

The diagnostics of Xu et al. (arXiv 2505.16831), on one pooled vector a text. Both sides must be the same texts in the
same order: ``now`` and ``reference`` are ``[..., n, d]``, results ``[...]`` float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monitor.geometry.gram import check_vectors


def linear_cka(now: Tensor, reference: Tensor) -> Tensor:
    """Linear centred kernel alignment, 0 (unrelated) to 1 (equal up to rotation, scale and translation).

    Parameters
    ----------
    now, reference : Tensor, [..., n, d] and [..., n, d']
        The widths may differ, the n texts must be the same.

    Raises
    ------
    ValueError
        For different n, n < 2, non-finite entries, or rows that are all equal (nothing left after centring).

    Notes
    -----
    CKA = ‖YᵀX‖_F² / (‖XᵀX‖_F ‖YᵀY‖_F) on centred columns = <K, L> / (‖K‖ ‖L‖), K = XXᵀ, L = YYᵀ (Kornblith et al.,
    arXiv 1905.00414, Eq. 4). The biased estimator: with n not far above d it is high even for unrelated clouds.
    """
    now, reference = _centred(now, reference)[0]
    first, second = now @ now.mT, reference @ reference.mT
    scale = first.flatten(-2).norm(dim=-1) * second.flatten(-2).norm(dim=-1)
    if (scale == 0).any():
        raise ValueError("now and reference must vary over the texts: all rows are equal, CKA is 0/0")
    return (first * second).sum((-2, -1)) / scale


def pca_similarity(now: Tensor, reference: Tensor) -> Tensor:
    """|cos| between the two first principal directions, 0 (turned by a right angle) to 1 (kept).

    Notes
    -----
    PCA-Sim = cos(c_now, c_ref) in arXiv 2505.16831. A principal direction has no sign, so the published value's sign is
    the solver's accident: its absolute value is returned.
    """
    (now, reference), _ = _centred(now, reference, same_width=True)
    return (_first_direction(now) * _first_direction(reference)).sum(-1).abs().clamp_max(1)


def pca_shift(now: Tensor, reference: Tensor) -> Tensor:
    """Displacement of the mean along the reference's first principal direction, in units of the activations.

    Notes
    -----
    PCA-Shift = p_now - p_ref in arXiv 2505.16831, p the mean projection on the first principal direction c. Here c is
    the reference's for both, and is oriented so that p_ref >= 0: the sign then means the same over a whole run
    (positive: outwards; negative: towards the origin, and past it).
    """
    (_, reference), (mean_now, mean_reference) = _centred(now, reference, same_width=True)
    direction = _first_direction(reference)
    before = (mean_reference * direction).sum(-1)
    sign = torch.where(before < 0, -1.0, 1.0)
    return sign * ((mean_now * direction).sum(-1) - before)


def _centred(
    now: Tensor, reference: Tensor, same_width: bool = False
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Both sides without their means, and the means."""
    now, reference = check_vectors(now, "now"), check_vectors(reference, "reference")
    if now.shape[-2] != reference.shape[-2]:
        raise ValueError(
            f"now and reference must hold the same texts; got {now.shape[-2]} and {reference.shape[-2]} rows"
        )
    if same_width and now.shape[-1] != reference.shape[-1]:
        raise ValueError(f"now and reference must have the same width; got {now.shape[-1]} and {reference.shape[-1]}")
    means = now.mean(-2), reference.mean(-2)
    return (now - means[0][..., None, :], reference - means[1][..., None, :]), means


def _first_direction(centred: Tensor) -> Tensor:
    """Unit first right singular vector by the n x n Gram matrix: c = Xᵀu / ‖Xᵀu‖."""
    values, vectors = torch.linalg.eigh(centred @ centred.mT)
    if (values[..., -1] <= 0).any():
        raise ValueError("the rows must vary over the texts: all are equal, there is no principal direction")
    direction = (centred.mT @ vectors[..., -1:])[..., 0]
    return direction / direction.norm(dim=-1, keepdim=True)
