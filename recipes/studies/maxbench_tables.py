"""The tables of the MAxBench study as flat records."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from monitor.geometry.rank_correlation import rank_correlations
from recipes.studies.maxbench_geometries import BASELINES, ORDERED, SINGLE
from recipes.studies.maxbench_scores import Key, Results, grouped, interval

TABLES = {
    "scores": "Scores by concept and method, at the rank with the highest mean MAxBench (mean, sd over splits)",
    "ranks": "MAxBench by rank (mean, sd over splits)",
    "forms": "The offset and the directions: differences of MAxBench, mean over ranks and splits",
    "dimensions": "MAxBench of ranks above one less rank one",
    "unseen": "Mentions of entities that were not fitted on, at the best rank (mean, sd over splits)",
    "correlations": "Spearman correlation of scores over all runs",
    "task": "Can the model name the entity after its context?",
    "ranking": "MAxBench of methods, each at its best rank, mean over concepts",
    "agreement": "Agreement of two judges on the same answers",
}
_SHOWN = ("concept", "fluency", "instruction", "diversity", "axbench", "maxbench")
_CORRELATED = ("concept", "fluency", "instruction", "entity_diversity", "category_diversity")
ALL = "all concepts"


def record(
    table: str, metric: str, group: str, value: float | None, low: float | None = None, high: float | None = None, *,
    key: Key = ("", "", None), sd: float | None = None, n: int | None = None, note: str = "",
) -> dict:  # fmt: skip
    """One number of a table, with the journal's names."""
    return {
        "measure": "concept_recovery", "study": "maxbench", "table": table, "metric": metric, "group": group,
        "method": key[0], "form": key[1], "rank": key[2], "value": value, "low": low, "high": high, "sd": sd, "n": n,
        "valid": value is not None, "note": note,
    }  # fmt: skip


def all_tables(results: Results) -> list[dict]:
    """All records that follow from scored cases."""
    return [
        *scores(results), *ranks(results), *forms(results), *dimensions(results), *unseen(results),
        *correlations(results), *ranking(results),
    ]  # fmt: skip


def best_keys(results: Results, concept: str) -> dict[tuple[str, str], Key]:
    """Of each method and form the case at its best rank."""
    complete = [key for key in results.keys(concept) if results.complete(concept, key)]
    return {name: results.best(concept, keys)[0] for name, keys in grouped(complete, lambda key: key[:2]).items()}


def scores(results: Results) -> list[dict]:
    """(a) All scores of each method at its best rank."""
    found = []
    for concept in results.concepts:
        for key in best_keys(results, concept).values():
            cells = results.over_splits(concept, key)
            for metric in _SHOWN:
                values = [cell.values[metric] for cell in cells if cell.values[metric] is not None]
                low = high = None
                if metric == "maxbench":
                    low, high = interval(*results.mean(concept, key))
                found.append(_over_splits("scores", metric, concept, values, key, low, high))
            for metric in ("strength", "in_range"):
                values = [getattr(cell, metric) for cell in cells if getattr(cell, metric) is not None]
                found.append(_over_splits("scores", metric, concept, values, key))
    return found


def ranks(results: Results) -> list[dict]:
    """(b) MAxBench at every rank."""
    return [
        _over_splits("ranks", "maxbench", concept, [c.values["maxbench"] for c in results.over_splits(concept, key)],
                     key, *interval(*results.mean(concept, key)))
        for concept in results.concepts for key in results.keys(concept)
        if key[2] is not None and results.complete(concept, key)
    ]  # fmt: skip


def forms(results: Results) -> list[dict]:
    """(c) The offset's part: each method's affine form less its linear one, at the same rank and split."""
    found = []
    for concept in results.concepts:
        pairs = _pairs(results, concept)
        for method, of_method in grouped(pairs, lambda key: key[0]).items():
            found.append(_difference("forms", results, concept, of_method, (method, "affine - linear", None)))
        if pairs:
            note = f"mean over {', '.join(dict.fromkeys(key[0] for key in pairs))}"
            found.append(_difference("forms", results, concept, pairs, ("", "affine - linear", None), note))
        isotropic = ("isotropic", "affine", None)
        if pairs and results.complete(concept, isotropic):
            note = "what the directions add: the same affine methods, mean, less all directions around the mean"
            parts = [_mean_of(results, concept, pairs, isotropic)]
            key = ("", "affine - isotropic", None)
            n = len(results.splits[concept])
            found.append(_compared("forms", "maxbench_difference", concept, parts, note, n, key))
    return found


def dimensions(results: Results) -> list[dict]:
    """Several directions against one: of the same method and form, and against the methods of one direction."""
    found = []
    for concept in results.concepts:
        keys = [k for k in results.keys(concept) if results.complete(concept, k) and k[0] not in (*ORDERED, *BASELINES)]
        both = [
            (of_one[0], several)
            for of in grouped([key for key in keys if key[0] not in SINGLE], lambda key: key[:2]).values()
            if (several := [key for key in of if key[2] > 1]) and (of_one := [key for key in of if key[2] == 1])
        ]
        if both:
            parts = [_mean_of(results, concept, several, one) for one, several in both]
            names = ", ".join(dict.fromkeys(one[0] for one, _ in both))
            note = f"the same method and form at rank 1; mean over {names}, their forms and higher ranks"
            found.append(_compared("dimensions", "same_method", concept, parts, note, len(results.splits[concept])))
        single = [key for key in keys if key[0] in SINGLE]
        several = [key for key in keys if key[0] not in SINGLE and key[2] > 1]
        for form in ("affine", "linear"):
            of_form = [key for key in several if key[1] == form]
            if single and of_form:
                parts = [_mean_of(results, concept, of_form, key) for key in single]
                note = f"{form} methods at all higher ranks, mean, less {', '.join(key[0] for key in single)}"
                metric = f"{form}_less_single"
                found.append(_compared("dimensions", metric, concept, parts, note, len(results.splits[concept])))
    return found


def unseen(results: Results) -> list[dict]:
    """(d) Mentions of entities that the geometry was not recovered from."""
    found = []
    for concept in results.concepts:
        for key in best_keys(results, concept).values():
            cells = [cell for cell in results.over_splits(concept, key) if cell.unseen is not None]
            if cells:
                found.append(_over_splits("unseen", "mentions", concept, [cell.unseen for cell in cells], key))
                different = [cell.unseen_entities for cell in cells]
                found.append(_over_splits("unseen", "entities", concept, different, key))
    return found


def correlations(results: Results) -> list[dict]:
    """(e) Spearman correlations of the scores; a run is a method, form, rank, concept and split."""
    columns = {name: [cell.values[name] for cell in results.cells.values()] for name in _CORRELATED}
    return [
        record("correlations", f"{pair.first}, {pair.second}", ALL, pair.rho, n=pair.n,
               note="" if pair.rho is not None else "one of the scores is the same in all runs")
        for pair in rank_correlations(columns)
    ]  # fmt: skip


def ranking(results: Results) -> list[dict]:
    """(g) Methods by their mean over concepts, and the places that they have in resamples."""
    # While a study runs, a concept may have its baselines alone.
    concepts = [c for c in results.concepts if results.splits[c] != ("none",)] or list(results.concepts)
    found: dict[tuple[str, str], tuple[float, Tensor, Tensor]] = {}
    complete = {c: [key for key in results.keys(c) if results.complete(c, key)] for c in concepts}
    for name in dict.fromkeys(key[:2] for key in results.keys()):
        of = {c: [key for key in complete[c] if key[:2] == name] for c in concepts}
        if all(of.values()):
            best = [results.best(concept, keys)[1:] for concept, keys in of.items()]
            value, draws = sum(value for value, _ in best) / len(best), torch.stack([d for _, d in best]).mean(0)
            found[name] = value, draws, draws - draws.mean() + value
    if not found:
        return []
    order = sorted(found, key=lambda name: -found[name][0])
    records = []
    for place, name in enumerate(order, 1):
        value, draws, _ = found[name]
        note = f"over {len(concepts)} concepts"
        records.append(record("ranking", "maxbench", ALL, value, *interval(value, draws), key=(*name, None), note=note))
        low, high = _places(name, found)
        records.append(record("ranking", "place", ALL, float(place), low, high, key=(*name, None)))
    return records


def _places(name: tuple[str, str], found: dict[tuple[str, str], tuple[float, Tensor, Tensor]]) -> tuple[float, float]:
    """95 % of a method's places in resamples, moved or not as in `interval`; of equal scores the best and worst one."""
    level = torch.tensor([0.025, 0.975], dtype=torch.float64)
    ends = []
    for which in (1, 2):
        others = torch.stack([of[which] for other, of in found.items() if other != name] or [found[name][which] - 1])
        own = found[name][which]
        before, not_after = ((test(others, own)).sum(0).double() + 1 for test in (torch.gt, torch.ge))
        ends.append((float(torch.quantile(before, level[0])), float(torch.quantile(not_after, level[1]))))
    return min(low for low, _ in ends), max(high for _, high in ends)


def _pairs(results: Results, concept: str) -> list[Key]:
    """Affine cases that have a linear one beside them."""
    return [
        key for key in results.keys(concept)
        if key[1] == "affine" and results.complete(concept, key)
        and results.complete(concept, (key[0], "linear", key[2]))
    ]  # fmt: skip


def _difference(table: str, results: Results, concept: str, pairs: Sequence[Key], key: Key, note: str = "") -> dict:
    parts = [_mean_of(results, concept, [pair], (pair[0], "linear", pair[2])) for pair in pairs]
    return _compared(table, "maxbench_difference", concept, parts, note, len(results.splits[concept]), key)


def _mean_of(results: Results, concept: str, keys: Sequence[Key], less: Key) -> tuple[float, Tensor]:
    """The mean over cases, less another case; resamples are paired."""
    means = [results.mean(concept, key) for key in keys]
    other = results.mean(concept, less)
    value = sum(value for value, _ in means) / len(means) - other[0]
    return value, torch.stack([draws for _, draws in means]).mean(0) - other[1]


def _compared(
    table: str, metric: str, concept: str, parts: Sequence[tuple[float, Tensor]], note: str, n: int,
    key: Key = ("", "", None),
) -> dict:  # fmt: skip
    value = sum(value for value, _ in parts) / len(parts)
    low, high = interval(value, torch.stack([draws for _, draws in parts]).mean(0))
    return record(table, metric, concept, value, low, high, key=key, n=n, note=note)


def _over_splits(
    table: str, metric: str, concept: str, values: Sequence[float], key: Key, low: float | None = None,
    high: float | None = None,
) -> dict:  # fmt: skip
    value = statistics.fmean(values) if values else None
    sd = statistics.stdev(values) if len(values) > 1 else None
    return record(table, metric, concept, value, low, high, key=key, sd=sd, n=len(values))


def counted(records: Iterable[dict], table: str, chosen: Callable[[dict], bool]) -> tuple[int, int, int, int]:
    """Of a table's differences: above 0, surely above 0, surely below 0 (by their intervals), all."""
    found = [r for r in records if r["table"] == table and chosen(r)]
    return (
        sum(r["value"] > 0 for r in found), sum((r["low"] or 0) > 0 for r in found),
        sum((r["high"] or 0) < 0 for r in found), len(found),
    )  # fmt: skip
