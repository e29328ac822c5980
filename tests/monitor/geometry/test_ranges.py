from __future__ import annotations

import math

import numpy as np
import pytest

from monitor.geometry.ranges import as_given, in_range


def test_ends_belong_to_the_range_unless_opened():
    assert in_range([0, 1], "x", 0.0, 1.0).tolist() == [0.0, 1.0]
    for value, opened in ((0.0, "open_low"), (1.0, "open_high")):
        with pytest.raises(ValueError, match=r"x must lie in .*0, 1.*, got [01]"):
            in_range(value, "x", 0.0, 1.0, **{opened: True})


@pytest.mark.parametrize("value", [math.nan, [0.5, math.nan], -1.0, [0.5, 2.0], "many", None, 1 + 2j])
def test_what_is_outside_or_no_number_is_named(value):
    with pytest.raises(ValueError, match="x must"):
        in_range(value, "x", 0.0, 1.0)


def test_scalars_come_back_as_floats_and_arrays_as_arrays():
    assert type(as_given(np.float64(1.0))) is float
    assert as_given(np.ones((2, 3))).shape == (2, 3)
