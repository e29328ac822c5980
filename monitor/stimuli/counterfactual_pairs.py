"""A forget set as counterfactual stimuli: what is to be forgotten against the same told of invented names."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from monitor.stimuli.counterfactual import CounterfactualSet
from monitor.stimuli.counterfactual_file import MIN_CELLS, same_text
from monitor.stimuli.encoding import qa_answer, qa_prompt
from monitor.stimuli.forget_set import Pair


def counterfactual_from_pairs(pairs: Sequence[Pair], neutral: Sequence[Pair] = ()) -> CounterfactualSet:
    """A forget set as counterfactual pairs: each question with its answer against the same told of invented names.

    Parameters
    ----------
    pairs : sequence of Pair
        With anonymised variants, as in ``load_forget_set(...).split("forget")``. Those of which a variant equals the
        original are left out.
    neutral : sequence of Pair, optional
        Pairs that do not name the concept, such as the retain split; read as they stand.

    Returns
    -------
    CounterfactualSet
        Positive i (``"original"``) is ``"{question}\\nAnswer: {answer}"`` of the i-th pair that is left, negative i
        (``"anonymised"``) the same of its variant number i mod K; the cell is the pair's id.

    Raises
    ------
    ValueError
        A pair has no variants, or fewer than 10 are left.

    Warns
    -----
    UserWarning
        Naming the pairs that are left out.

    Notes
    -----
    Taking the variants in turn lets no invented name stand for "anonymised" by itself. The concept's own names do
    recur from cell to cell, though: folds grouped by cell do not hide them, and a probe that only reads names can
    separate these pairs. What it detects is "this concept's names or others", in a random model too: compare with
    the model's own reference.
    """

    def text(question: str, answer: str) -> str:
        return qa_prompt(question) + qa_answer(answer)

    bare = [pair.id for pair in pairs if not pair.anonymized]
    if bare:
        raise ValueError(
            f"pairs must have anonymised variants; none for {_some(bare)}. Add `anonymized` or an entity table, or "
            "leave them out."
        )
    kept, same = [], []
    for pair in pairs:
        original = same_text(text(pair.question, pair.answer))
        unchanged = any(same_text(text(*variant)) == original for variant in pair.anonymized)
        (same if unchanged else kept).append(pair)
    left_out = f"{len(same)} of {len(pairs)} left out, a variant equals the original: {_some([p.id for p in same])}"
    if len(kept) < MIN_CELLS:
        raise ValueError(
            f"pairs must be at least {MIN_CELLS} that anonymisation changes, for grouped folds; got {len(kept)}"
            + (f" ({left_out})" if same else "") + ". Give more pairs."
        )  # fmt: skip
    if same:
        warnings.warn(f"pairs: {left_out}", stacklevel=2)
    return CounterfactualSet(
        positive=tuple(text(pair.question, pair.answer) for pair in kept),
        negative=tuple(text(*pair.anonymized[i % len(pair.anonymized)]) for i, pair in enumerate(kept)),
        cells=tuple(pair.id for pair in kept),
        neutral=tuple(text(pair.question, pair.answer) for pair in neutral),
        neutral_cells=tuple(pair.id for pair in neutral),
        positive_name="original",
        negative_name="anonymised",
    )


def _some(ids: Sequence[str]) -> str:
    return ", ".join(ids[:5]) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
