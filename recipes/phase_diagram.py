"""The plane of sample size and purity, cut by detectability frontiers: as an SVG picture and as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

N_RANGE = (10.0, 100_000.0)
LOWEST_PURITY = 0.01  # the axis goes down to here, or further where a frontier or a point does
_COLUMNS_A_DECADE, _ROWS_A_DECADE = 12, 5
_STEPS_A_DECADE = 24  # of a drawn curve


@dataclass(frozen=True)
class Frontier:
    """The boundary between the phases for one effect and one test.

    Parameters
    ----------
    label : str
        In the legend.
    threshold : callable
        The smallest detectable purity at a sample size, inf where there is none; does not increase.
    colour : str
        A CSS colour.
    dash : str
        Of the line, as in SVG; "" is solid.
    shades : bool
        Whether the phases are shaded by it: detectable lies above all frontiers that shade, undetectable below all.
    """

    label: str
    threshold: Callable[[float], float]
    colour: str = "#1f4e79"
    dash: str = ""
    shades: bool = True


@dataclass(frozen=True)
class Point:
    """A marked audit: its sample size, its purity, and what is written beside it."""

    n: float
    purity: float
    label: str


@dataclass(frozen=True)
class _Axes:
    """Powers of ten that both axes reach, and the plane's place in the picture."""

    n_low: int
    n_high: int
    purity_low: int
    left: float = 70.0
    right: float = 550.0
    top: float = 66.0
    bottom: float = 406.0

    def x(self, n: float) -> float:
        share = (math.log10(n) - self.n_low) / (self.n_high - self.n_low)
        return self.left + share * (self.right - self.left)

    def y(self, purity: float) -> float:
        return self.top + math.log10(purity) / self.purity_low * (self.bottom - self.top)


def svg(
    frontiers: Sequence[Frontier],
    points: Sequence[Point] = (),
    *,
    title: str,
    subtitle: str,
    phases: tuple[str, str] = ("detectable", "undetectable"),
) -> str:
    """The phase diagram as an SVG document.

    Parameters
    ----------
    frontiers : sequence of Frontier
        At least one; drawn in this order.
    points : sequence of Point
    title, subtitle : str
    phases : (str, str)
        What is written into the phase above all frontiers and into the one below.

    Returns
    -------
    str
        A self-contained document of 760 x 470: both axes logarithmic, the phases shaded, a legend.
    """
    axes = _axes(frontiers, points)
    curves = [_curve(frontier, axes) for frontier in frontiers]
    shading = [curve for frontier, curve in zip(frontiers, curves, strict=True) if frontier.shades]
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 470" width="760" height="470" role="img" '
        'font-family="Helvetica, Arial, \'DejaVu Sans\', sans-serif" font-size="12" fill="#222222">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape(subtitle)}</desc>",
        '<rect x="0" y="0" width="760" height="470" fill="#ffffff"/>',
        _text(axes.left, 28, title, size=16, weight="bold"),
        _text(axes.left, 48, subtitle, colour="#555555"),
        *_phases(shading, axes),
        *_grid(axes),
    ]
    for frontier, curve in zip(frontiers, curves, strict=True):
        if len(curve) > 1:
            parts.append(_polyline(curve, frontier.colour, frontier.dash))
    parts += _phase_names(shading, phases, axes)
    parts += _points(points, frontiers, axes)
    parts += _legend(frontiers, axes)
    return "\n".join([*parts, "</svg>", ""])


def text(frontiers: Sequence[Frontier], points: Sequence[Point] = ()) -> str:
    """The phase diagram in characters: per cell, the first frontier that detects there.

    Parameters
    ----------
    frontiers : sequence of Frontier
        At most 26, the hardest first: a cell shows the letter of the first one whose threshold is at or below its
        purity, "." where there is none.
    points : sequence of Point
        Marked "X".

    Returns
    -------
    str
        Lines without a trailing newline, at most 79 characters wide.
    """
    axes = _axes(frontiers, points)
    decades = axes.n_high - axes.n_low
    a_decade = min(_COLUMNS_A_DECADE, 60 // decades)
    columns = [10 ** (axes.n_low + i / a_decade) for i in range(decades * a_decade + 1)]
    thresholds = [[frontier.threshold(n) for n in columns] for frontier in frontiers]
    lines = []
    for row in range(-axes.purity_low * _ROWS_A_DECADE + 1):
        purity = 10 ** (-row / _ROWS_A_DECADE)
        cells = []
        for column in range(len(columns)):
            first = (i for i, values in enumerate(thresholds) if values[column] <= purity * (1 + 1e-9))
            found = next(first, None)
            cells.append("." if found is None else chr(ord("a") + found))
        for point in points:
            if round(-math.log10(point.purity) * _ROWS_A_DECADE) == row:
                cells[round((math.log10(point.n) - axes.n_low) * a_decade)] = "X"
        label = f"{purity:g}" if row % _ROWS_A_DECADE == 0 else ""
        lines.append(f"{label:>7} |{''.join(cells)}")
    ruler = [" "] * (decades * a_decade + 1)
    for i in range(decades + 1):
        ruler[i * a_decade] = "|"
    lines.append(" " * 9 + "".join(ruler).replace(" ", "-"))
    names = [" "] * (decades * a_decade + 10)
    for i in range(decades + 1):
        name = f"{10 ** (axes.n_low + i):,}"
        start = max(0, i * a_decade - len(name) // 2)
        names[start : start + len(name)] = name
    lines.append(" purity  " + "".join(names).rstrip() + "  n")
    lines += [f"  {chr(ord('a') + i)}  {frontier.label}" for i, frontier in enumerate(frontiers)]
    lines.append("  .  not detectable" + ("; X  " + "; ".join(point.label for point in points) if points else ""))
    return "\n".join(lines)


def _axes(frontiers: Sequence[Frontier], points: Sequence[Point]) -> _Axes:
    if not frontiers:
        raise ValueError("frontiers: expected at least one, got none")
    n_low = min([N_RANGE[0], *(point.n for point in points)])
    n_high = max([N_RANGE[1], *(point.n for point in points)])
    last = math.ceil(math.log10(n_high) - 1e-9)
    reached = [frontier.threshold(10.0**last) for frontier in frontiers]
    lowest = min([LOWEST_PURITY, *reached, *(point.purity for point in points)])
    return _Axes(math.floor(math.log10(n_low)), last, math.floor(math.log10(lowest) + 1e-9))


def _curve(frontier: Frontier, axes: _Axes) -> list[tuple[float, float]]:
    """The frontier in the picture's coordinates, from where it comes below a purity of 1; empty if it never does."""
    steps = (axes.n_high - axes.n_low) * _STEPS_A_DECADE
    sizes = [10 ** (axes.n_low + i / _STEPS_A_DECADE) for i in range(steps + 1)]
    purities = [frontier.threshold(n) for n in sizes]
    first = next((i for i, purity in enumerate(purities) if purity <= 1.0), None)
    if first is None:
        return []
    drawn = list(zip(sizes[first:], purities[first:], strict=True))
    if first > 0:
        without, enough = sizes[first - 1], sizes[first]
        for _ in range(30):
            middle = math.sqrt(without * enough)
            without, enough = (without, middle) if frontier.threshold(middle) <= 1.0 else (middle, enough)
        drawn.insert(0, (enough, 1.0))
    return [(axes.x(n), axes.y(purity)) for n, purity in drawn]


def _phases(curves: Sequence[Sequence[tuple[float, float]]], axes: _Axes) -> list[str]:
    """Green above the highest curve, grey below the lowest, white between."""
    drawn = [curve for curve in curves if curve]
    parts = []
    whole = f"M{axes.left:.1f},{axes.top:.1f}H{axes.right:.1f}V{axes.bottom:.1f}H{axes.left:.1f}Z"
    if not drawn:
        return [f'<path d="{whole}" fill="#ececec"/>']
    # Frontiers of one family do not cross: the one which starts farthest right, or highest at the left, is the highest.
    ordered = sorted(drawn, key=lambda curve: (curve[0][0], -curve[0][1]))
    lowest, highest = ordered[0], ordered[-1]
    if len(drawn) == len(curves):
        above = " ".join(f"{x:.1f},{y:.1f}" for x, y in highest)
        corners = f"{axes.right:.1f},{axes.top:.1f} {highest[0][0]:.1f},{axes.top:.1f}"
        parts.append(f'<polygon points="{above} {corners}" fill="#e4f1e6"/>')
    below = " ".join(f"{x:.1f},{y:.1f}" for x, y in lowest)
    corners = f"{axes.right:.1f},{axes.bottom:.1f} {axes.left:.1f},{axes.bottom:.1f} {axes.left:.1f},{axes.top:.1f}"
    parts.append(f'<polygon points="{below} {corners}" fill="#ececec"/>')
    return parts


def _phase_names(curves: Sequence[Sequence[tuple[float, float]]], phases: tuple[str, str], axes: _Axes) -> list[str]:
    above, below = phases
    names = [_text(axes.left + 12, axes.bottom - 14, below, colour="#666666", weight="bold")]
    if all(curves):
        names.append(_text(axes.right - 12, axes.top + 22, above, colour="#2f6b3c", anchor="end", weight="bold"))
    return names


def _grid(axes: _Axes) -> list[str]:
    """Lines at powers of ten, ticks between them, labels, and the frame."""
    parts = []
    for exponent in range(axes.n_low, axes.n_high + 1):
        x = axes.x(10.0**exponent)
        parts.append(_line(x, axes.top, x, axes.bottom, "#d4d4d4"))
        parts.append(_text(x, axes.bottom + 20, f"{10**exponent:,}", anchor="middle"))
        if exponent < axes.n_high:
            ticks = [axes.x(k * 10.0**exponent) for k in range(2, 10)]
            parts += [_line(x, axes.bottom, x, axes.bottom + 4, "#888888") for x in ticks]
    for exponent in range(axes.purity_low, 1):
        y = axes.y(10.0**exponent)
        parts.append(_line(axes.left, y, axes.right, y, "#d4d4d4"))
        parts.append(_text(axes.left - 8, y + 4, f"{10.0**exponent:g}", anchor="end"))
        if exponent < 0:
            ticks = [axes.y(k * 10.0**exponent) for k in range(2, 10)]
            parts += [_line(axes.left - 4, y, axes.left, y, "#888888") for y in ticks]
    parts.append(
        f'<rect x="{axes.left:.1f}" y="{axes.top:.1f}" width="{axes.right - axes.left:.1f}" '
        f'height="{axes.bottom - axes.top:.1f}" fill="none" stroke="#555555"/>'
    )
    middle = (axes.top + axes.bottom) / 2
    parts.append(_text((axes.left + axes.right) / 2, axes.bottom + 44, "scored samples n", anchor="middle"))
    parts.append(
        f'<text x="22" y="{middle:.1f}" text-anchor="middle" transform="rotate(-90 22 {middle:.1f})">'
        "purity: share of texts that carry the signal</text>"
    )
    return parts


def _points(points: Sequence[Point], frontiers: Sequence[Frontier], axes: _Axes) -> list[str]:
    parts = []
    room = 160.0  # of a label
    for point in points:
        x, y = axes.x(point.n), axes.y(point.purity)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="#c0392b" stroke="#ffffff" stroke-width="2"/>')
        # Away from the frontiers, which fall to the right.
        detected = any(frontier.threshold(point.n) <= point.purity for frontier in frontiers)
        left = x + room > axes.right or (not detected and x - room > axes.left)
        low = axes.top + 16 if y < axes.top + 16 else y
        parts.append(
            _text(
                x - 11 if left else x + 11,
                min(low + 4, axes.bottom - 30),
                point.label,
                colour="#8e2a1e",
                anchor="end" if left else "start",
                weight="bold",
                halo=True,
            )
        )
    return parts


def _legend(frontiers: Sequence[Frontier], axes: _Axes) -> list[str]:
    parts = []
    for i, frontier in enumerate(frontiers):
        y = axes.top + 12 + 20 * i
        start = axes.right + 16
        parts.append(_polyline([(start, y), (start + 28, y)], frontier.colour, frontier.dash))
        parts.append(_text(start + 36, y + 4, frontier.label))
    return parts


def _polyline(curve: Sequence[tuple[float, float]], colour: str, dash: str) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in curve)
    style = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{style}/>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(
    x: float,
    y: float,
    content: str,
    *,
    colour: str = "#222222",
    size: int = 12,
    anchor: str = "start",
    weight: str = "normal",
    halo: bool = False,
) -> str:
    behind = ' stroke="#ffffff" stroke-width="3" paint-order="stroke"' if halo else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{colour}"{behind}>{escape(content)}</text>'
    )
