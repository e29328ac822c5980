"""One attack on a model that is being trained: whatever happens in it, training goes on, on every rank."""

from __future__ import annotations

import json
import os
import random
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from monitor.attack_when import Attack
from monitor.attacks.intact import intact, weights_checksum
from monitor.attacks.result import AttackResult
from monitor.journal import ATTACKS
from monitor.ranks import from_first, gathered, rank
from monitor.readings import Reading


def run_attack(
    attack: Attack, model, tokenizer, *, trigger: str, seed: int, progress: bool, file: Path
) -> list[Reading]:
    """Attack on all ranks together, and say what came of it.

    Parameters
    ----------
    attack : Attack
    model, tokenizer
        As the attack function takes them. Gradients, modes and random numbers come back as they were whatever the
        function does; weights it must restore itself (`monitor.attacks.intact`), and one that does not has failed.
    trigger : str
        What asked for the attack, for the note.
    seed : int
        Of the global generators inside the attack, the same on all ranks.
    progress : bool
        On the first rank only.
    file : Path
        Gets the whole result as JSON, from the first rank.

    Returns
    -------
    readings : list of Reading
        ``attacks/<name>``, and ``attacks/<name>_baseline`` where the result has one; the same on every rank, those of
        the first. An attack that raised, on whichever rank, is one invalid reading with the error in its note.

    Notes
    -----
    If the attack raises on one rank only, in the middle of something that all ranks do together, the others wait for
    it there until torch.distributed's own timeout, as with any error in distributed training.
    """
    result, failure = _attempt(attack, model, tokenizer, seed, progress and rank() == 0)
    failures = [f"on rank {i}: {text}" if i else text for i, text in enumerate(gathered(failure)) if text]
    if failures:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what an out-of-memory error left in pieces; training needs it whole
        if rank() == 0:
            warnings.warn(f"The attack {attack.name} failed, training goes on: {failures[0]}", stacklevel=2)
        return [Reading(ATTACKS, attack.name, None, valid=False, note=f"{failures[0]} (started by: {trigger})")]
    readings = []
    if rank() == 0:
        note = f"{result.n} questions; started by: {trigger}"
        problem = _write(result, file, trigger)
        if problem:
            warnings.warn(f"The details of the attack {attack.name} were not written: {problem}", stacklevel=2)
            note += f"; details not written: {problem}"
        readings = _readings(attack.name, result, note)
    return from_first(readings)


def _attempt(attack: Attack, model, tokenizer, seed: int, progress: bool) -> tuple[AttackResult | None, str]:
    """The result, or why there is none."""
    result, failure, before = None, "", weights_checksum(model)
    try:
        with intact(model):
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed)
            result = attack.run(model, tokenizer, progress)
        if not isinstance(result, AttackResult):
            raise TypeError(f"the attack returned {type(result).__name__} instead of an AttackResult")
    except Exception as error:  # whatever it is: an attack must not end the training it looks at
        failure = f"{type(error).__name__}: {error}"
    if weights_checksum(model) != before:
        changed = (
            "the attack left the model with other weights, and the training goes on from these: put what changes them "
            "into `with intact(model, weights=True)` (monitor.attacks.intact)"
        )
        failure = f"{failure}; {changed}" if failure else changed
    return result, failure


def _readings(name: str, result: AttackResult, note: str) -> list[Reading]:
    readings = [
        Reading(ATTACKS, name, result.score, low=result.low, high=result.high, higher_means="more came back", note=note)
    ]
    if result.baseline is not None:
        baseline = "the score without the attack"
        readings.append(Reading(ATTACKS, f"{name}_baseline", result.baseline, higher_means=baseline, note=note))
    return readings


def _write(result: AttackResult, file: Path, trigger: str) -> str:
    """Write the result whole or not at all; returns what went wrong."""
    record: Mapping = {**result.record(), "started_by": trigger, "details": dict(result.details)}
    partial = file.with_name(f".{file.name}.partial")
    try:
        text = json.dumps(record, indent=2, allow_nan=False)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text + "\n", encoding="utf-8")
        os.replace(partial, file)
    except (OSError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def result_file(folder: Path, step: int, name: str) -> Path:
    return folder / ATTACKS / f"step-{step}-{name}.json"


def drop_results_after(folder: Path, step: int) -> None:
    """Remove the results of steps that a resumed run will take anew."""
    for file in (folder / ATTACKS).glob("step-*-*.json"):
        number = file.name.split("-", 2)[1]
        if number.isdigit() and int(number) > step:
            file.unlink()
