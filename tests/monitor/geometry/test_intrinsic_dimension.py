import statistics

import pytest
import torch

from monitor.geometry.intrinsic_dimension import mle_dimension, two_nn_dimension


def sphere(n, dimension, width=40, seed=2):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, dimension + 1, generator=generator, dtype=torch.float64)
    return torch.nn.functional.pad(x / x.norm(dim=1, keepdim=True), (0, width - dimension - 1))


@pytest.mark.slow
@pytest.mark.parametrize(("estimate", "published"), [(mle_dimension, 0.15), (two_nn_dimension, 0.17)])
def test_median_error_on_spheres_is_the_published_one(estimate, published):
    dimensions = (5, 10, 15, 20, 25)
    errors = [abs(float(estimate(sphere(4000, d))) / d - 1) for d in dimensions]
    assert statistics.median(errors) <= published + 0.005, errors
    assert max(errors) < 0.35


@pytest.mark.parametrize("estimate", [mle_dimension, two_nn_dimension])
def test_low_dimensions_come_out_and_order_is_kept(estimate):
    found = [float(estimate(sphere(1500, d))) for d in (1, 2, 4, 8)]
    assert found == sorted(found)
    assert found[:2] == pytest.approx([1, 2], rel=0.1) and found[2] == pytest.approx(4, rel=0.15)


@pytest.mark.parametrize("estimate", [mle_dimension, two_nn_dimension])
def test_unchanged_by_rotation_shift_and_scale_and_by_copies_of_points(estimate):
    x = sphere(400, 3, width=6)
    q = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    expected = float(estimate(x))
    for other in (x @ q, x * 1e4, x + 500, torch.cat([x, x[:50]])):
        assert float(estimate(other)) == pytest.approx(expected, rel=1e-3)


def test_mle_is_its_formula():
    x = sphere(60, 2, width=3)
    distances = torch.cdist(x, x).sort(dim=1).values[:, 1:]
    by_k = []
    for k in range(3, 6):
        inverse = [sum(torch.log(row[k - 1] / row[j]) for j in range(k - 1)) / (k - 1) for row in distances]
        by_k.append(1 / (sum(inverse) / len(inverse)))
    assert float(mle_dimension(x, k=(3, 5))) == pytest.approx(float(sum(by_k) / 3))


def test_gaps_as_short_as_the_rounding_of_products_are_seen():
    # Twins 1e-8 apart in a cloud of size 1, far from the origin: ten times below what cdist resolves by products.
    x = sphere(100, 2, width=50) + 3
    step = torch.nn.functional.normalize(
        torch.randn(100, 50, generator=torch.Generator().manual_seed(4)).double(), dim=1
    )
    x = torch.cat([x, x + 1e-8 * step])
    exact = (x[:, None] - x).norm(dim=-1).sort(dim=1).values[:, 1:3]
    ratios = (exact[:, 1] / exact[:, 0]).log().sort().values[:180]
    share = -torch.log1p(-torch.arange(1, 181, dtype=torch.float64) / 200)
    expected = float((ratios * share).sum() / ratios.square().sum())
    assert float(two_nn_dimension(x)) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("estimate", [mle_dimension, two_nn_dimension])
def test_layers_are_read_one_by_one_in_any_dtype(estimate):
    layers = torch.stack([sphere(200, d, width=10) for d in (2, 5)], dim=1)
    both = estimate(layers.float())
    assert both.shape == (2,) and both.dtype == torch.float64
    assert float(both[1]) == pytest.approx(float(estimate(layers[:, 1])), rel=1e-3)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (torch.zeros(3), "n, L, d"),
        (torch.full((30, 2), torch.nan), "finite"),
        (torch.ones(30, 2), "more than 20 different points"),
        (torch.rand(15, 2), "more than 20 different points"),
    ],
)
def test_bad_points(points, message):
    with pytest.raises(ValueError, match=message):
        mle_dimension(points)


def test_bad_options():
    with pytest.raises(ValueError, match="k must be"):
        mle_dimension(torch.rand(50, 3), k=(1, 4))
    with pytest.raises(ValueError, match="discard"):
        two_nn_dimension(torch.rand(50, 3), discard=1.0)
