"""Interval of the mean of a table whose rows and whose columns were both drawn: prompts and sampled points, say."""

from __future__ import annotations

import torch
from torch import Tensor

from monitor.geometry.statistics import percentile_interval

# Resamples weighed at once are bounded by this many numbers.
_MAX_WEIGHTS = 4_000_000


def two_way_interval(
    table: Tensor, *, n_bootstrap: int = 1000, seed: int = 0, level: float = 0.95
) -> tuple[float, float]:
    """Percentile interval of a table's mean, rows and columns drawn anew.

    Parameters
    ----------
    table : Tensor [rows, columns]
        Values, or differences of two tables with the same rows and columns.
    n_bootstrap : int, >= 1
    seed : int
        Of the function's own generator, on the CPU.
    level : float in (0, 1)

    Returns
    -------
    (low, high) : tuple of float
        Around the mean, in the units of the values. Of a table of equal values the interval has no width.

    Raises
    ------
    ValueError
        For a table of another shape or empty, values that are not finite, `n_bootstrap` below 1.

    Notes
    -----
    Values of one row share the row, those of one column the column. Rows and columns are drawn independently, each with
    replacement (the pigeonhole bootstrap, Owen, Annals of Applied Statistics 2007); a single row, or column, is kept as
    it is. The interval is on the long side.
    """
    if table.ndim != 2 or table.numel() == 0:
        raise ValueError(f"`table` must have the shape [rows, columns], both at least 1, got {list(table.shape)}")
    if not bool(torch.isfinite(table).all()):
        raise ValueError("`table` must be finite")
    if n_bootstrap < 1:
        raise ValueError(f"`n_bootstrap` must be at least 1, got {n_bootstrap}")
    table = table.detach().double().cpu()
    generator = torch.Generator().manual_seed(seed)
    step = max(1, _MAX_WEIGHTS // sum(table.shape))
    means = []
    for start in range(0, n_bootstrap, step):
        n = min(step, n_bootstrap - start)
        rows, columns = (draws(n, size, generator) / size for size in table.shape)
        means.append(((rows @ table) * columns).sum(1))
    return percentile_interval(torch.cat(means), level)


def draws(n: int, size: int, generator: torch.Generator) -> Tensor:
    """How often each of `size` units is among `size` draws with replacement, n times: [n, size] float64."""
    drawn = torch.randint(size, (n, size), generator=generator)
    return torch.zeros(n, size, dtype=torch.float64).scatter_add_(1, drawn, torch.ones(n, size, dtype=torch.float64))
