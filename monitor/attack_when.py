"""When to attack a model that is being trained: at a step, at checkpoints, at the end, or when readings say so."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from inspect import signature
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from monitor.attacks.result import AttackResult
from monitor.rules import FORMS, Condition, check_counts
from monitor.stimuli.forget_set import ForgetSet

_WHEN = '`when` must be a condition, "save", "end", {"step": n} or {"steps": n} with n > 0'


@dataclass(frozen=True)
class Attack:
    """An attack function with its settings and the pairs it asks for.

    ``function(model, tokenizer, forget_set[, config], progress=...) -> AttackResult``; the config is left out where
    none was given. `name` is that of its readings, ``attacks/<name>``.
    """

    name: str
    function: Callable[..., AttackResult]
    config: Any
    forget_set: ForgetSet

    def run(self, model, tokenizer, progress: bool) -> AttackResult:
        settings = () if self.config is None else (self.config,)
        return self.function(model, tokenizer, self.forget_set, *settings, progress=progress)


class AttackWhen:
    """Attack the model while it is trained, and leave the training as it was.

    Parameters
    ----------
    when : str or mapping
        A condition (as in `StopWhen`): when it has held for `patience` measurements in a row. ``"save"``: after every
        checkpoint. ``"end"``: after the last step, before a best model is loaded. ``{"step": n}``: after step n.
        ``{"steps": n}``: after every n-th step.
    attacks : sequence or mapping
        Attack functions or pairs of function and config, as in ``[membership, (gcg, GCGConfig.quick())]``: called as
        ``function(model, tokenizer, forget_set[, config], progress=...)``, they return an AttackResult and leave the
        weights as they were (`monitor.attacks.intact.intact`). An attack is named by its function; a mapping from names
        to functions or pairs names them otherwise, as is needed where one function is used with two configs.
    forget_set : ForgetSet
        What the attacks ask for.
    patience, after_step
        As in `StopWhen`. `after_step` holds for schedules, too; patience is for conditions only.
    once : bool, default True
        Of a condition: attack the first time only. False: the count of measurements in a row begins anew after each
        attack, so with patience 1 there is one at every measurement at which the condition holds. Schedules say
        themselves how often.

    Raises
    ------
    ValueError
        For a `when` of another form, no attacks, attacks that cannot be called or named, two attacks of one name, or
        patience with a schedule.
    """

    def __init__(
        self,
        when: str | Condition | Mapping[str, int],
        attacks: Sequence | Mapping[str, Any],
        forget_set: ForgetSet,
        *,
        patience: int = 1,
        after_step: int = 0,
        once: bool = True,
    ) -> None:
        if not isinstance(forget_set, ForgetSet):
            raise ValueError(
                f"`forget_set` must be a ForgetSet, got {type(forget_set).__name__}; read a file by `load_forget_set`."
            )
        check_counts(patience, after_step)
        if not isinstance(once, bool):
            raise ValueError(f"`once` must be True or False, got {once!r}.")
        self.condition, self.schedule = _parse_when(when)
        if self.condition is None and patience != 1:
            raise ValueError(f"`patience` is for conditions; {self} attacks on schedule, got patience={patience}.")
        self.attacks = tuple(Attack(*parts, forget_set) for parts in _named(attacks))
        if len(set(self.names)) < len(self.names):
            raise ValueError(
                f"`attacks` must have distinct names, got {list(self.names)}. Name them by a mapping: "
                '{"membership_quick": (membership, quick), ...}.'
            )
        self.patience = patience
        self.after_step = after_step
        self.once = once

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(attack.name for attack in self.attacks)

    def due(self, event: str, step: int) -> bool:
        """Whether the schedule asks for the attacks at an event: ``"step"``, ``"save"`` or ``"end"``."""
        if self.schedule is None or step <= self.after_step:
            return False
        kind, n = self.schedule
        if event == "step":
            return (kind == "step" and step == n) or (kind == "steps" and step % n == 0)
        return kind == event

    def __str__(self) -> str:
        """What starts the attacks, in words."""
        if self.schedule is None:
            return str(self.condition)
        kind, n = self.schedule
        return {"step": f"step {n}", "steps": f"every {n} steps"}.get(kind, kind)


def _parse_when(when) -> tuple[Condition | None, tuple[str, int] | None]:
    """A condition, or the kind of schedule and its n (0 where it has none)."""
    if isinstance(when, Condition):
        return when, None
    if isinstance(when, str):
        if when in ("save", "end"):
            return None, (when, 0)
        if not re.search("[<>=!]", when):
            raise ValueError(f"{_WHEN}, got {when!r}. {FORMS}")
        return Condition.parse(when), None
    if isinstance(when, Mapping) and len(when) == 1:
        ((kind, n),) = when.items()
        if kind in ("step", "steps") and isinstance(n, int) and not isinstance(n, bool) and n > 0:
            return None, (kind, n)
    raise ValueError(f"{_WHEN}, got {when!r}.")


def _named(attacks) -> list[tuple[str, Callable, Any]]:
    """Name, function and config of each attack."""
    if isinstance(attacks, (Mapping, Sequence)) and len(attacks) == 0:
        raise ValueError("`attacks` is empty; give at least one attack function.")
    if isinstance(attacks, Mapping):
        return [(name, *_function_and_config(attack)) for name, attack in attacks.items() if _checked_name(name)]
    if not isinstance(attacks, Sequence) or isinstance(attacks, str):
        raise ValueError(
            f"`attacks` must be a sequence of attack functions or (function, config) pairs, got {attacks!r}; for one "
            "attack write [attack]."
        )
    found = []
    for attack in attacks:
        function, config = _function_and_config(attack)
        inner = function
        while isinstance(inner, partial):
            inner = inner.func
        found.append((_checked_name(getattr(inner, "__name__", "")), function, config))
    return found


def _function_and_config(attack) -> tuple[Callable, Any]:
    function, config = attack if isinstance(attack, tuple) and len(attack) == 2 else (attack, None)
    if not callable(function) or isinstance(function, type):
        raise ValueError(
            f"`attacks` must hold attack functions or (function, config) pairs, got {attack!r}. For one attack with a "
            "config write [(attack, config)]."
        )
    _check_call(function, config)
    _check_config(function, config)
    return function, config


def _check_call(function: Callable, config) -> None:
    """Refuse a function that cannot be called as attacks are: it would fail in the middle of the run."""
    try:
        parameters = signature(function)
    except ValueError:  # a function in C has none
        return
    try:
        parameters.bind("model", "tokenizer", "forget_set", *(() if config is None else (config,)), progress=False)
    except TypeError as error:
        raise ValueError(
            f"An attack is called as function(model, tokenizer, forget_set{', config' if config is not None else ''}, "
            f"progress=...), got {getattr(function, '__name__', function)}{parameters}, which cannot be: {error}."
        ) from None


def _check_config(function: Callable, config) -> None:
    """Refuse a config of another type than the function says it takes: it would fail in the middle of the run."""
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__name__", "an attack")
    if isinstance(config, type):
        raise ValueError(
            f"The config of {name} must be an object, got the class {config.__name__}: write {config.__name__}()."
        )
    try:
        wanted = get_type_hints(function).get("config", Any)
    except (NameError, TypeError):  # a function of the user's, annotated in a way of its own
        return
    options = get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)
    kinds = [get_origin(option) or option for option in options]
    if config is None or not all(is_dataclass(kind) or kind is type(None) for kind in kinds):
        return
    if not isinstance(config, tuple(kinds)):
        expected = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
        raise ValueError(f"The config of {name} must be a {expected}, got {config!r}.")


def _checked_name(name: str) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(
            f"An attack's name must consist of letters, digits, '_', '-' and '.', got {name!r}: it names readings and "
            'files. Name it by a mapping: {"my_attack": function}.'
        )
    return name
