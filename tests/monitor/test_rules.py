"""Conditions are parsed, never evaluated; streaks count measurements; what a run had decided comes from its journal."""

import random
from types import SimpleNamespace

import pytest

from monitor.attack_when import AttackWhen
from monitor.attacks.result import AttackResult
from monitor.decisions import Decisions
from monitor.journal import Journal
from monitor.readings import Reading
from monitor.rule_checks import check_conditions, check_names, parse_rules, warn_of_idle
from monitor.rules import Condition, StopWhen, Streak, values_by_name
from monitor.stimuli.forget_set import ForgetSet

PAIRS = ForgetSet("none", ())


def membership(model, tokenizer, forget_set, config=None, *, progress=False):
    return AttackResult("membership", 0.5, None, None, None, 1)


def gcg(model, tokenizer, forget_set, config=None, *, progress=False):
    return AttackResult("gcg", 0.5, None, None, None, 1)


# --- the grammar --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("bias_shift/delta_b < -0.02", ("bias_shift", "delta_b", "", "<", 0.0, -0.02)),
        ("bias_shift/delta_b/disabled people<=-.5", ("bias_shift", "delta_b", "disabled people", "<=", 0.0, -0.5)),
        ("a/b/c/d >= 1e-3", ("a", "b", "c/d", ">=", 0.0, 0.001)),
        ("  a/b>2.  ", ("a", "b", "", ">", 0.0, 2.0)),
        ("behaviour/retain_nll > 1.2 * start", ("behaviour", "retain_nll", "", ">", 1.2, 0.0)),
        ("a/b > start", ("a", "b", "", ">", 1.0, 0.0)),
        ("a/b > start + 0.5", ("a", "b", "", ">", 1.0, 0.5)),
        ("a/b < start-0.1", ("a", "b", "", "<", 1.0, -0.1)),
        ("a/b < -2*start+1", ("a", "b", "", "<", -2.0, 1.0)),
    ],
)
def test_the_forms(text, parts):
    assert Condition.parse(text) == Condition(*parts)


def test_a_condition_and_its_text_say_the_same():
    draw = random.Random(0)
    numbers = [0.0, 1.0, -0.02, 1e-300, 1.7e308, 0.1 + 0.2, 1 / 3, 123456789.0, -5e-324]
    for _ in range(2000):
        condition = Condition(
            draw.choice(["bias_shift", "m-1"]),
            draw.choice(["delta_b", "nll.x"]),
            draw.choice(["", "old people", "a/b"]),
            draw.choice(["<", "<=", ">", ">="]),
            draw.choice([0.0, draw.uniform(-3, 3), *numbers]),
            draw.choice([draw.gauss(0, 10) * 10 ** draw.randint(-20, 20), *numbers]),
        )
        assert Condition.parse(str(condition)) == condition


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (3, "must be a string, got 3"),
        ("bias_shift/delta_b", "compares nothing"),
        ("", "compares nothing"),
        ("0 < a/b < 1", "more than once"),
        ("a/b < 1 and a/c > 2", "more than once"),
        ("a/b == 1", "by '=='"),
        ("a/b =< 1", "by '=<'"),
        ("a/b != 1", "by '!='"),
        ("delta_b < 1", "reading's name, got 'delta_b'"),
        ("/delta_b < 1", "reading's name"),
        ("a//b < 1", "reading's name"),
        ("a/ < 1", "reading's name"),
        ("a b/c < 1", "reading's name"),
        ("1 < a/b", "reading's name, got '1'"),
        (" < 1", "reading's name, got ''"),
        ("a/b <", "must end with"),
        ("a/b < nan", "must end with"),
        ("a/b < inf", "must end with"),
        ("a/b < start * 1.2", "must end with"),
        ("a/b < 2 * end", "must end with"),
        ("a/b < 1,5", "must end with"),
        ("a/b < 1 + 1", "must end with"),
        ("a/b < __import__('os').getpid()", "must end with"),
        ("a/b < 1e999", "not finite"),
        ("a/b < start + 1e999", "not finite"),
        ("a/b < 0 * start", "by 0"),
    ],
)
def test_what_is_no_condition_is_refused_with_the_forms(text, message):
    with pytest.raises(ValueError, match=".") as error:
        Condition.parse(text)
    assert message in str(error.value) and "Forms: " in str(error.value)


@pytest.mark.parametrize(
    ("op", "below", "equal", "above"),
    [("<", True, False, False), ("<=", True, True, False), (">", False, False, True), (">=", False, True, True)],
)
def test_comparisons(op, below, equal, above):
    condition = Condition.parse(f"a/b {op} 2")
    assert [condition.holds(value, None) for value in (1.0, 2.0, 3.0)] == [below, equal, above]


def test_the_start_moves_the_threshold():
    assert Condition.parse("a/b > 1.5 * start").threshold(2.0) == 3.0
    assert Condition.parse("a/b > start - 0.5").threshold(2.0) == 1.5
    assert Condition.parse("a/b > start").threshold(None) is None
    assert not Condition.parse("a/b > start").holds(9.0, None)


@pytest.mark.parametrize("name", ["patience", "after_step"])
@pytest.mark.parametrize("value", [-1, 1.5, True, "2"])
def test_counts_are_checked(name, value):
    with pytest.raises(ValueError, match=name):
        StopWhen("a/b < 1", **{name: value})
    with pytest.raises(ValueError, match=name):
        AttackWhen("a/b < 1", [membership], PAIRS, **{name: value})


# --- measurements in a row ------------------------------------------------------------------------------------------


def complete_at(values, text="a/b < 0", patience=1, after_step=0):
    """Steps 0, 10, 20, ... at which the streak is complete; None is an invalid reading, ... a missing one."""
    streak = Streak(Condition.parse(text), patience, after_step)
    return [
        10 * i
        for i, value in enumerate(values)
        if streak.update(10 * i, {} if value is ... else {"a/b": value, "a/c": -9.0})
    ]


def test_patience_counts_measurements_in_a_row():
    values = [1, -1, -1, 1, -1, -1, -1, -1, 1]
    assert complete_at(values) == [10, 20, 40, 50, 60, 70]
    assert complete_at(values, patience=3) == [60, 70]
    assert complete_at(values, patience=5) == []


def test_invalid_and_missing_readings_neither_count_nor_end_a_streak():
    assert complete_at([1, -1, None, ..., -1, 1], patience=2) == [40]
    assert complete_at([1, -1, None, 1, -1, ...], patience=2) == []
    assert complete_at([1, -1, None]) == [10]


def test_measurements_up_to_after_step_do_not_count():
    assert complete_at([-1, -1, -1, -1]) == [10, 20, 30], "the one before training never counts"
    assert complete_at([-1, -1, -1, -1], after_step=10) == [20, 30]
    assert complete_at([-1, -1, -1, -1], after_step=10, patience=2) == [30]


def test_the_start_is_the_first_valid_reading():
    assert complete_at([2, 2.5, 3.5], "a/b > 1.5 * start") == [20]
    assert complete_at([None, ..., 2, 2.5, 3.5], "a/b > 1.5 * start") == [40]
    assert complete_at([2, 3, 1], "a/b < start", after_step=10) == [20], "also where it is not after that step"


def test_only_the_headline_reading_counts():
    readings = [
        Reading("a", "b", None, layer=4), Reading("a", "b", 1.0, layer=2), Reading("a", "c", 2.0, layer=4),
        Reading("a", "c", 3.0, layer=2), Reading("a", "b", 5.0, group="women"), Reading("a", "d", 1.0, valid=False),
    ]  # fmt: skip
    assert values_by_name(readings) == {"a/b": None, "a/c": 2.0, "a/b/women": 5.0, "a/d": None}


def test_the_evidence_names_readings_steps_and_threshold():
    streak = Streak(Condition.parse("a/b > 1.5 * start"), 2, 0)
    for step, value in ((0, 2.0), (5, 4.0), (10, 5.0)):
        streak.update(step, {"a/b": value})
    assert streak.evidence() == "4 at step 5, 5 at step 10; start 2 at step 0, threshold 3"


# --- decisions and the journal --------------------------------------------------------------------------------------


class Run:
    """Measurements of ``a/b`` at steps 1, 2, ..., with what the rules decide, as a monitor journals them."""

    def __init__(self, path, *rules):
        self.path, self.rules = path, rules
        self.resume(0)

    def resume(self, step):
        self.journal = Journal(self.path)
        self.journal.rewind(step)
        self.decisions = Decisions(parse_rules(list(self.rules), [SimpleNamespace(name="a")]), self.journal, True)
        self.control = SimpleNamespace(should_training_stop=False)
        return self

    def measure(self, step, value):
        """Names of attacks that are due, and whether the run stops."""
        readings = [Reading("a", "b", value)]
        self.journal.append(step, None, [*readings, *self.decisions.decide(step, readings)])
        due = self.decisions.follow(self.control, step)
        return [attack.name for attack, _ in due], self.control.should_training_stop


@pytest.mark.filterwarnings("ignore:The rule")
def test_a_decision_is_journalled_with_what_caused_it(tmp_path):
    run = Run(tmp_path / "journal.jsonl", StopWhen("a/b < 0", patience=2))
    assert [run.measure(step, value) for step, value in enumerate([-1, 1, -1, -2], 1)][-2:] == [([], False), ([], True)]
    lines = [line for line in run.journal.lines if line["measure"] == "rules"]
    assert [(r["step"], r["metric"], r["group"], r["value"], r["valid"]) for r in lines] == [
        (4, "stop", "a/b < 0", 1.0, True)
    ]
    assert lines[0]["note"] == "-1 at step 3, -2 at step 4"


def test_an_attack_comes_once_or_again_after_as_many_measurements(tmp_path):
    values = [-1, -1, -1, -1, 1, -1, -1]
    once = Run(tmp_path / "once.jsonl", AttackWhen("a/b < 0", [membership, gcg], PAIRS, patience=2))
    assert [run for run in map(once.measure, range(1, 8), values) if run[0]] == [(["membership", "gcg"], False)]
    again = Run(tmp_path / "again.jsonl", AttackWhen("a/b < 0", [gcg], PAIRS, patience=2, once=False))
    assert [step for step, value in enumerate(values, 1) if again.measure(step, value)[0]] == [2, 4, 7]


@pytest.mark.filterwarnings("ignore:The rule")
@pytest.mark.parametrize("cut", range(9))
def test_a_resumed_run_decides_like_one_that_was_never_interrupted(tmp_path, cut):
    """Cut after any measurement, in the middle of streaks, before and after attacks; two steps lost each time."""
    rules = (
        StopWhen("a/b < 0.5 * start", patience=4),
        AttackWhen("a/b < start", [membership], PAIRS, patience=2),
        AttackWhen("a/b <= start - 1", [gcg], PAIRS, patience=2, once=False),
    )
    values = [4, 3, None, 2, 1.5, 1, 3, 1, 1, None, 1, 1]
    whole = Run(tmp_path / "whole.jsonl", *rules)
    expected = [whole.measure(step, value) for step, value in enumerate(values, 1)]
    assert (
        sum("gcg" in due for due, _ in expected) > 1 and [stop for _, stop in expected].index(True) == len(values) - 1
    )
    run = Run(tmp_path / "cut.jsonl", *rules)
    for step in range(1, cut + 3):
        run.measure(step, values[step - 1])
    run.resume(cut)
    assert [run.measure(step, values[step - 1]) for step in range(cut + 1, len(values) + 1)] == expected[cut:]
    timeless = [[{**line, "time": 0} for line in each.journal.lines] for each in (run, whole)]
    assert timeless[0] == timeless[1]


def test_a_rule_that_is_new_in_a_resumed_run_has_not_acted_yet(tmp_path):
    run = Run(tmp_path / "journal.jsonl")
    for step in (1, 2, 3):
        run.measure(step, -1.0)
    run.rules = (AttackWhen("a/b < 0", [gcg], PAIRS, patience=2), StopWhen("a/b < 0", patience=9))
    run.resume(3)
    assert run.decisions.resume(run.control, 3) == []
    assert run.measure(4, -1.0) == (["gcg"], False)


def test_a_run_resumed_where_it_was_stopped_stops_again(tmp_path):
    run = Run(tmp_path / "journal.jsonl", "a/b < 0")
    with pytest.warns(UserWarning, match="'a/b < 0' stops training at step 1"):
        run.measure(1, -1.0)
    run.resume(1)
    with pytest.warns(UserWarning, match="had stopped this run at step 1"):
        run.decisions.resume(run.control, 1)
    assert run.control.should_training_stop
    run.rules = ("a/b < -5",)
    run.resume(1).decisions.resume(run.control, 1)
    assert not run.control.should_training_stop, "another rule is another decision"


def test_attacks_that_a_kill_cut_off_are_taken_up(tmp_path):
    run = Run(
        tmp_path / "journal.jsonl",
        AttackWhen("a/b < 0", [membership, gcg], PAIRS),
        AttackWhen("save", {"at_save": gcg}, PAIRS, after_step=1),
    )
    run.measure(1, 1.0)
    assert run.decisions.resume(run.control, 1) == []
    run.measure(2, -1.0)
    run.journal.append(2, None, [Reading("attacks", "membership", 0.5)])
    run.resume(2)
    assert [(a.name, why) for a, why in run.decisions.resume(run.control, 2)] == [
        ("gcg", "a/b < 0"),
        ("at_save", "save"),
    ]
    run.journal.append(2, None, [Reading("attacks", "gcg", 0.5)])
    run.journal.append(2, None, [Reading("attacks", "at_save", None, note="it failed")])
    assert run.resume(2).decisions.resume(run.control, 2) == [], "one that failed has run"
    assert run.journal.steps == {1, 2} and Journal(run.path).steps == {1, 2}


def test_an_attack_alone_is_no_measurement(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append(3, None, [Reading("attacks", "gcg", 0.5)])
    journal.append(4, None, [Reading("rules", "attack", 1.0), Reading("a", "b", 1.0)])
    assert journal.steps == {4}


# --- what the monitor is given --------------------------------------------------------------------------------------

MEASURES = [SimpleNamespace(name="bias_shift"), SimpleNamespace(name="behaviour")]


def test_a_string_is_a_stop_and_one_rule_needs_no_list():
    assert parse_rules("bias_shift/delta_b < 0", MEASURES) == (StopWhen("bias_shift/delta_b < 0"),)
    assert parse_rules((), MEASURES) == ()
    rule = AttackWhen("end", [gcg], PAIRS)
    assert parse_rules(rule, MEASURES) == (rule,)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (["bias_shft/delta_b < 0"], "did you mean 'bias_shift'.*bias_shift, behaviour"),
        (["other/delta_b < 0"], "'other', which this monitor has not. Its measures"),
        ([AttackWhen("behavior/nll < 0", [gcg], PAIRS)], "did you mean 'behaviour'"),
        (["bias_shift/b<0", "bias_shift/b < 0.0"], "two StopWhen on 'bias_shift/b < 0'"),
        ([lambda readings: True], "must be conditions, StopWhen or AttackWhen"),
        (7, "got 7"),
        ([AttackWhen("save", [gcg], PAIRS), AttackWhen("end", [(gcg, "quick")], PAIRS)], "different attacks .* 'gcg'"),
        ([AttackWhen("save", [gcg], PAIRS), AttackWhen("end", [gcg], ForgetSet("", ()))], "different attacks .* 'gcg'"),
    ],
)
def test_rules_that_cannot_be_meant_are_refused(rules, message):
    with pytest.raises(ValueError, match=message):
        parse_rules(rules, MEASURES)


SCORED = AttackWhen({"steps": 5}, [membership], PAIRS)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (["attacks/membership > 0.6"], "no rule starts without it. Attacks that are started: none"),
        (["attacks/membershp > 0.6", SCORED], "did you mean 'membership'"),
        (["attacks/membership/part > 0.6", SCORED], "which has none: write 'attacks/membership'"),
        ([AttackWhen("attacks/membership > 0", [membership], PAIRS)], "no rule starts without it"),
        (
            [
                AttackWhen("attacks/gcg > 0", [membership], PAIRS),
                AttackWhen("attacks/membership > 0", [gcg], PAIRS),
            ],
            "no rule starts without it",
        ),
    ],
)
def test_a_rule_on_a_score_that_never_comes_is_refused(rules, message):
    with pytest.raises(ValueError, match=message):
        parse_rules(rules, MEASURES)


def test_rules_may_read_scores_of_attacks_that_others_start():
    rules = [
        "attacks/gcg_baseline < 0.1",
        AttackWhen("attacks/membership > 0.6", [gcg], PAIRS),
        SCORED,
    ]
    check_names(parse_rules(rules, MEASURES), {"bias_shift/delta_b"})


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (StopWhen("a/b < 0", after_step=10), "stop when a/b < 0 can never act.*last, 10"),
        (AttackWhen({"step": 11}, [gcg], PAIRS), "attack at step 11 can never act.*last, 10"),
        (AttackWhen({"steps": 12}, [gcg], PAIRS), "attack at every 12 steps can never act"),
        (AttackWhen({"step": 3}, [gcg], PAIRS, after_step=3), "not up to `after_step`, 3"),
        (AttackWhen("save", [gcg], PAIRS), "writes none"),
    ],
)
def test_a_rule_that_can_never_act_is_a_warning(rule, message):
    with pytest.warns(UserWarning, match=message):
        warn_of_idle([rule], 10, saves=False)


def test_rules_that_may_act_are_none(recwarn):
    rules = [
        StopWhen("a/b < 0", after_step=9), AttackWhen({"step": 10}, [gcg], PAIRS), AttackWhen("end", [gcg], PAIRS),
        AttackWhen("a/b < 0", [gcg], PAIRS), AttackWhen("save", [gcg], PAIRS),
    ]  # fmt: skip
    warn_of_idle(rules, 10, saves=True)
    assert not recwarn.list


@pytest.mark.filterwarnings("ignore:The rule")
def test_scores_move_the_rules_on_them_and_no_others(tmp_path):
    rules = (
        StopWhen("a/b < 0", patience=2),
        StopWhen("attacks/membership < 0.55", patience=2),
        AttackWhen({"steps": 1}, [membership], PAIRS),
    )
    run = Run(tmp_path / "journal.jsonl", *rules)

    def score(value):
        found = [Reading("attacks", "membership", value, valid=value is not None)]
        run.journal.append(step, None, [*found, *run.decisions.decide(step, found)])
        run.decisions.follow(run.control, step)

    stopped = []
    for step, value in enumerate([0.5, 0.7, 0.5, None, 0.5], 1):
        run.measure(step, -1.0 if step == 1 else 1.0)
        score(value)
        stopped.append(run.control.should_training_stop)
        run.resume(step)  # replayed from the journal each time
    assert stopped == [False, False, False, False, True]
    lines = [line for line in run.journal.lines if line["measure"] == "rules"]
    assert [(line["group"], line["note"]) for line in lines] == [
        ("attacks/membership < 0.55", "0.5 at step 3, 0.5 at step 5")
    ]


def test_the_same_attack_may_be_started_by_several_rules():
    parse_rules([AttackWhen("save", [(gcg, 1)], PAIRS), AttackWhen("end", [(gcg, 1)], PAIRS)], MEASURES)


def test_a_reading_that_no_measure_gives_is_refused_with_those_that_are_close():
    names = {"bias_shift/delta_b", "bias_shift/delta_b/women", "bias_shift/seat", "behaviour/forget_nll"}
    check_names(parse_rules(["bias_shift/delta_b/women < 0"], MEASURES), names)
    with pytest.raises(ValueError, match="'bias_shift/delta'.*Close to it: bias_shift/delta_b"):
        check_names(parse_rules(["bias_shift/delta < 0"], MEASURES), names)
    with pytest.raises(ValueError, match="Close to it: behaviour/forget_nll"):
        check_names(parse_rules(["behaviour/zzz < 0"], MEASURES), names)


def test_a_condition_that_no_value_moves_is_a_warning(recwarn):
    """By the reading's range; a start is a value like any other, and a bound that can be reached decides nothing."""
    share = Reading("bias_shift", "seat", 0.5, range=(0.0, 1.0))
    readings = [share, Reading("bias_shift", "delta_b", 0.1), Reading("bias_shift", "seat", 0.5, range=(0.0, 9.0))]
    for text, word in (("< 0", "never"), ("> 1", "never"), ("<= -2", "never"), (">= 0", "only"), ("< 1.5", "only")):
        with pytest.warns(UserWarning, match=rf"seat {text}' can {word} hold: .*seat lies in \[0, 1\]"):
            check_conditions(parse_rules(f"bias_shift/seat {text}", MEASURES), readings, warn=True)
    recwarn.clear()
    rules = [f"bias_shift/seat {text}" for text in ("<= 0", "> 0", ">= 1", "< 1", "< 2 * start", "> start + 7")]
    check_conditions(parse_rules([*rules, "bias_shift/delta_b < -1e9"], MEASURES), readings, warn=True)
    check_conditions(parse_rules("bias_shift/seat < 0", MEASURES), readings, warn=False)
    assert not recwarn.list
    with pytest.raises(ValueError, match="Close to it: bias_shift/seat"):
        check_conditions(parse_rules("bias_shift/seats < 0", MEASURES), readings, warn=True)
