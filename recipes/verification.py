"""Did the run forget? The published criterion, and the cases in which it is met or missed for another reason.

A run counts as verified in arXiv 2611.05272 (Tables 13-15) when after it the ROUGE-L of the forget answers is below
0.10 and that of the retain answers at least 0.80 of the base model's. The first half also holds for a model that says
nothing any more (0.000, as gradient ascent scores there on every concept), and for one that never said the answers
(0.062 on Harry Potter for Llama-3-8B there, before any unlearning). Here these have names of their own.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from monitor.generation import greedy_answers
from monitor.geometry.rouge import rouge_l
from monitor.geometry.statistics import mean_interval
from monitor.ranks import barrier, rank
from monitor.stimuli.encoding import asked_prompt
from monitor.stimuli.forget_set import Pair

FORGET_LIMIT = 0.10  # forget answers below this count as no longer said
RETAIN_SHARE = 0.80  # of the base model's retain ROUGE-L, to be kept
_ROUNDING = 1e-9  # a mean of exactly the share counts as kept
OUTCOMES = ("forgotten", "not forgotten", "collapsed", "cannot tell")


class Mean(NamedTuple):
    """A mean over pairs with its 95 % percentile bootstrap interval; None where a single pair gives none."""

    value: float
    low: float | None
    high: float | None


class AnswerScores(NamedTuple):
    """ROUGE-L F1 of the greedy answers, float64 in [0, 1], one a pair; retain is None where there are no such pairs."""

    forget: Tensor
    retain: Tensor | None


@dataclass(frozen=True)
class Verdict:
    """What the criterion says of a run, and why.

    Attributes
    ----------
    outcome : str
        One of `OUTCOMES`.
    reason : str
        The facts that decide it, in words.
    forget_before, forget_after, retain_before, retain_after : Mean
        ROUGE-L means; the retain ones are None without retain pairs.
    close : tuple of str
        Limits that lie within the interval of what was compared with them: other pairs might have decided otherwise.
    """

    outcome: str
    reason: str
    forget_before: Mean
    forget_after: Mean
    retain_before: Mean | None
    retain_after: Mean | None
    close: tuple[str, ...] = ()


def answer_scores(model: nn.Module, tokenizer, pairs: Sequence[Pair], **options) -> Tensor:
    """ROUGE-L F1 of the model's greedy answers to the pairs' questions against the pairs' answers.

    Parameters
    ----------
    model, tokenizer, **options
        As for `monitor.generation.greedy_answers`; with several ranks all must call.
    pairs : sequence of n Pair
        Of each, ``question`` and ``answer`` are read.

    Returns
    -------
    Tensor of shape (n,), float64, on the CPU, in [0, 1]; higher means more of the answer is said.

    Raises
    ------
    ValueError
        If there is no pair, or as `greedy_answers` and `rouge_l` do; before anything is decoded.

    Notes
    -----
    Questions are asked in the tokenizer's chat template where it has one (`monitor.stimuli.encoding.asked_prompt`).

    Only an answer's first line is compared, unless one of `pairs` has an answer of several lines. The published scores
    are of 50 tokens whatever they hold, so a right answer that rambles on scores lower there than here. It does here
    as well where the model runs on in the same line, since F1 counts every word too many: read the score next to
    ``exact_memorisation``.
    """
    if not pairs:
        raise ValueError("`pairs` must hold at least one pair, got none")
    answers = [pair.answer for pair in pairs]
    rouge_l(answers, answers)  # an answer without words is found now, not after the model has spoken
    one_line = not any("\n" in answer.strip() for answer in answers)
    prompts = [asked_prompt(tokenizer, pair.question) for pair in pairs]
    return rouge_l(greedy_answers(model, tokenizer, prompts, **{"one_line": one_line} | options), answers)


def scores_now(model: nn.Module, tokenizer, forget: Sequence[Pair], retain: Sequence[Pair], **options) -> AnswerScores:
    """`answer_scores` of both splits; `retain` may be empty."""
    return AnswerScores(
        answer_scores(model, tokenizer, forget, **options),
        answer_scores(model, tokenizer, retain, **options) if retain else None,
    )


def scores_at_start(
    model: nn.Module,
    tokenizer,
    forget: Sequence[Pair],
    retain: Sequence[Pair],
    path: str | os.PathLike,
    *,
    resumed: bool = False,
    **options,
) -> AnswerScores | None:
    """What the model says before the first step, kept in a file so that a resumed run compares with the true start.

    Parameters
    ----------
    model, tokenizer, forget, retain, **options
        As for `scores_now`. `model` has the weights that training starts from and is not asked when `resumed`.
    path : path-like
        JSON file; its folder is made.
    resumed : bool
        Read the file instead of asking the model, whose weights are not those of the start any more.

    Returns
    -------
    AnswerScores or None
        None, with a warning, if a resumed run has no such file or one of other pairs: the run cannot be judged then.
    """
    path, pairs = Path(path), _fingerprint(forget, retain)
    if resumed:
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            kept = {}
        if kept.get("pairs") != pairs:
            why = "is of other pairs" if kept else "is missing"
            warnings.warn(
                f"{path} {why}: what the model said before the first step is not known, so the run cannot be judged "
                "by it. Start the run anew to have it judged.",
                stacklevel=2,
            )
            return None
        retained = kept["retain"]
        return AnswerScores(_float64(kept["forget"]), None if retained is None else _float64(retained))
    scores = scores_now(model, tokenizer, forget, retain, **options)
    if rank() == 0:
        retained = None if scores.retain is None else scores.retain.tolist()
        text = json.dumps({"pairs": pairs, "forget": scores.forget.tolist(), "retain": retained}) + "\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    barrier()
    return scores


def verify(
    forget_before: Tensor,
    forget_after: Tensor,
    retain_before: Tensor | None,
    retain_after: Tensor | None,
    collapsed: bool | None = None,
) -> Verdict:
    """Judge a run by what the model said before and after it.

    Parameters
    ----------
    forget_before, forget_after : Tensor of shape (n,)
        ROUGE-L F1 of the answers to the forget questions, as `answer_scores` gives them, of the same pairs in the same
        order.
    retain_before, retain_after : Tensor of shape (m,), or None for both
        The same of the retain questions.
    collapsed : bool, optional
        Whether the behaviour measure's ``collapsed`` reading is 1 after the run and was not before it; None where it
        was not read.

    Returns
    -------
    Verdict
        With F and R the means, the outcome is the first that holds:

        - "not forgotten": F before ≥ 0.10 and F after ≥ 0.10. The answers are still said, whatever else happened.
        - "collapsed": R after < 0.80 × R before, where R before ≥ 0.10; where it is not, or there are no retain pairs,
          `collapsed`. A low F then shows a broken model. Likelihoods do not overrule retain answers that are said: a
          forget NLL beyond a uniform guess is forgetting, if the rest is kept.
        - "cannot tell": F before < 0.10, nothing to lose; or R before < 0.10 or no retain pairs, where 0.80 × R is met
          by any text. What counts as not saying the forget answers counts as not saying the retain answers.
        - "forgotten": F after < 0.10 and R after ≥ 0.80 × R before, both of which could have come out otherwise.

    Raises
    ------
    ValueError
        For scores that are not one-dimensional, empty, of different lengths, outside [0, 1], or one of the retain
        scores without the other.

    Notes
    -----
    "Forgotten" is of outputs: the criterion asks what the model says, not what it encodes or can be brought to say.

    The criterion does not tell of WHP runs. WHP teaches an anonymised answer to each question instead of erasing the
    true one, and the two share words, so ROUGE-L may even rise; arXiv 2611.05272 (App. B.5) gives such runs a symbol of
    their own and leaves them out of its statistics. "Not forgotten" then says nothing about the names that were
    replaced.
    """
    _check("forget", forget_before, forget_after)
    if (retain_before is None) != (retain_after is None):
        given, missing = ("after", "before") if retain_before is None else ("before", "after")
        raise ValueError(f"`retain_{missing}` is None and `retain_{given}` is not: give both, or None for both")
    f0, f1 = _mean(forget_before), _mean(forget_after)
    r0 = r1 = None
    close = []
    if _inside(FORGET_LIMIT, f1):
        close.append(f"{FORGET_LIMIT:.2f} of the forget answers")
    if retain_before is not None and retain_after is not None:
        _check("retain", retain_before, retain_after)
        r0, r1 = _mean(retain_before), _mean(retain_after)
        # Paired: what a pair keeps beyond the share asked for.
        if _inside(0.0, _mean(retain_after.double() - RETAIN_SHARE * retain_before.double())):
            close.append(f"{RETAIN_SHARE:.2f} of the retain answers")
    outcome, reason = _judge(f0.value, f1.value, r0 and r0.value, r1 and r1.value, bool(collapsed))
    return Verdict(outcome, reason, f0, f1, r0, r1, tuple(close))


def _judge(f0: float, f1: float, r0: float | None, r1: float | None, collapsed: bool) -> tuple[str, str]:
    retain_tells = r0 is not None and r1 is not None and r0 >= FORGET_LIMIT
    retain_lost = retain_tells and r1 < RETAIN_SHARE * r0 - _ROUNDING
    # What the model says of the rest decides; likelihoods only where that tells nothing.
    broken = ""
    if retain_lost:
        broken = "retain answers were lost"
    elif collapsed and not retain_tells:
        broken = "the answers' likelihood is that of a broken model"
    if f0 >= FORGET_LIMIT and f1 >= FORGET_LIMIT:
        return "not forgotten", "the forget answers are still said" + (f", though {broken}" if broken else "")
    if broken:
        return "collapsed", broken
    if f0 < FORGET_LIMIT:
        return "cannot tell", "the forget answers scored that low at the start already, so there was nothing to lose"
    if r0 is None:
        return "cannot tell", "there are no retain pairs to show that the rest was kept"
    if not retain_tells:
        return (
            "cannot tell",
            "the retain answers scored below 0.10 at the start already, so nothing shows that the rest was kept",
        )
    return "forgotten", "the forget answers are no longer said, the retain answers are"


def verdict_sentence(verdict: Verdict) -> str:
    """The verdict in words, with what it leaves open."""
    said = f"forget answers {verdict.forget_before.value:.2f} -> {verdict.forget_after.value:.2f}"
    if verdict.retain_before is not None and verdict.retain_after is not None:
        said += f", retain answers {verdict.retain_before.value:.2f} -> {verdict.retain_after.value:.2f}"
    text = f"Verification: {verdict.outcome}: {verdict.reason} (ROUGE-L: {said}). "
    criterion = f"forget below {FORGET_LIMIT:.2f} and retain at least {RETAIN_SHARE:.2f} of the start"
    if verdict.outcome == "forgotten":
        text += (
            f"This meets the published criterion, {criterion}. It is about what the model says when it is asked "
            "plainly, not about what it still encodes."
        )
    elif verdict.outcome == "not forgotten":
        text += f"The published criterion asks for {criterion}."
    elif verdict.outcome == "collapsed":
        text += "A low forget score of such a model shows damage, not forgetting."
    else:
        text += f"The published criterion, {criterion}, shows nothing on these pairs."
    if verdict.close:
        text += f" Close: the limit of {' and that of '.join(verdict.close)} lies within the 95 % interval."
    return text


def verdict_lines(verdict: Verdict, step_start: int, step_end: int) -> list[dict]:
    """The scores as lines of a journal, for `recipes.summary.summarise`.

    Returns
    -------
    list of dict
        Of measure "behaviour" and the metrics "forget_rouge_l" and "retain_rouge_l", one at either step. The note of
        the forget line at the end holds outcome and reason.
    """
    lines = []
    for metric, start, end, note in (
        ("forget_rouge_l", verdict.forget_before, verdict.forget_after, f"{verdict.outcome}: {verdict.reason}"),
        ("retain_rouge_l", verdict.retain_before, verdict.retain_after, ""),
    ):
        if start is not None and end is not None:
            lines += [_line(step_start, metric, start, ""), _line(step_end, metric, end, note)]
    return lines


def _line(step: int, metric: str, mean: Mean, note: str) -> dict:
    return {
        "step": step, "epoch": None, "time": None, "measure": "behaviour", "metric": metric, "group": "", "layer": None,
        "value": mean.value, "low": mean.low, "high": mean.high, "valid": True, "note": note,
    }  # fmt: skip


def _mean(scores: Tensor) -> Mean:
    low, high = mean_interval(scores)
    return Mean(float(scores.double().mean()), *(x if math.isfinite(x) else None for x in (low, high)))


def _inside(limit: float, mean: Mean) -> bool:
    return mean.low is not None and mean.high is not None and mean.low < limit < mean.high


def _check(name: str, before: Tensor, after: Tensor) -> None:
    for when, scores in (("before", before), ("after", after)):
        if scores.ndim != 1 or scores.numel() == 0:
            raise ValueError(f"`{name}_{when}` must be one score a pair, got shape {tuple(scores.shape)}")
        if not bool(((scores >= 0) & (scores <= 1)).all()):
            raise ValueError(f"`{name}_{when}` must lie in [0, 1], as ROUGE-L does, got {scores.tolist()}")
    if before.shape != after.shape:
        raise ValueError(
            f"`{name}_before` and `{name}_after` must be of the same pairs, got {before.numel()} and {after.numel()}"
        )


def _fingerprint(forget: Sequence[Pair], retain: Sequence[Pair]) -> str:
    texts = [[(pair.question, pair.answer) for pair in pairs] for pairs in (forget, retain)]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def _float64(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
