"""Rounding weights to a few bits, as a quantised model holds them."""

from __future__ import annotations

import torch
from torch import Tensor


def round_to_bits(weight: Tensor, bits: int, group_size: int | None = None) -> Tensor:
    """Round a linear layer's weight to the nearest of the values that b bits can tell apart.

    Parameters
    ----------
    weight : Tensor of shape (out, in), floating
    bits : int in 2..8
    group_size : int, optional
        Neighbouring inputs that share a scale; the last group has what is left. By default a whole output row.

    Returns
    -------
    Tensor of the shape, dtype and device of `weight`
        ŵ = s · clip(round(w / s), −q, q),  q = 2^{b−1} − 1,  s = max_group |w| / q,  with round half to even: symmetric
        round-to-nearest, the "RTN" of arXiv 2410.16454. A group of zeros stays one. Computed in float32 and stored in
        the weight's dtype, as kernels that unpack into that dtype do.

    Raises
    ------
    ValueError
        For another shape or dtype, bits or groups out of range, or weights that are not finite.

    Notes
    -----
    |ŵ − w| <= s/2. The largest weight of a group is kept, so rounding again changes nothing, and a change of the
    others that keeps them within s/2 of their rounded value is undone: what little an unlearning method moves is lost.
    """
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(
            f"`weight` must be a floating matrix (out, in), got {weight.dtype} of shape {tuple(weight.shape)}"
        )
    if not 2 <= bits <= 8:
        raise ValueError(f"`bits` must be 2 to 8, got {bits}")
    if group_size is not None and group_size < 1:
        raise ValueError(f"`group_size` must be at least 1, or None for whole rows, got {group_size}")
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("`weight` must be finite, got NaN or infinite entries: the model has diverged")
    n_in = weight.shape[1]
    size = n_in if group_size is None else min(group_size, n_in)
    rows = weight.detach().float()
    # Zeros fill the last group up: they never are a group's largest.
    grouped = torch.nn.functional.pad(rows, (0, -n_in % size)).unflatten(1, (-1, size))
    levels = 2 ** (bits - 1) - 1
    scale = grouped.abs().amax(-1, keepdim=True) / levels
    codes = (grouped / scale.clamp_min(torch.finfo(torch.float32).tiny)).round().clamp(-levels, levels)
    return (codes * scale).flatten(1)[:, :n_in].to(weight.dtype)
