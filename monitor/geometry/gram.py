"""Entropy of the Gram matrix: over how many directions a cloud of vectors spreads.

For Z in R^{n x d} let K = Z Zᵀ / tr(Z Zᵀ), with eigenvalues p_i >= 0 that sum to one. Then

    S_alpha(Z) = log2(sum_i p_i^alpha) / (1 - alpha),     S_1(Z) = -sum_i p_i log2 p_i,     S_2(Z) = -log2 tr(K²).

0 bits: all rows on one line. log2(n) bits: n orthogonal rows of one length.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def check_vectors(vectors: Tensor, name: str = "vectors", *, at_least: int = 2) -> Tensor:
    """`vectors` as float64, after checking that they are ``[..., n, d]`` with n >= `at_least`, and finite."""
    if vectors.ndim < 2:
        raise ValueError(f"{name} must be [..., n, d], one vector a row; got shape {tuple(vectors.shape)}")
    if vectors.shape[-2] < at_least:
        raise ValueError(f"{name} must have at least {at_least} rows (vectors); got {vectors.shape[-2]}")
    vectors = vectors.double()
    if not torch.isfinite(vectors.sum()):  # one pass; a finite sum has finite terms
        broken = int((~torch.isfinite(vectors)).sum())
        if broken:
            raise ValueError(
                f"{name} must be finite; {broken} entries are NaN or infinite "
                "(half-precision overflow? pool the hidden states in float32)"
            )
    return vectors


def unit(vectors: Tensor, name: str = "vectors") -> Tensor:
    """Rows divided by their length.

    Raises
    ------
    ValueError
        If a row is zero: it has no direction. A zero difference means that the anonymised text equals the original.
    """
    lengths = vectors.norm(dim=-1, keepdim=True)
    if (lengths == 0).any():
        rows = (lengths[..., 0] == 0).nonzero()[:, -1].unique().tolist()
        raise ValueError(
            f"{name} must have no zero rows, a zero vector has no direction; zero at row(s) {rows[:8]} "
            "(is the anonymised text equal to the original? leave such pairs out)"
        )
    return vectors / lengths


def gram(vectors: Tensor) -> Tensor:
    """Gram matrix Z Zᵀ, ``[..., n, n]`` float64, of vectors ``[..., n, d]``."""
    vectors = check_vectors(vectors)
    return vectors @ vectors.mT


def entropy_of_gram(matrix: Tensor, alpha: float = 2.0) -> Tensor:
    """S_alpha of a Gram matrix that is already there; see `gram_entropy`."""
    if not alpha > 0 or math.isinf(alpha):
        raise ValueError(f"alpha must be a positive finite number; got {alpha}")
    trace = matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
    if (trace <= 0).any():
        raise ValueError("vectors must not all be zero: their Gram matrix has no spectrum")
    density = matrix / trace[..., None, None]
    if alpha == 2:  # tr(K²) is the squared Frobenius norm: no eigenvalues needed
        return -density.square().sum((-2, -1)).log2()
    spectrum = torch.linalg.eigvalsh(density).clamp_min(0)  # rounding leaves eigenvalues of about -1e-17
    spectrum = spectrum / spectrum.sum(-1, keepdim=True)
    if alpha == 1:
        return -torch.special.xlogy(spectrum, spectrum).sum(-1) / math.log(2)
    return spectrum.pow(alpha).sum(-1).log2() / (1 - alpha)


def gram_entropy(vectors: Tensor, alpha: float = 2.0) -> Tensor:
    """Rényi entropy S_alpha of the spectrum of the normalised Gram matrix, in bits.

    Parameters
    ----------
    vectors : Tensor, [..., n, d]
        One vector a row, n >= 2; leading dimensions (layers) are batched. Not centred, not normalised.
    alpha : float
        Order. 2 needs no eigenvalues, 1 is Shannon's (von Neumann's) entropy.

    Returns
    -------
    Tensor, [...], float64
        0 (one line) to log2(min(n, d)) (evenly over orthogonal directions). Higher: more spread.

    Raises
    ------
    ValueError
        For n < 2, non-finite entries, all-zero vectors, alpha <= 0.

    Notes
    -----
    S_2 = -log2 tr(K²), K = Z Zᵀ / tr(Z Zᵀ): arXiv 2611.05272, Eq. 1. For unit rows it is a function of the mean
    squared cosine alone: 2^{-S_2} = (1 + (n-1) mean cos²) / n (its Lemma 1).
    """
    vectors = check_vectors(vectors)
    if vectors.shape[-1] < vectors.shape[-2]:  # ZᵀZ has the same non-zero eigenvalues and is smaller
        vectors = vectors.mT
    return entropy_of_gram(vectors @ vectors.mT, alpha)


def effective_rank(vectors: Tensor) -> Tensor:
    """2^{S_1}: the number of equally strong directions with the same entropy; 1 to min(n, d).

    Not the effective rank tr(G) / λ_max(G) of Theorem 1 of arXiv 2611.05272, which is `stable_rank` here.
    """
    return gram_entropy(vectors, alpha=1.0).exp2()


def stable_rank(vectors: Tensor) -> Tensor:
    """tr(G) / λ_max(G) = ‖Z‖_F² / ‖Z‖_2²; 1 to min(n, d), and 2^{S_2 / 2} <= stable rank <= 2^{S_2}."""
    matrix = gram(vectors)
    largest = torch.linalg.eigvalsh(matrix)[..., -1]
    if (largest <= 0).any():
        raise ValueError("vectors must not all be zero: their Gram matrix has no spectrum")
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1) / largest


def mean_norm(vectors: Tensor) -> Tensor:
    """Mean Euclidean length of the rows of ``[..., n, d]``; in units of the activations, >= 0."""
    return check_vectors(vectors, at_least=1).norm(dim=-1).mean(-1)


def mean_cosine(vectors: Tensor) -> Tensor:
    """Mean cosine over the n(n-1)/2 pairs of rows, -1/(n-1) to 1; zero rows are an error.

    Notes
    -----
    With u the unit rows, sum_{i != j} u_i·u_j = ‖sum_i u_i‖² - n: no n x n matrix is made.
    """
    directions = unit(check_vectors(vectors))
    n = directions.shape[-2]
    return (directions.sum(-2).square().sum(-1) - n) / (n * (n - 1))
