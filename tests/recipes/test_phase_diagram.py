from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from recipes.phase_diagram import Frontier, Point, svg, text


def power_law(factor):
    """A frontier of slope -1/2: factor/sqrt(n), none above a purity of 1."""
    return lambda n: factor / math.sqrt(n) if factor <= math.sqrt(n) else math.inf


HARD, EASY = Frontier("hard & slow", power_law(20.0), dash="6 4"), Frontier("easy", power_law(2.0))
NEVER = Frontier("never", lambda n: math.inf)


def draw(*frontiers, points=()):
    document = svg(frontiers, points, title="a < b", subtitle="level & power")
    return ElementTree.fromstring(document.replace(' xmlns="http://www.w3.org/2000/svg"', ""))


def coordinates(element):
    return [tuple(map(float, pair.split(","))) for pair in element.get("points").split()]


def curves(root):
    """Drawn frontiers, without the two-point lines of the legend."""
    found = map(coordinates, root.iter("polyline"))
    return [curve for curve in found if len(curve) > 2]


def test_svg_is_well_formed_escaped_and_labelled():
    root = draw(HARD, EASY)
    words = [element.text for element in root.iter("text")]
    assert {"a < b", "level & power", "hard & slow", "easy", "scored samples n"} <= set(words)
    assert {"10", "100", "1,000", "10,000", "100,000", "1", "0.1", "0.01"} <= set(words)
    assert root.find("title").text == "a < b"
    assert "javascript" not in (document := svg([EASY], title="", subtitle="")) and "href" not in document


def test_axes_are_logarithmic_and_a_power_law_is_a_straight_line_of_its_slope():
    (curve,) = curves(draw(HARD))
    width, height = 480.0 / 4, 340.0 / 2  # of a decade: 10 to 100,000 and 1 to 0.01
    slopes = [(y2 - y1) / height / ((x2 - x1) / width) for (x1, y1), (x2, y2) in zip(curve, curve[1:], strict=False)]
    assert all(slope == pytest.approx(0.5, abs=0.03) for slope in slopes[1:])  # coordinates have one decimal
    # It begins where the purity is 1, at n = 400.
    assert curve[0] == (pytest.approx(70 + width * math.log10(40), abs=0.1), pytest.approx(66, abs=0.1))


def test_a_point_lies_where_its_numbers_say():
    root = draw(HARD, points=[Point(1000, 0.1, "here")])
    circle = root.find("circle")
    assert float(circle.get("cx")) == pytest.approx(70 + 480 / 2) and float(circle.get("cy")) == pytest.approx(66 + 170)
    assert "here" in [element.text for element in root.iter("text")]


def test_the_axes_reach_every_point_and_frontier():
    far = Point(3_000_000, 0.0004, "far")
    root = draw(Frontier("easy", power_law(0.05)), points=[far, Point(5, 0.5, "small")])
    words = [element.text for element in root.iter("text")]
    assert {"1", "10,000,000", "0.0001", "0.00001"} & set(words) >= {"10,000,000", "0.0001"}
    for curve in curves(root):
        assert all(70 <= x <= 550 and 66 <= y <= 406.1 for x, y in curve)
    for circle in root.iter("circle"):
        assert 70 <= float(circle.get("cx")) <= 550 and 66 <= float(circle.get("cy")) <= 406


def area(polygon):
    pairs = zip(polygon, polygon[1:] + polygon[:1], strict=True)
    return abs(sum(x1 * y2 - x2 * y1 for (x1, y1), (x2, y2) in pairs)) / 2


def test_phases_are_shaded_above_the_highest_and_below_the_lowest_frontier():
    both, one = draw(HARD, EASY), draw(EASY)
    detectable, undetectable = (coordinates(element) for element in both.iter("polygon"))
    plane = 480 * 340
    assert area(detectable) + area(undetectable) < 0.8 * plane  # the strip between is white
    detectable_of_one, undetectable_of_one = (coordinates(element) for element in one.iter("polygon"))
    assert area(detectable_of_one) + area(undetectable_of_one) == pytest.approx(plane, rel=1e-3)
    assert area(undetectable) == pytest.approx(area(undetectable_of_one))
    assert area(detectable) < area(detectable_of_one)


def test_a_frontier_that_is_never_reached_leaves_no_detectable_phase():
    root = draw(NEVER)
    assert not list(root.iter("polygon")) and not curves(root)
    words = [element.text for element in root.iter("text")]
    assert "undetectable" in words and "detectable" not in words
    assert "detectable" not in [element.text for element in draw(NEVER, EASY).iter("text")]


def test_text_shows_the_first_frontier_that_detects():
    lines = text([HARD, EASY]).splitlines()
    top = lines[0].split("|")[1]
    # At purity 1: n from 4 on for the easy one, all of the axis; from 400 on for the hard one.
    assert set(top) == {"a", "b"} and top.index("a") == math.ceil(12 * math.log10(40))
    bottom = next(line for line in lines if line.strip().startswith("0.01 |")).split("|")[1]
    assert set(bottom) == {".", "b"} and bottom.index("b") == math.ceil(12 * math.log10(4000) - 1e-9)
    assert "  a  hard & slow" in lines and "  b  easy" in lines
    assert max(map(len, lines)) <= 79


def test_text_marks_points_and_keeps_its_width():
    drawn = text([HARD, EASY], [Point(1000, 0.1, "here")])
    row = next(line for line in drawn.splitlines() if line.strip().startswith("0.1 |")).split("|")[1]
    assert row[24] == "X" and "X  here" in drawn
    wide = text([EASY], [Point(4, 0.5, "small"), Point(10**12, 1.0, "large")])
    assert max(map(len, wide.splitlines())) <= 84 and len(re.findall("X", wide.split("purity")[0])) == 2
    assert set(text([NEVER]).splitlines()[0].split("|")[1]) == {"."}


def test_no_frontier_is_refused():
    for draw_it in (lambda: text([]), lambda: svg([], title="", subtitle="")):
        with pytest.raises(ValueError, match="frontiers"):
            draw_it()
