"""The tables of the MAxBench study as text, and what follows from them in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from recipes.studies.maxbench_arguments import MaxBenchArguments
from recipes.studies.maxbench_geometries import METHODS
from recipes.studies.maxbench_tables import TABLES, counted
from recipes.summary import aligned, number

_PAPER_CONCEPTS = 6


def print_tables(records: Sequence[dict], arguments: MaxBenchArguments) -> None:
    """Print every table that has records, and the sentences."""
    # A curve has no sigma, and so no share of points in range: of the scores only those that all methods have count.
    splits = {r["group"]: r["n"] for r in records if (r["table"], r["metric"]) == ("scores", "maxbench")}
    print(
        f"MAxBench on {arguments.model}, layer {arguments.layer}: {arguments.points} points x {arguments.test_prompts} "
        f"instructions x {arguments.max_new_tokens} tokens a case; splits: "
        f"{', '.join(f'{name} {n}' for name, n in splits.items())}"
    )
    for name, title in TABLES.items():
        of_table = [r for r in records if r["table"] == name]
        if of_table:
            print(f"\n{title}\n")
            print(aligned(_rows(name, of_table)))
    notes = list(dict.fromkeys(r["note"] for r in records if r["note"]))
    methods = dict.fromkeys(r["method"] for r in records if r["method"])
    print()
    for note in [*notes, *(f"{name}: {METHODS[name]}" for name in methods)]:
        print(f"- {note}")
    print()
    for sentence in in_words(records):
        print(sentence)


def _rows(name: str, records: Sequence[dict]) -> list[tuple[str, ...]]:
    if name in ("forms", "dimensions", "ranking", "correlations", "agreement"):
        rows = [("", "what", "value [95 %]", "n")]
        for r in records:
            what = " ".join(part for part in (r["method"], r["form"], r["metric"]) if part)
            value = number(r["value"], r["low"], r["high"])
            if r["metric"] == "place":
                value = f"{r['value']:.0f} [{r['low']:.0f}, {r['high']:.0f}]"
            rows.append((r["group"], what, value, "" if r["n"] is None else str(r["n"])))
        return rows
    ranked = name == "ranks"  # one column a rank, else one a metric
    columns = sorted({r["rank"] for r in records}) if ranked else list(dict.fromkeys(r["metric"] for r in records))
    by_row: dict[tuple, dict] = {}
    for r in records:
        row = (r["group"], r["method"], r["form"], "" if ranked or r["rank"] is None else str(r["rank"]))
        by_row.setdefault(row, {})[r["rank"] if ranked else r["metric"]] = r
    rows = [("concept", "method", "form", "rank", *map(str, columns))]
    rows += [(*row, *(_cell(found.get(column)) for column in columns)) for row, found in by_row.items()]
    empty = [i for i in range(4) if not any(row[i] for row in rows[1:])]
    return [tuple(cell for i, cell in enumerate(row) if i not in empty) for row in rows]


def _cell(found: dict | None) -> str:
    if found is None or found["value"] is None:
        return "-"
    if found["table"] == "task":
        return number(found["value"], found["low"], found["high"])
    digits = 1 if abs(found["value"]) >= 10 else 2
    spread = "" if found["sd"] is None else f" ± {found['sd']:.{digits}f}"
    return f"{found['value']:.{digits}f}{spread}"


def in_words(records: Sequence[dict]) -> list[str]:
    """The paper's questions, answered with the counts and the intervals behind them."""
    sentences = []
    for form, what, gain in (
        ("affine - linear", "Affine beats linear", "the offset is a gain"),
        ("affine - isotropic", "Affine methods beat the isotropic baseline", "the directions are a gain"),
    ):
        wins = counted(records, "forms", lambda r, form=form: (r["method"], r["form"]) == ("", form))
        if wins[3]:
            sentences.append(_won(what, gain, "loss", *wins))
    questions = {
        "same_method": "Several dimensions beat one of the same method",
        "affine_less_single": "Affine methods of several dimensions beat single directions",
        "linear_less_single": "Linear methods of several dimensions beat single directions",
    }
    for metric, what in questions.items():
        counts = counted(records, "dimensions", lambda r, metric=metric: r["metric"] == metric)
        if counts[3]:
            sentences.append(_won(what, "it is a gain", "loss", *counts))
    places = {(r["method"], r["form"]): r for r in records if r["table"] == "ranking" and r["metric"] == "place"}
    if len(places) > 1:
        (first, form), best = min(places.items(), key=lambda item: item[1]["value"])
        named = first if form == "none" else f"{first} ({form})"
        low, high = round(best["low"]), round(best["high"])
        sure = "surely first" if high == 1 else f"its place is {low} to {high} in 95 % of resamples"
        best_of = f"Best of {len(places)} methods and forms by MAxBench"
        scores = {r["value"] for r in records if r["table"] == "ranking" and r["metric"] == "maxbench"}
        told = f"{named}; {sure}" if len(scores) > 1 else "none, all are equal"
        sentences.append(f"{best_of}: {told}.")
    tasks = [r for r in records if r["table"] == "task" and r["metric"] == "top5"]
    if tasks:
        weak = [f"{r['group']} ({r['value']:.0%})" for r in tasks if r["value"] < 0.7]
        rest = f"; not for {', '.join(weak)}: where it cannot, there is little to recover" if weak else ""
        sentences.append(
            f"Of {len(tasks)} concepts that it was asked about, the model names the entity among its five likeliest "
            f"tokens in 70 % of contexts or more for {len(tasks) - len(weak)}{rest}."
        )
    judged = [r for r in records if r["table"] == "agreement" and r["metric"].endswith("_exact")]
    if judged and not any(r["n"] for r in judged):
        sentences.append("The second judge gave no rating that could be read: another model is needed for that.")
    return sentences


def _won(what: str, gain: str, loss: str, above: int, surely: int, below: int, n: int) -> str:
    text = f"{what} for {above} of {n} concepts (95 % intervals: {gain} for {surely}, a {loss} for {below})"
    return text + ("." if n >= _PAPER_CONCEPTS else f"; the paper has {_PAPER_CONCEPTS} concepts.")
