from __future__ import annotations

import numpy as np
import pytest
import torch

from monitor.geometry.rounding import round_to_bits


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_hand(weight, bits, group_size):
    """The formula, an entry at a time, in float64."""
    weight = weight.double().numpy()
    rounded = np.zeros_like(weight)
    levels = 2 ** (bits - 1) - 1
    for row in range(weight.shape[0]):
        for start in range(0, weight.shape[1], group_size):
            group = weight[row, start : start + group_size]
            scale = abs(group).max() / levels
            for column, value in enumerate(group):
                code = 0 if scale == 0 else max(-levels, min(levels, round(value / scale)))
                rounded[row, start + column] = scale * code
    return torch.from_numpy(rounded)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [None, 1, 16, 25, 40, 128])
def test_equals_the_formula(bits, group_size):
    weight = draw(7, 40)
    weight[2] = 0
    expected = by_hand(weight, bits, group_size or 40)
    assert torch.allclose(round_to_bits(weight, bits, group_size).double(), expected, rtol=1e-6, atol=0)


def test_equals_torchs_own_quantisation():
    weight = draw(6, 50)
    scale = weight.abs().amax(1) / 127
    expected = torch.fake_quantize_per_channel_affine(weight, scale, torch.zeros(6, dtype=torch.int32), 0, -127, 127)
    assert torch.allclose(round_to_bits(weight, 8), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_half_a_step_is_the_largest_error_and_the_grid_is_small(bits):
    weight = draw(5, 256)
    rounded = round_to_bits(weight, bits, 64)
    step = weight.reshape(5, 4, 64).abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    error = (rounded - weight).reshape(5, 4, 64).abs()
    assert bool((error <= step / 2 * (1 + 1e-5)).all())
    for group in rounded.reshape(20, 64):
        assert len(group.unique()) <= 2**bits - 1


def test_symmetries():
    weight = draw(9, 33)
    rounded = round_to_bits(weight, 4, 8)
    assert torch.equal(round_to_bits(-weight, 4, 8), -rounded)
    assert torch.equal(round_to_bits(4 * weight, 4, 8), 4 * rounded)
    assert torch.equal(round_to_bits(weight.flip(0), 4, 8), rounded.flip(0))
    assert torch.equal(torch.cat([round_to_bits(part, 4, 8) for part in weight.split(4)]), rounded)
    assert torch.allclose(round_to_bits(rounded, 4, 8), rounded, rtol=1e-6, atol=0)


def test_changes_within_half_a_step_are_lost():
    """Why quantisation undoes unlearning (arXiv 2410.16454)."""
    before = round_to_bits(draw(8, 128), 4)
    step = before.abs().amax(1, keepdim=True) / 7
    change = 0.49 * step * draw(8, 128, seed=1).sign() * (before.abs() < 6.5 * step)
    assert float(change.abs().sum()) > 0
    assert torch.allclose(round_to_bits(before + change, 4), before, rtol=1e-6, atol=0)


def test_more_bits_and_smaller_groups_err_less():
    weight = draw(16, 512)

    def error(*options):
        return float((round_to_bits(weight, *options) - weight).square().sum())

    assert error(8) < error(6) < error(4) < error(2)
    assert error(4, 16) < error(4, 128) < error(4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_is_kept(dtype):
    weight = draw(4, 32).to(dtype)
    rounded = round_to_bits(weight, 4)
    assert rounded.dtype == dtype and rounded.shape == weight.shape
    assert torch.equal(rounded, round_to_bits(weight.float(), 4).to(dtype))


def test_the_weight_itself_is_not_touched():
    weight = draw(4, 32).requires_grad_(True)
    before = weight.detach().clone()
    assert not round_to_bits(weight, 4).requires_grad
    assert torch.equal(weight.detach(), before)


@pytest.mark.parametrize(
    ("weight", "options", "message"),
    [
        (torch.zeros(3), (4,), "`weight` must be a floating matrix"),
        (torch.zeros(3, 3, dtype=torch.int8), (4,), "int8"),
        (torch.full((2, 2), torch.nan), (4,), "finite"),
        (torch.zeros(2, 2), (1,), "`bits` must be 2 to 8, got 1"),
        (torch.zeros(2, 2), (16,), "got 16"),
        (torch.zeros(2, 2), (4, 0), "`group_size`"),
    ],
)
def test_bad_arguments_are_named(weight, options, message):
    with pytest.raises(ValueError, match=message):
        round_to_bits(weight, *options)
