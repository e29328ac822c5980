"""The calibrated spread against brute force, its rule for ties, and where the published grid finds nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from monitor.geometry.sampling_scale import calibrate_sigma, norm_range
from monitor.geometry.subspaces import Isotropic, Subspace


def planted(d: int = 32, k: int = 2, offset: float = 5.0) -> Subspace:
    basis = torch.linalg.qr(torch.randn(d, k + 1, generator=torch.Generator().manual_seed(0))).Q
    return Subspace(basis[:, :k], offset * basis[:, k], "planted")


@pytest.mark.parametrize("subspace", [planted(), planted().linear(), planted(k=8), Isotropic(planted().offset)])
def test_against_brute_force(subspace):
    low, high = 3.0, 40.0
    sigma, fraction = calibrate_sigma(subspace, low, high, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1)
    found = {}
    for candidate in 10 ** np.linspace(np.log10(low), np.log10(high), 10):
        z = torch.randn(500, subspace.rank, generator=generator).double()
        scale = candidate if isinstance(subspace, Subspace) else candidate / np.sqrt(subspace.dim)
        norms = (subspace.offset.double() + scale * z @ subspace.basis.double().mT).norm(dim=1)
        found[candidate] = float(((norms >= low) & (norms <= high)).double().mean())
    best = max(found.values())
    assert fraction == pytest.approx(best, abs=1e-9)
    assert sigma == pytest.approx(max(c for c, share in found.items() if share == best))


def test_of_equal_candidates_the_largest():
    # All points of these scales are in range: the offset alone is, and nothing leaves it.
    sigma, fraction = calibrate_sigma(planted(), 1.0, 1000.0, generator=torch.Generator().manual_seed(0), lowest=0.1)
    assert fraction == 1.0
    alone = 10 ** np.linspace(-1, 3, 10)
    assert sigma == pytest.approx(alone[alone < 200][-1], rel=1e-6)  # at 129 every norm is below 1000, at 359 not


def test_where_the_published_grid_has_nothing_in_range():
    wide, low, high = planted(d=64, k=16), 4.0, 6.0
    sigma, fraction = calibrate_sigma(wide, low, high, generator=torch.Generator().manual_seed(0))
    assert (sigma, fraction) == (pytest.approx(high), 0.0)
    sigma, fraction = calibrate_sigma(
        wide, low, high, generator=torch.Generator().manual_seed(0), lowest=low / 100, n_values=20
    )
    assert fraction == 1.0 and 0.04 < sigma < 1.0


def test_the_range_of_norms():
    x = torch.tensor([[3.0, 4.0], [0.0, 1.0], [6.0, 8.0]])
    assert norm_range(x) == (1.0, 10.0)


def test_bad_input():
    generator = torch.Generator()
    for low, high in ((0.0, 1.0), (2.0, 1.0), (1.0, float("inf"))):
        with pytest.raises(ValueError, match="low and high must be finite norms with 0 < low < high"):
            calibrate_sigma(planted(), low, high, generator=generator)
    with pytest.raises(ValueError, match="lowest must lie between 0 and high"):
        calibrate_sigma(planted(), 1.0, 2.0, generator=generator, lowest=3.0)
    with pytest.raises(ValueError, match="n_values must be at least 2"):
        calibrate_sigma(planted(), 1.0, 2.0, generator=generator, n_values=1)
    with pytest.raises(ValueError, match="n must be a whole number of points, at least 1"):
        calibrate_sigma(planted(), 1.0, 2.0, generator=generator, n=0)
