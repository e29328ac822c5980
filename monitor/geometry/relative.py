"""Relative representations and the association of target sentences with positive and negative attributes.

Source: arXiv 2609.10060, Eqs. 2-6 and Sec. 4.5. All functions take one model's pooled states; a bias *shift* is the
difference of two models' scores. Inputs may be float32; everything is computed in float64, because the shifts looked
for are differences of nearly equal numbers, and distances never go through the |x|^2 + |y|^2 - 2xy form, which loses
half of the digits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def relative_representation(states: Tensor, anchors: Tensor) -> Tensor:
    """Cosine similarities of each state to the anchors.

    Parameters
    ----------
    states : Tensor of shape (n, d)
    anchors : Tensor of shape (m, d)
        The anchors' states *in the same model*.

    Returns
    -------
    Tensor of shape (n, m), float64, values in [-1, 1]
        Unchanged by a rotation, reflection or scaling of the model's whole space.

    Raises
    ------
    ValueError
        For a wrong shape, an empty set, a value that is not finite, or a state of norm zero.

    Notes
    -----
    r(x) = [cos(e(x), e(a_i))]_i, Eq. 4 of arXiv 2609.10060, after Moschella et al. (arXiv 2209.15430).
    """
    return _unit_rows(states, "states") @ _unit_rows(anchors, "anchors").T


def association(targets: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """How much nearer each target is to the positive than to the negative attributes, by mean Euclidean distance.

    Parameters
    ----------
    targets : Tensor of shape (n, m)
    positive : Tensor of shape (n_positive, m)
    negative : Tensor of shape (n_negative, m)
        Points of one space, here relative representations.

    Returns
    -------
    Tensor of shape (n,), float64
        S⁺(s) − S⁻(s); positive means nearer to the positive attributes. Within ±2√m for relative representations.

    Notes
    -----
    S±(s) = −mean_p ‖r(s) − r(p)‖₂, Eq. 5.
    """
    for name, points in (("targets", targets), ("positive", positive), ("negative", negative)):
        _check(points, name)
    return _mean_distance(targets, negative) - _mean_distance(targets, positive)


def relative_bias(targets: Tensor, positive: Tensor, negative: Tensor, anchors: Tensor) -> Tensor:
    """Per-sentence bias in relative space; its mean over the targets is B.

    Parameters
    ----------
    targets, positive, negative, anchors : Tensors of shape (n, d), (n_positive, d), (n_negative, d), (m, d)
        States of one model.

    Returns
    -------
    Tensor of shape (n,), float64, within ±2√m
        Positive: nearer to the positive attributes.

    Raises
    ------
    ValueError
        As :func:`relative_representation`.

    Notes
    -----
    B = mean_s (S⁺(s) − S⁻(s)), Eq. 6.
    """
    frame = _unit_rows(anchors, "anchors").T
    return association(
        _unit_rows(targets, "targets") @ frame,
        _unit_rows(positive, "positive") @ frame,
        _unit_rows(negative, "negative") @ frame,
    )


def seat_bias(targets: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Per-sentence SEAT score in absolute space; its mean over the targets is SEAT's B.

    Parameters
    ----------
    targets, positive, negative : Tensors of shape (n, d), (n_positive, d), (n_negative, d)

    Returns
    -------
    Tensor of shape (n,), float64, within ±2
        Positive: nearer to the positive attributes.

    Raises
    ------
    ValueError
        As :func:`relative_representation`.

    Notes
    -----
    S±(s) = mean_p cos(e(s), e(p)), Eqs. 2-3; May et al. (arXiv 1903.10561). A mean of cosines is the product with the
    mean unit vector, so no n × n_positive matrix is needed.
    """
    direction = _unit_rows(positive, "positive").mean(0) - _unit_rows(negative, "negative").mean(0)
    return _unit_rows(targets, "targets") @ direction


def procrustes_align(source: Tensor, target: Tensor) -> Tensor:
    """The rows of ``source`` under the orthogonal map that brings them nearest to the rows of ``target``.

    Parameters
    ----------
    source, target : Tensors of shape (n, d)
        Row i of both belongs to the same text.

    Returns
    -------
    Tensor of shape (n, d), float64
        ``source @ R`` with R = argmin_{RᵀR = I} ‖source R − target‖_F.

    Raises
    ------
    ValueError
        For shapes that differ, an empty set, or a value that is not finite.

    Notes
    -----
    R = U Vᵀ with U S Vᵀ the singular value decomposition of sourceᵀ target (Schönemann 1966). For n < d the
    decomposition is taken in the span of the rows, n × n instead of d × d: R is determined there only, which is all
    that mapping the rows themselves needs.
    """
    _check(source, "source")
    _check(target, "target")
    if source.shape != target.shape:
        raise ValueError(
            f"source and target must have one row per text and equal widths, got {tuple(source.shape)} and "
            f"{tuple(target.shape)}"
        )
    basis_source, coordinates_source = torch.linalg.qr(source.to(torch.float64).T)  # [d, k], [k, n]
    basis_target, coordinates_target = torch.linalg.qr(target.to(torch.float64).T)
    u, _, vt = torch.linalg.svd(coordinates_source @ coordinates_target.T)
    return coordinates_source.T @ (u @ vt) @ basis_target.T


def _mean_distance(x: Tensor, y: Tensor) -> Tensor:
    distances = torch.cdist(x.to(torch.float64), y.to(torch.float64), compute_mode="donot_use_mm_for_euclid_dist")
    return distances.mean(dim=1)


def _unit_rows(states: Tensor, name: str) -> Tensor:
    _check(states, name)
    states = states.to(torch.float64)
    norms = states.norm(dim=1, keepdim=True)
    zero = (norms.squeeze(1) == 0).nonzero().flatten()
    if zero.numel():
        raise ValueError(
            f"{name} must not have zero rows, a zero vector has no direction; got norm 0 in row {int(zero[0])} "
            f"({zero.numel()} in all)"
        )
    return states / norms


def _check(points: Tensor, name: str) -> None:
    if points.ndim != 2 or points.shape[0] == 0 or points.shape[1] == 0:
        raise ValueError(f"{name} must be a non-empty matrix, one row a text, got shape {tuple(points.shape)}")
    bad = (~torch.isfinite(points)).any(dim=1).nonzero().flatten()
    if bad.numel():
        raise ValueError(f"{name} must be finite, got nan or inf in row {int(bad[0])} ({bad.numel()} in all)")
