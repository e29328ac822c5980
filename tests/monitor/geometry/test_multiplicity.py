from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from monitor.geometry.multiplicity import benjamini_hochberg, bonferroni

RNG = np.random.default_rng(0)
FAMILIES = [RNG.uniform(size=n) ** k for n in (1, 2, 24, 216) for k in (1, 4)] + [np.array([0.5, 0.5, 0.01, 1.0, 0.0])]


def test_by_hand():
    # Sorted: .01 .02 .03 .04 .5, times 5/1 5/2 5/3 5/4 5/5: .05 .05 .05 .05 .5
    assert np.allclose(benjamini_hochberg([0.04, 0.01, 0.5, 0.03, 0.02]), [0.05, 0.05, 0.5, 0.05, 0.05])
    assert np.allclose(bonferroni([0.04, 0.01, 0.5, 0.03, 0.02]), [0.2, 0.05, 1.0, 0.15, 0.1])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family.size))
def test_agrees_with_scipy(family):
    assert np.allclose(benjamini_hochberg(family), stats.false_discovery_control(family), rtol=1e-13, atol=0)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family.size))
def test_between_the_plain_p_values_and_bonferroni_and_in_the_same_order(family):
    adjusted = benjamini_hochberg(family)
    assert (family <= adjusted).all() and (adjusted <= bonferroni(family)).all() and (adjusted <= 1).all()
    assert (np.diff(adjusted[np.argsort(family)]) >= 0).all()


def test_the_step_up_rule_rejects_the_same_tests():
    # The procedure without adjusted p-values: reject the k smallest, k the largest with p_(k) <= qk/m.
    for family in FAMILIES:
        ordered = np.sort(family)
        passed = np.flatnonzero(ordered <= 0.05 * np.arange(1, family.size + 1) / family.size)
        rejected = family <= ordered[passed[-1]] if passed.size else np.zeros(family.size, dtype=bool)
        assert ((benjamini_hochberg(family) <= 0.05) == rejected).all()


def test_family_wise_error_and_false_discovery_rate_are_kept_and_plain_tests_do_not_keep_them():
    rng = np.random.default_rng(1)
    family_wise, discovery, plain = [], [], []
    for _ in range(4000):
        null = rng.uniform(size=18)
        signal = stats.norm.sf(rng.normal(size=6) + 3.0)
        p_values = np.concatenate([null, signal])
        plain.append((null <= 0.05).any())
        family_wise.append((bonferroni(p_values)[:18] <= 0.05).any())
        found = benjamini_hochberg(p_values) <= 0.05
        discovery.append(found[:18].sum() / max(1, found.sum()))
    assert np.mean(plain) > 0.5
    assert 0.02 < np.mean(family_wise) <= 0.05  # 1 - (1 - .05/24)^18 = .037
    assert 0.03 < np.mean(discovery) <= 0.05  # .05 · 18/24 = .0375


def test_the_shape_is_kept_and_the_family_is_all_of_it():
    family = RNG.uniform(size=(6, 4))
    for adjust in (bonferroni, benjamini_hochberg):
        assert adjust(family).shape == (6, 4)
        assert np.array_equal(adjust(family).ravel(), adjust(family.ravel()))
        assert adjust(0.2) == 0.2 and adjust([]).shape == (0,)


@pytest.mark.parametrize("adjust", [bonferroni, benjamini_hochberg])
@pytest.mark.parametrize("bad", [[0.1, math.nan], [-0.1], [1.1]])
def test_what_is_no_p_value_is_refused(adjust, bad):
    with pytest.raises(ValueError, match="p_values"):
        adjust(bad)
