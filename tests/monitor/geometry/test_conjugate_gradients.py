from __future__ import annotations

import pytest
import torch

from monitor.geometry.conjugate_gradients import conjugate_gradients, rows


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def systems(k=12, T=5):
    """Another positive definite matrix a row, as [2, T, k, k], and how to multiply by all of them."""
    half = draw(2, T, k, k)
    matrices = half @ half.mT + 0.1 * torch.eye(k, dtype=torch.float64)
    return matrices, lambda v: (matrices @ v[..., None])[..., 0]


@pytest.mark.parametrize("preconditioned", [False, True])
def test_solves_every_row(preconditioned):
    matrices, multiply = systems()
    right = draw(2, 5, 12, seed=1)
    diagonal = matrices.diagonal(dim1=-2, dim2=-1)
    x, multiplier = conjugate_gradients(
        multiply, right, (lambda v: v / diagonal) if preconditioned else torch.clone, 1e-12
    )
    expected = torch.linalg.solve(matrices, right[..., None])[..., 0]
    assert torch.allclose(x, expected, rtol=1e-8, atol=1e-8)
    assert torch.equal(multiplier, torch.zeros(2, 5, 1, dtype=torch.float64))


def test_constraint_is_kept_and_its_multiplier_found():
    matrices, multiply = systems()
    right, normal = draw(2, 5, 12, seed=1), draw(2, 5, 12, seed=2)
    diagonal = matrices.diagonal(dim1=-2, dim2=-1)
    x, multiplier = conjugate_gradients(multiply, right, lambda v: v / diagonal, 1e-12, normal)
    v = normal[..., None]
    bordered = torch.cat(
        [torch.cat([matrices, v], dim=-1), torch.cat([v.mT, torch.zeros_like(v[..., :1, :1])], dim=-1)], dim=-2
    )
    wanted = torch.cat([right, torch.zeros(2, 5, 1, dtype=torch.float64)], dim=-1)
    expected = torch.linalg.solve(bordered, wanted[..., None])[..., 0]
    assert torch.allclose(x, expected[..., :-1], rtol=1e-7, atol=1e-7)
    assert torch.allclose(multiplier, expected[..., -1:], rtol=1e-7, atol=1e-7)
    assert float(rows(normal, x).abs().max()) < 1e-9
    # Stopped early it is off, but on the constraint all the same.
    rough, _ = conjugate_gradients(multiply, right, lambda v: v / diagonal, 0.3, normal)
    assert float((rough - x).abs().max()) > 1e-3 and float(rows(normal, rough).abs().max()) < 1e-9


@pytest.mark.parametrize("tolerance", [0.1, 1e-3, 1e-6])
def test_tolerance_is_that_of_the_residual(tolerance):
    matrices, multiply = systems(k=40)
    right = draw(2, 5, 40, seed=1)
    x, _ = conjugate_gradients(multiply, right, torch.clone, tolerance)
    assert bool(((multiply(x) - right).norm(dim=-1) <= 1.001 * tolerance * right.norm(dim=-1)).all())


def test_solved_rows_rest():
    """One row is solved at once, one has nothing to solve, one is easy, one takes long; float32 wears them out."""
    easy, hard = torch.logspace(0, 0.3, 60)[None], torch.logspace(0, 3, 60)[None]
    matrices = torch.cat([torch.ones(2, 60), easy, hard])[None]
    right = torch.ones(1, 4, 60)
    right[:, 1] = 0
    products = []

    def multiply(v):
        products.append(v)
        return matrices * v

    x, _ = conjugate_gradients(multiply, right, torch.clone, 1e-4)
    assert len(products) > 40  # by when the easy row's residual would be 1e-40
    v = torch.stack(products).abs()
    assert not bool(((v > 0) & (v < torch.finfo(v.dtype).tiny)).any()) and bool(torch.isfinite(v).all())
    assert torch.equal(x[:, :2], right[:, :2])
    assert torch.allclose(x * matrices, right, atol=1e-3)


def test_gives_up_on_what_it_cannot_solve():
    spread = torch.logspace(0, 12, 400, dtype=torch.float64)[None, None]
    x, _ = conjugate_gradients(lambda v: spread * v, torch.ones_like(spread), torch.clone, 1e-12)
    assert bool(torch.isfinite(x).all())
