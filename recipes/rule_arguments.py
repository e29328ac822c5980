"""When a run stops by itself and when its model is attacked: the arguments, and the rules they make."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from monitor.attacks.sampling import sampling as sampling_attack
from monitor.rule_checks import parse_rules
from monitor.rules import StopWhen
from monitor.stimuli.forget_set import ForgetSet
from recipes.attacks import ATTACKS, Attack, chosen, wants_sampling


@dataclass
class RuleArguments:
    """What stops a run or starts attacks.

    Parameters
    ----------
    stop_when : list of str, optional
        Conditions on readings, each of which stops the run: ``"fragmentation/knowledge_z < 2"``,
        ``"behaviour/retain_nll > 1.5 * start"``, ``"attacks/membership < 0.55"``; see `monitor.rules`.
    patience, after_step : int
        Measurements in a row at which a condition has to hold, and the step after which they count.
    attacks : list of str, optional
        Attacks on the model in training, of `recipes.attacks.ATTACKS`, or "all". None by default.
    attack_when : str
        "end", "save", a condition as above, or a number of steps: ``500`` is every 500 steps.
    quick_attacks : bool
        The attacks' small settings instead of the papers'.
    """

    stop_when: list[str] | None = field(
        default=None, metadata={"help": "Conditions that stop the run, as 'behaviour/retain_nll > 1.5 * start'."}
    )
    patience: int = field(default=1, metadata={"help": "Measurements in a row at which a condition has to hold."})
    after_step: int = field(default=0, metadata={"help": "Conditions count after this step."})
    attacks: list[str] | None = field(
        default=None, metadata={"help": "Attacks on the model (default: none).", "choices": [*ATTACKS, "all"]}
    )
    attack_when: str = field(
        default="end", metadata={"help": "When to attack: end, save, a condition, or every so many steps."}
    )
    quick_attacks: bool = field(default=False, metadata={"help": "Small attacks instead of the papers' settings."})


def build_rules(
    arguments: RuleArguments,
    forget_set: ForgetSet,
    measures: Sequence,
    seed: int,
    sampled: Sequence[str],
    sampling: Callable[[], Sequence[Attack]],
) -> list:
    """The rules of a run; nothing where none was asked for.

    Parameters
    ----------
    arguments : RuleArguments
    forget_set : ForgetSet
    measures : sequence of Measure
        Of the run, whose readings conditions are about.
    seed : int
    sampled : sequence of str
        Names of the attacks by sampling, if they are asked for.
    sampling : callable
        Makes these attacks, from a model that it loads. Called last, when all else is known to be right.

    Raises
    ------
    ValueError
        For a condition that cannot be read or is about no measure of the run, an unknown attack, or settings without
        what they are for.
    """
    conditions = [arguments.stop_when] if isinstance(arguments.stop_when, str) else arguments.stop_when or []
    streak = {"patience": arguments.patience, "after_step": arguments.after_step}
    rules: list = [StopWhen(condition, **streak) for condition in conditions]
    if arguments.attacks:
        from monitor.attack_when import AttackWhen

        attacks = chosen(arguments.attacks, quick=arguments.quick_attacks, seed=seed)
        when = str(arguments.attack_when)
        if when not in ("end", "save") and not re.search("[<>=!]", when) and not re.fullmatch(r"0*[1-9]\d*", when):
            raise ValueError(
                "`attack_when` must be end, save, a condition such as 'behaviour/forget_nll > 8', or a number of steps "
                f"above 0, got {when!r}."
            )
        timed = {"steps": int(when)} if re.fullmatch(r"\d+", when) else when
        options = {} if isinstance(timed, dict) or timed in ("end", "save") else streak
        named = {attack.name: (attack.function, attack.config) for attack in attacks}
        wanted = sampled if wants_sampling(arguments.attacks) else ()
        planned = AttackWhen(timed, {**named, **dict.fromkeys(wanted, sampling_attack)}, forget_set, **options)
        parse_rules([*rules, planned], measures)
        if wanted:
            named |= {attack.name: (attack.function, attack.config) for attack in sampling()}
        rules.append(AttackWhen(timed, named, forget_set, **options))
    elif arguments.attack_when != "end" or arguments.quick_attacks:
        raise ValueError(
            "`attack_when` and `quick_attacks` are for attacks: name some with --attacks, or leave them out."
        )
    conditional = any(rule.condition is not None for rule in rules)
    if not conditional and (arguments.patience != 1 or arguments.after_step != 0):
        raise ValueError(
            "`patience` and `after_step` are for conditions: give --stop_when, or a condition as --attack_when, or "
            "leave them out."
        )
    return rules
