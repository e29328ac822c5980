"""When attacks are due, what they are called, and that no attack can harm the training it looks at."""

import json
import math
import random
from functools import partial

import numpy as np
import pytest
import torch

from monitor.attack_run import drop_results_after, result_file, run_attack
from monitor.attack_when import AttackWhen
from monitor.attacks.intact import intact, weights_checksum
from monitor.attacks.membership import MembershipConfig
from monitor.attacks.membership import membership as real_membership
from monitor.attacks.result import AttackResult
from monitor.stimuli.forget_set import ForgetSet

PAIRS = ForgetSet("none", ())


def membership(model, tokenizer, forget_set, config=None, *, progress=False):
    return AttackResult("membership", 0.7, 0.6, 0.8, 0.5, 12, {"config": config, "draw": torch.rand(()).item()})


def gcg(model, tokenizer, forget_set, config=None, *, progress=False):
    return AttackResult("gcg", 0.1, None, None, None, 3)


# --- when ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("when", "text", "steps", "save", "end"),
    [
        ("save", "save", [], True, False),
        ("end", "end", [], False, True),
        ({"step": 4}, "step 4", [4], False, False),
        ({"steps": 3}, "every 3 steps", [3, 6], False, False),
        ("a/b<0.0", "a/b < 0", [], False, False),
    ],
)
def test_schedules(when, text, steps, save, end):
    rule = AttackWhen(when, [gcg], PAIRS)
    assert str(rule) == text
    assert [step for step in range(1, 8) if rule.due("step", step)] == steps
    assert (rule.due("save", 4), rule.due("end", 4)) == (save, end)


def test_a_schedule_begins_after_a_step():
    rule = AttackWhen({"steps": 2}, [gcg], PAIRS, after_step=4)
    assert [step for step in range(1, 9) if rule.due("step", step)] == [6, 8]
    assert not AttackWhen("save", [gcg], PAIRS, after_step=4).due("save", 4)


@pytest.mark.parametrize(
    ("when", "message"),
    [
        ("evaluation", '"save", "end".*got \'evaluation\''),
        ("a/b == 1", "by '=='"),
        ({"step": 0}, "n > 0, got {'step': 0}"),
        ({"steps": 2.0}, "n > 0"),
        ({"epoch": 1}, "n > 0"),
        ({"step": 1, "steps": 2}, "n > 0"),
        (10, "got 10"),
        (None, "got None"),
    ],
)
def test_a_when_of_another_form_is_refused(when, message):
    with pytest.raises(ValueError, match=message):
        AttackWhen(when, [gcg], PAIRS)


def test_patience_needs_a_condition():
    with pytest.raises(ValueError, match="`patience` is for conditions; every 5 steps"):
        AttackWhen({"steps": 5}, [gcg], PAIRS, patience=2)


# --- which --------------------------------------------------------------------------------------------------------


def test_attacks_are_named_by_their_functions_or_by_a_mapping():
    given = [membership, (gcg, "quick"), partial(partial(_other), config=3)]
    rule = AttackWhen("end", given, PAIRS)
    assert rule.names == ("membership", "gcg", "_other")
    assert [attack.config for attack in rule.attacks] == [None, "quick", None]
    named = AttackWhen("end", {"gcg_quick": (gcg, "quick"), "gcg_full": gcg}, PAIRS)
    assert named.names == ("gcg_quick", "gcg_full")


def _other(model, tokenizer, forget_set, config=None, *, progress=False):
    return AttackResult("other", float(config), None, None, None, 1, {"progress": progress})


def test_configs_reach_the_function():
    rule = AttackWhen("end", {"a": (_other, 2), "b": partial(_other, config=3)}, PAIRS)
    assert [attack.run(None, None, False).score for attack in rule.attacks] == [2.0, 3.0]


@pytest.mark.parametrize(
    ("attacks", "message"),
    [
        ([], "is empty"),
        (gcg, r"for one attack write \[attack\]"),
        ("gcg", r"for one attack write \[attack\]"),
        (["gcg"], "attack functions or"),
        ((gcg, {"steps": 3}), r"write \[\(attack, config\)\]"),
        ([AttackResult], "attack functions or"),
        ([gcg, (gcg, "quick")], "distinct names"),
        ([lambda *a, **k: None], "name must consist of .* '<lambda>'"),
        ({"a/b": gcg}, "name must consist of"),
        ({"": gcg}, "name must consist of"),
        ({"../x": gcg}, "name must consist of"),
        ({"a": 3}, "attack functions or"),
        ({}, "is empty"),
    ],
)
def test_what_is_no_attack_is_refused(attacks, message):
    with pytest.raises(ValueError, match=message):
        AttackWhen("end", attacks, PAIRS)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"pairs": 3}, "config of membership must be a MembershipConfig, got {'pairs': 3}"),
        (MembershipConfig, r"got the class MembershipConfig: write MembershipConfig\(\)"),
    ],
)
def test_a_config_of_another_type_is_refused_at_once(config, message):
    with pytest.raises(ValueError, match=message):
        AttackWhen("end", [(real_membership, config)], PAIRS)
    with pytest.raises(ValueError, match=message):
        AttackWhen("end", {"own": (partial(real_membership, reference=None), config)}, PAIRS)
    AttackWhen("end", [(real_membership, MembershipConfig.quick()), (gcg, {"any": "thing"})], PAIRS)

    def own(model, tokenizer, forget_set, config: dict[str, int] | None = None, *, progress=False): ...

    AttackWhen("end", [(own, {"steps": 3})], PAIRS)


def test_a_function_that_cannot_be_called_as_attacks_are_is_refused_at_once():
    def silent(model, tokenizer, forget_set): ...

    def bare(model, tokenizer, forget_set, *, progress): ...

    with pytest.raises(ValueError, match=r"called as function\(.*forget_set, progress=...\), got silent"):
        AttackWhen("end", [silent], PAIRS)
    AttackWhen("end", [bare], PAIRS)
    with pytest.raises(ValueError, match=r"forget_set, config, progress=...\), got bare"):
        AttackWhen("end", [(bare, 3)], PAIRS)
    with pytest.raises(ValueError, match="`once` must be True or False, got 'no'"):
        AttackWhen("end", [gcg], PAIRS, once="no")


def test_the_forget_set_must_have_been_read():
    with pytest.raises(ValueError, match="load_forget_set"):
        AttackWhen("end", [gcg], "pairs.jsonl")


# --- one attack -----------------------------------------------------------------------------------------------------


@pytest.fixture
def attack(tiny_llama, tiny_tokenizer, tmp_path):
    def run(function, model=None, **options):
        (one,) = AttackWhen("end", [function], PAIRS).attacks
        settings = {"trigger": "end", "seed": 3, "progress": False, "file": result_file(tmp_path, 7, one.name)}
        return run_attack(one, model or tiny_llama(), tiny_tokenizer, **{**settings, **options})

    return run


def test_a_result_becomes_readings_and_a_file(attack, tmp_path):
    score, baseline = attack(membership)
    assert (score.name, score.value, score.low, score.high, score.valid) == ("attacks/membership", 0.7, 0.6, 0.8, True)
    assert (baseline.name, baseline.value) == ("attacks/membership_baseline", 0.5)
    assert score.note == "12 questions; started by: end"
    record = json.loads((tmp_path / "attacks" / "step-7-membership.json").read_text())
    assert (record["score"], record["n"], record["baseline"], record["started_by"]) == (0.7, 12, 0.5, "end")
    assert record["details"]["config"] is None
    assert [file.name for file in (tmp_path / "attacks").iterdir()] == ["step-7-membership.json"]
    (alone,) = attack(gcg)
    assert alone.name == "attacks/gcg", "no baseline, no reading of one"


def test_an_attack_is_seeded_and_draws_nothing_from_the_training(attack, tmp_path):
    def draws():
        return random.random(), np.random.rand(), torch.rand(()).item()

    def results():
        attack(membership)
        return json.loads((tmp_path / "attacks" / "step-7-membership.json").read_text())["details"]["draw"]

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = draws()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first = results()
    assert draws() == expected
    assert results() == first


def fails_on_input(model, tokenizer, forget_set, config=None, *, progress=False):
    raise ValueError("`forget_set` must have 5 pairs")


def runs_out_of_memory(model, tokenizer, forget_set, config=None, *, progress=False):
    with intact(model, weights=True) as anatomy, torch.no_grad():
        for parameter in anatomy.model.parameters():
            parameter.zero_()
        raise torch.OutOfMemoryError("CUDA out of memory")


def returns_nothing(model, tokenizer, forget_set, config=None, *, progress=False):
    return {"score": 1.0}


def has_no_score(model, tokenizer, forget_set, config=None, *, progress=False):
    return AttackResult("has_no_score", math.nan, None, None, None, 1)


def draws_and_fails(model, tokenizer, forget_set, config=None, *, progress=False):
    model.train()
    torch.rand(9), np.random.rand(9), random.random()
    next(model.parameters()).grad = torch.zeros_like(next(model.parameters()))
    raise RuntimeError("it failed")


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (fails_on_input, "ValueError: `forget_set` must have 5 pairs"),
        (runs_out_of_memory, "OutOfMemoryError: CUDA out of memory"),
        (returns_nothing, "TypeError: the attack returned dict instead of an AttackResult"),
        (has_no_score, "ValueError: `score` of the attack has_no_score must be finite, got nan."),
        (draws_and_fails, "RuntimeError: it failed"),
    ],
)
def test_a_failure_is_a_reading_and_changes_nothing(attack, tiny_llama, function, why, tmp_path):
    model = tiny_llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.random.get_rng_state()
    with pytest.warns(UserWarning, match=f"{function.__name__} failed, training goes on"):
        (reading,) = attack(function, model)
    assert (reading.name, reading.value, reading.valid) == (f"attacks/{function.__name__}", None, False)
    assert reading.note == f"{why} (started by: end)"
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    assert not model.training and all(parameter.grad is None for parameter in model.parameters())
    assert torch.random.get_rng_state().equal(state)
    assert not (tmp_path / "attacks").exists()


@pytest.mark.parametrize("fails", [False, True])
def test_weights_that_are_not_put_back_are_a_failure(attack, tiny_llama, fails, tmp_path):
    def tramples(model, tokenizer, forget_set, config=None, *, progress=False):
        with torch.no_grad():
            model.lm_head.weight[0, 0] = torch.nextafter(model.lm_head.weight[0, 0], torch.tensor(9.0))
        if fails:
            raise RuntimeError("and it failed")
        return AttackResult("tramples", 0.5, None, None, None, 1)

    with pytest.warns(UserWarning, match="tramples failed.*left the model with other weights"):
        (reading,) = attack(tramples)
    assert not reading.valid and reading.value is None and not (tmp_path / "attacks").exists()
    assert ("and it failed" in reading.note) is fails


def test_the_checksum_tells_weights_apart_in_every_dtype(tiny_llama):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model = tiny_llama().to(dtype)
        before = weights_checksum(model)
        assert weights_checksum(model) == before == weights_checksum(tiny_llama().to(dtype))
        assert weights_checksum(tiny_llama(1).to(dtype)) != before
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[0, 0] += 0.01
        assert weights_checksum(model) != before


def test_the_user_can_still_interrupt(attack):
    def interrupted(model, tokenizer, forget_set, config=None, *, progress=False):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attack(interrupted)


def test_details_that_are_no_json_do_not_cost_the_score(attack, tmp_path):
    def odd(model, tokenizer, forget_set, config=None, *, progress=False):
        return AttackResult("odd", 0.3, None, None, None, 1, {"tensor": torch.zeros(2)})

    with pytest.warns(UserWarning, match="details of the attack odd were not written: TypeError"):
        (reading,) = attack(odd)
    assert reading.value == 0.3 and "details not written" in reading.note
    assert not (tmp_path / "attacks").exists()


def test_results_after_the_resumed_step_go(tmp_path):
    for step in (2, 10, 20):
        for name in ("gcg", "gcg-5"):
            file = result_file(tmp_path, step, name)
            file.parent.mkdir(exist_ok=True)
            file.write_text("{}")
    drop_results_after(tmp_path, 10)
    kept = sorted(file.name for file in (tmp_path / "attacks").iterdir())
    assert kept == ["step-10-gcg-5.json", "step-10-gcg.json", "step-2-gcg-5.json", "step-2-gcg.json"]
    drop_results_after(tmp_path / "nothing", 0)
