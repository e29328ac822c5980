import statistics

import pytest
import torch

from monitor.geometry.sagitta import sagitta_curvature

CURVATURES = (0.25, 0.5, 1.0, 2.0, 4.0)


def sphere(curvature, dimension, n=1000, width=20, noise=0.0, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, dimension + 1, generator=generator, dtype=torch.float64)
    x = torch.nn.functional.pad(x / x.norm(dim=1, keepdim=True) / curvature**0.5, (0, width - dimension - 1))
    return x + noise * torch.randn(n, width, generator=generator, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_median_error_on_spheres_is_within_the_published_one(noise):
    errors, by_dimension = [], {}
    for dimension in (2, 3, 5):
        spheres = [sphere(k, dimension, noise=noise) for k in CURVATURES]
        found = [float(sagitta_curvature(points, dimension, against="tangent")) for points in spheres]
        by_dimension[dimension] = found
        errors += [abs(value / k - 1) for value, k in zip(found, CURVATURES, strict=True)]
    assert statistics.median(errors) <= 0.17, errors
    assert all(found == sorted(found) for found in by_dimension.values())


def worst(against, dimension, noise=0.0, n_neighbours=None):
    clouds = [sphere(k, dimension, noise=noise) for k in CURVATURES[::2]]
    found = [float(sagitta_curvature(x, dimension, n_neighbours, against=against)) for x in clouds]
    return max(abs(value / k - 1) for value, k in zip(found, CURVATURES[::2], strict=True))


@pytest.mark.parametrize("dimension", [2, 3])
def test_chords_fall_in_proportion_to_their_square_and_tangents_do_not(dimension):
    # h = c²/(2R) has no higher terms: even a fifth of the sphere as neighbourhood is no bias.
    assert worst("chord", dimension) < 0.03
    assert worst("chord", dimension, n_neighbours=200) < 0.03
    assert worst("tangent", dimension, n_neighbours=200) > 0.3


def test_noise_hides_the_fall_of_near_neighbours_more_than_that_of_far_ones():
    # At curvature 4 (R = 1/2) the nearest 20 of 1,000 fall by 0.02 at most, the nearest 250 by 0.25; the noise is 0.05.
    assert worst("chord", 2, noise=0.05, n_neighbours=20) > 0.4
    assert worst("chord", 2, noise=0.05, n_neighbours=250) < 0.2


def test_flat_clouds_have_none_even_where_they_are_noisy():
    generator = torch.Generator().manual_seed(0)
    plane = torch.nn.functional.pad(torch.randn(800, 3, generator=generator, dtype=torch.float64), (0, 17))
    noisy = plane + 0.05 * torch.randn(800, 20, generator=generator, dtype=torch.float64)
    assert float(sagitta_curvature(plane, 3)) == pytest.approx(0, abs=1e-12)
    assert float(sagitta_curvature(noisy, 3)) < 0.02


def test_unchanged_by_rotation_and_shift_and_inverse_to_squared_scale():
    x = sphere(1.0, 2, n=400, width=6)
    q = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    expected = float(sagitta_curvature(x, 2))
    assert float(sagitta_curvature(x @ q + 7, 2)) == pytest.approx(expected, rel=1e-6)
    assert float(sagitta_curvature(x * 3, 2)) == pytest.approx(expected / 9, rel=1e-6)
    assert float(sagitta_curvature(x.float(), 2)) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("points", "dimension", "options", "message"),
    [
        (torch.rand(50), 1, {}, "n, d"),
        (torch.full((50, 4), torch.inf), 1, {}, "finite"),
        (torch.rand(50, 4), 4, {}, "dimension"),
        (torch.rand(50, 4), 0, {}, "dimension"),
        (torch.rand(5, 4), 2, {}, "n_neighbours"),
        (torch.rand(50, 4), 2, {"n_neighbours": 50}, "n_neighbours"),
        (torch.rand(50, 4), 2, {"against": "arc"}, "against"),
    ],
)
def test_bad_input(points, dimension, options, message):
    with pytest.raises(ValueError, match=message):
        sagitta_curvature(points, dimension, **options)
