"""What is said of concepts follows from their readings."""

from monitor.readings import Reading
from recipes.audit_concepts import concepts_table, concepts_words, recovery_sentence
from recipes.audit_tables import headlines


def readings(**of_groups):
    found = []
    for group, (accuracy, p, angle) in of_groups.items():
        values = {"probe_accuracy": accuracy, "probe_null": 0.02, "probe_p": p, "coverage": 0.4, "angle_mean": angle}
        found += [Reading("concept_recovery", m, v, group=group, layer=24) for m, v in values.items()]
    return [Reading("concept_recovery", "probe_accuracy", 0.4, layer=24), *found]


def test_the_table_has_a_column_a_concept():
    (text,) = concepts_table(readings(animals=(0.45, 0.005, 8.0), days=(0.5, 0.005, 0.0)))
    header, *rows = text.splitlines()[1:]
    assert header.split() == ["animals", "days"]
    assert [line for line in rows if line.startswith("values told apart")][0].split()[-2:] == ["0.450", "0.500"]


def test_the_words_say_which_values_are_told_apart_and_what_turned():
    told, turned = concepts_words(headlines(readings(animals=(0.45, 0.005, 8.0), days=(0.1, 0.4, 0.2))))
    assert "values of animals apart" in told and "not those of days" in told
    assert turned.endswith("animals 8.0.")
    (none,) = concepts_words(headlines(readings(days=(0.1, 0.4, 0.0))))
    assert "values of no concept apart" in none


def record(metric, group, start, end):
    return {"measure": "concept_recovery", "metric": metric, "group": group, "start": start, "end": end}


def run(group, accuracy, p, angle):
    values = {"probe_accuracy": accuracy, "probe_p": p, "angle_mean": (0.0, angle)}
    return [record(metric, group, *value) for metric, value in values.items()]


def test_a_run_is_told_from_start_to_end():
    records = [*run("animals", (0.45, 0.02), (0.005, 0.6), 40.0), *run("days", (0.5, 0.5), (0.005, 0.005), 2.0)]
    text = recovery_sentence(records)
    assert "animals no longer told apart (accuracy 0.45 -> 0.02, subspace turned 40 degrees)" in text
    assert "days told apart" in text
    assert "never told apart" in recovery_sentence(run("years", (0.1, 0.1), (0.5, 0.5), 1.0))


def test_what_was_not_read_is_not_told():
    assert recovery_sentence([]) is None
    assert recovery_sentence(run("animals", (0.45, None), (0.005, None), None)) is None
