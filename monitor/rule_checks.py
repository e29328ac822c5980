"""Rules against the measures they are about, before a run spends anything on them."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Collection, Sequence

from monitor.attack_when import Attack, AttackWhen
from monitor.decisions import Rule
from monitor.journal import ATTACKS
from monitor.readings import Reading
from monitor.rules import StopWhen


def parse_rules(rules, measures: Sequence) -> tuple[Rule, ...]:
    """The rules as given to a monitor; a string stands for `StopWhen` of that condition.

    Raises
    ------
    ValueError
        For what is no rule, a condition on a measure that is not among `measures` or on an attack that no rule starts,
        the same condition twice, or one name for different attacks.
    """
    given = rules if isinstance(rules, (list, tuple)) else (rules,)
    parsed = tuple(StopWhen(rule) if isinstance(rule, str) else rule for rule in given)
    for rule in parsed:
        if not isinstance(rule, (StopWhen, AttackWhen)):
            raise ValueError(f"`rules` must be conditions, StopWhen or AttackWhen, or a list of them, got {rule!r}.")
    names = [measure.name for measure in measures]
    seen: set[tuple[type, str]] = set()
    for rule in parsed:
        if rule.condition is None:
            continue
        if rule.condition.measure not in [*names, ATTACKS]:
            raise ValueError(
                f"The rule {str(rule.condition)!r} reads the measure {rule.condition.measure!r}, which this monitor "
                f"has not{_meant(rule.condition.measure, names)}. Its measures: {', '.join(names)}."
            )
        key = (type(rule), str(rule.condition))
        if key in seen:
            raise ValueError(
                f"`rules` has two {type(rule).__name__} on {str(rule.condition)!r}; make them one: the journal tells "
                "rules apart by their conditions."
            )
        seen.add(key)
    attacking = [rule for rule in parsed if isinstance(rule, AttackWhen)]
    _check_attacks([attack for rule in attacking for attack in rule.attacks])
    _check_scores(parsed, attacking)
    return parsed


def _check_scores(rules: Sequence[Rule], attacking: Sequence[AttackWhen]) -> None:
    """Refuse conditions on scores of attacks that never come: of none at all, or of those that wait for them."""
    made: list[str] = []
    while True:
        started = [r for r in attacking if r.condition is None or r.condition.measure != ATTACKS or _read(r) in made]
        now = [name for rule in started for name in rule.names]
        if now == made:
            break
        made = now
    for rule in rules:
        if rule.condition is None or rule.condition.measure != ATTACKS:
            continue
        if rule.condition.group and _read(rule) in made:
            raise ValueError(
                f"The rule {str(rule.condition)!r} reads a group of an attack's score, which has none: write "
                f"'{ATTACKS}/{rule.condition.metric}'."
            )
        if _read(rule) not in made:
            raise ValueError(
                f"The rule {str(rule.condition)!r} reads the score of an attack that no rule starts without it"
                f"{_meant(rule.condition.metric, made)}. Attacks that are started: {', '.join(made) or 'none'}. Start "
                'it by a rule of its own: AttackWhen({"steps": 100}, [attack], forget_set), or on the command line '
                "--attacks NAME --attack_when 100."
            )


def _read(rule: Rule) -> str:
    """The attack whose score, or score without the attack, a rule reads."""
    return rule.condition.metric.removesuffix("_baseline")


def _check_attacks(attacks: Sequence[Attack]) -> None:
    by_name: dict[str, Attack] = {}
    for attack in attacks:
        other = by_name.setdefault(attack.name, attack)
        same = (
            other.function == attack.function
            and other.config == attack.config
            and other.forget_set is attack.forget_set
        )
        if not same:
            raise ValueError(
                f"`rules` has different attacks of one name, {attack.name!r}, whose readings would be one curve. Name "
                f'them by a mapping: attacks={{"{attack.name}_quick": ({attack.name}, quick)}}.'
            )


def check_names(rules: Sequence[Rule], names: Collection[str]) -> None:
    """Raise for a condition on a reading that is not among `names`, those of a measurement."""
    for rule in rules:
        if rule.condition is None or rule.condition.measure == ATTACKS or rule.condition.name in names:
            continue
        condition = rule.condition
        same_measure = sorted(name for name in names if name.startswith(f"{condition.measure}/"))
        close = difflib.get_close_matches(condition.name, same_measure, n=5) or same_measure[:20]
        raise ValueError(
            f"The rule {str(condition)!r} reads {condition.name!r}, which the measure {condition.measure!r} does not "
            f"give. Close to it: {', '.join(close)}."
        )


def check_conditions(rules: Sequence[Rule], readings: Sequence[Reading], warn: bool) -> None:
    """Raise for a condition on none of the readings of a measurement; on request warn of one that no value moves."""
    ranges: dict[str, tuple[float, float]] = {}
    for reading in readings:
        ranges.setdefault(reading.name, reading.range)
    check_names(rules, ranges)
    for rule in rules:
        if rule.condition is None or rule.condition.measure == ATTACKS:
            continue
        least, most = ranges[rule.condition.name]
        holds = rule.condition.decided(least, most)
        if warn and holds is not None:
            warnings.warn(
                f"The rule {str(rule.condition)!r} can {'only' if holds else 'never'} hold: {rule.condition.name} lies "
                f"in [{least:g}, {most:g}].",
                stacklevel=2,
            )


def warn_of_idle(rules: Sequence[Rule], max_steps: int, saves: bool) -> None:
    """Warn of rules that cannot act in a run of so many steps, with or without checkpoints."""
    for rule in rules:
        kind, n = (isinstance(rule, AttackWhen) and rule.schedule) or ("", 0)
        if rule.after_step >= max_steps or (kind in ("step", "steps") and n > max_steps):
            why = f"it waits for a later step than the run's last, {max_steps}"
        elif kind == "step" and n <= rule.after_step:
            why = f"it attacks after step {n}, and not up to `after_step`, {rule.after_step}"
        elif kind == "save" and not saves:
            why = "it waits for checkpoints, and the run writes none (`save_strategy` is 'no')"
        else:
            continue
        name = f"attack at {rule}" if isinstance(rule, AttackWhen) else f"stop when {rule.condition}"
        warnings.warn(f"The rule to {name} can never act: {why}.", stacklevel=2)


def _meant(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
