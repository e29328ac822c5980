"""What a run's rules decide, and when attacks are due. Their state is the journal's: it is replayed, never stored."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from monitor.attack_when import Attack, AttackWhen
from monitor.journal import ATTACKS, RULES, Journal
from monitor.ranks import from_first
from monitor.readings import Reading
from monitor.rules import StopWhen, Streak, values_by_name

Rule = StopWhen | AttackWhen
Due = list[tuple[Attack, str]]  # attacks to run now, and what asks for each


class Decisions:
    """The rules of one run and how far each has come.

    Parameters
    ----------
    rules : sequence of StopWhen or AttackWhen
    journal : Journal
        Of the run, up to the step it continues from.
    first : bool
        Whether this is the first process. Its journal is complete, and only it decides; what it decides is broadcast,
        so all processes must call `follow` and `resume` together.
    """

    def __init__(self, rules: Sequence[Rule], journal: Journal, first: bool) -> None:
        self.rules = tuple(rules)
        self.journal = journal
        self.first = first
        self._streaks = {
            index: Streak(rule.condition, rule.patience, rule.after_step)
            for index, rule in enumerate(self.rules)
            if rule.condition is not None
        }
        self._attacked: set[int] = set()
        self._acting: list[int] = []
        if first:
            self._replay()

    def _replay(self) -> None:
        """Take the measurements and decisions that the journal holds, as a resumed run must."""
        by_step = sorted(self.journal.lines, key=_step)  # stable: within a step the headline stays first
        for step, group in groupby(by_step, key=_step):
            lines = list(group)
            values = values_by_name(_reading(line) for line in lines if line["measure"] != RULES)
            attacked = _decided(lines, "attack")
            for index, streak in self._streaks.items():
                streak.update(step, values)
                if isinstance(self.rules[index], AttackWhen) and str(streak.condition) in attacked:
                    self._begin_anew(index)

    def decide(self, step: int, readings: Sequence[Reading]) -> list[Reading]:
        """On the first process: which rules act on a measurement, as a reading each for the journal.

        What an attack found is a measurement, too: it moves the rules on that attack's score, and no others.
        """
        values = values_by_name(readings)
        self._acting = []
        records = []
        for index, streak in self._streaks.items():
            rule = self.rules[index]
            attacks = isinstance(rule, AttackWhen)
            if not streak.update(step, values) or (attacks and rule.once and index in self._attacked):
                continue
            self._acting.append(index)
            action = "attack" if attacks else "stop"
            records.append(Reading(RULES, action, 1.0, group=str(streak.condition), note=streak.evidence()))
            if attacks:
                self._begin_anew(index)
        return records

    def _begin_anew(self, index: int) -> None:
        self._attacked.add(index)
        self._streaks[index].held = []

    def follow(self, control, step: int) -> Due:
        """On all processes: do what was last decided. Sets `control` to stop; returns the attacks to run."""
        if not self.rules:
            return []
        acting, self._acting = self._acting, []
        due: Due = []
        for index in from_first(acting):
            rule = self.rules[index]
            if isinstance(rule, StopWhen):
                self._stop(control, f"The rule {str(rule.condition)!r} stops training at step {step}.")
            else:
                due += _all_of(rule)
        return due

    def resume(self, control, step: int) -> Due:
        """On all processes: take up what had been decided at the checkpoint the run resumes from.

        That is stopping, and attacks that a kill cut off. Only what comes after a checkpoint of its step can be cut off
        so that the run resumes there: attacks on save, and on a measurement taken on save or at an epoch's end.
        """
        if not self.rules:
            return []
        lines = [line for line in self.journal.lines if line["step"] == step]
        stopped, attacked = _decided(lines, "stop"), _decided(lines, "attack")
        done = {line["metric"] for line in lines if line["measure"] == ATTACKS}
        stops = [i for i, r in enumerate(self.rules) if isinstance(r, StopWhen) and str(r.condition) in stopped]
        unfinished = [
            (i, name)
            for i, rule in enumerate(self.rules)
            if isinstance(rule, AttackWhen) and (rule.due("save", step) or str(rule.condition) in attacked)
            for name in rule.names
            if name not in done
        ]
        stops, unfinished = from_first((stops, unfinished))
        for index in stops:
            self._stop(
                control,
                f"The rule {str(self.rules[index].condition)!r} had stopped this run at step {step}, and stops it "
                "again after one more step, before which the Trainer cannot be stopped. To go on, take the rule out.",
            )
        return [(a, trigger) for i, name in unfinished for a, trigger in _all_of(self.rules[i]) if a.name == name]

    def scheduled(self, event: str, step: int) -> Due:
        """The attacks due by schedule at an event: ``"step"``, ``"save"`` or ``"end"``."""
        return [
            due
            for rule in self.rules
            if isinstance(rule, AttackWhen) and rule.due(event, step)
            for due in _all_of(rule)
        ]

    def _stop(self, control, message: str) -> None:
        if self.first and not control.should_training_stop:
            warnings.warn(message, stacklevel=2)
        control.should_training_stop = True


def _all_of(rule: AttackWhen) -> Due:
    return [(attack, str(rule)) for attack in rule.attacks]


def _step(line: Mapping) -> int:
    return line["step"]


def _decided(lines: Iterable[Mapping], action: str) -> set[str]:
    return {line["group"] for line in lines if (line["measure"], line["metric"]) == (RULES, action)}


def _reading(line: Mapping) -> Reading:
    return Reading(line["measure"], line["metric"], line["value"], group=line["group"], valid=line["valid"])
