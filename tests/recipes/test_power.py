from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from scipy import stats

from monitor.geometry.detection import (
    asymptotic_purity_threshold,
    asymptotic_sample_budget,
    detection_p,
    detection_power,
    detection_z,
    null_std,
    purity_threshold,
    sample_budget,
)
from monitor.geometry.purity import auc_max, saturated_auc
from recipes.cli import COMMANDS
from recipes.cli import main as cli
from recipes.power import main
from recipes.power_question import SEPARATIONS, PowerArguments, Question


def run(capsys, *words):
    """Records and printed lines of a command line."""
    main([*map(str, words), "--json", "-"])
    out, err = capsys.readouterr()
    return json.loads(out), err


def value(records, metric, group, separation=None, probe="best"):
    found = [
        record
        for record in records
        if (record["metric"], record["group"], record["probe"]) == (metric, group, probe)
        and separation in (None, record["separation"])
    ]
    assert len(found) == 1
    return found[0]["value"]


def test_from_purity_and_effect_to_the_budget(capsys):
    records, printed = run(capsys, "--separation", 1.0, "--purity", 0.3)
    held_out, crossed = (value(records, "n", group) for group in ("held_out", "cross_validated"))
    assert held_out == sample_budget(0.3, 1.0) and crossed == sample_budget(0.3, 1.0, inflation=1.4)
    # Section VII-A by hand: (z + z)²/(3 excess²) = 310.5 and 1.96 times that.
    by_hand = (1.64485 + 0.84162) ** 2 / (3 * (auc_max(1.0, 0.3) - 0.5) ** 2)
    assert held_out == pytest.approx(by_hand, abs=3) and crossed == pytest.approx(1.96 * by_hand, abs=4)
    assert value(records, "n_asymptotic", "held_out") == asymptotic_sample_budget(0.3, 1.0)
    assert f"{held_out}" in printed and f"{crossed}" in printed


def test_from_n_and_effect_to_the_purity(capsys):
    records, _ = run(capsys, "--separation", 1.0, "--n", 300)
    for group, inflation in (("held_out", 1.0), ("cross_validated", 1.4)):
        assert value(records, "purity_threshold", group) == purity_threshold(300, 1.0, inflation=inflation)
        assert value(records, "purity_threshold_asymptotic", group) == asymptotic_purity_threshold(
            300, 1.0, inflation=inflation
        )


def test_without_an_effect_five_are_tabulated(capsys):
    records, printed = run(capsys, "--n", 300)
    assert {record["separation"] for record in records} == set(SEPARATIONS)
    exact = [value(records, "purity_threshold", "held_out", s) for s in SEPARATIONS]
    assert exact == sorted(exact, reverse=True)
    table = printed[: printed.index("- s:")].splitlines()[-6:]
    assert [line.split()[0] for line in table if line] == ["0.5", "1", "2", "4", "8"]


def test_both_given_the_power_is_computed(capsys):
    records, _ = run(capsys, "--n", 300, "--purity", 0.1, "--separation", 2, "--tests", 24)
    wanted = detection_power(300, 0.1, 2.0, level=0.05 / 24, inflation=1.4)
    assert value(records, "power", "cross_validated") == pytest.approx(wanted)
    assert value(records, "n", "held_out") == sample_budget(0.1, 2.0, level=0.05 / 24)


def test_small_s_form_knows_of_no_offset(capsys):
    for known, metric in (("purity", "n_asymptotic"), ("n", "purity_threshold_asymptotic")):
        words = ["--separation", 1, f"--{known}", 0.3 if known == "purity" else 300]
        assert metric in {record["metric"] for record in run(capsys, *words)[0]}
        records, printed = run(capsys, *words, "--offset", 0.5)
        assert metric not in {record["metric"] for record in records} and "small-s" not in printed


def test_published_statement_on_separated_markers(capsys):
    # Section VI-E: with s >= 6 "detection at n = 300 requires α of about 0.05-0.06", α* ≈ z_.95/sqrt(3n). That is level
    # .05, a power of one half, one held-out test. At a power of .8, or with the calibrated null, it takes more.
    records, _ = run(capsys, "--separation", 6, 8, 40, "--n", 300, "--power", 0.5)
    for s in (6.0, 8.0, 40.0):
        assert 0.05 < value(records, "purity_threshold", "held_out", s) < 0.06
    assert 1.64485 / math.sqrt(900) == pytest.approx(0.0548, abs=1e-4)
    records, _ = run(capsys, "--separation", 8, "--n", 300)
    assert value(records, "purity_threshold", "held_out") == pytest.approx(0.0872, abs=1e-4)
    assert value(records, "purity_threshold", "cross_validated") == pytest.approx(0.124, abs=1e-3)
    # Nearly as without any limit: a(2 - a)/2 = (z + z) σ₀.
    for group, inflation in (("held_out", 1.0), ("cross_validated", 1.4)):
        reached = saturated_auc(value(records, "purity_threshold", group)) - 0.5
        assert reached == pytest.approx((1.64485 + 0.84162) * inflation * null_std(150, 150), rel=0.01)


def test_effect_as_auc(capsys):
    records, _ = run(capsys, "--auc", stats.norm.cdf(1 / math.sqrt(2)), "--purity", 0.3)
    assert records[0]["separation"] == pytest.approx(1.0)
    assert value(records, "n", "held_out") == sample_budget(0.3, 1.0)


def test_learned_frontier(capsys):
    records, printed = run(capsys, "--separation", 2, "--purity", 0.2, "--dimension", 64)
    best, learned = (value(records, "n", "cross_validated", probe=probe) for probe in ("best", "learned"))
    assert learned == sample_budget(0.2, 2.0, inflation=1.4, dimension=64, train_fraction=0.8) > 1.5 * best
    # The held-out split has four training texts a scored one: of the texts scored it needs fewer.
    assert value(records, "n", "held_out", probe="learned") == sample_budget(0.2, 2.0, dimension=64, train_fraction=4.0)
    assert "learned, 64 dim." in printed
    records, _ = run(capsys, "--separation", 2, "--n", 300, "--dimension", 64, "--train_fraction", 1)
    wanted = purity_threshold(300, 2.0, dimension=64, train_fraction=1.0)
    assert value(records, "purity_threshold", "held_out", probe="learned") == wanted


def judge(capsys, *words):
    records, printed = run(capsys, *words)
    (found,) = (record for record in records if record["metric"] == "verdict")
    return found["note"], found["value"], {record["metric"]: record["value"] for record in records}, printed


RESULT = ("--n", 300, "--purity", 0.1, "--separation", 1.0)


def test_verdict_underpowered(capsys):
    word, number, values, printed = judge(capsys, "--observed_auc", 0.55, *RESULT)
    assert (word, number) == ("underpowered", -1)
    assert values["z"] == pytest.approx(0.05 / (1.4 * math.sqrt(301 / 270_000))) == detection_z(0.55, 150, 150)
    assert values["p"] == pytest.approx(stats.norm.sf(values["z"]))
    assert values["power"] == pytest.approx(detection_power(300, 0.1, 1.0, inflation=1.4))
    assert values["n_needed"] == sample_budget(0.1, 1.0, inflation=1.4)
    assert "not as unbiased" in printed and f"n = {values['n_needed']:,}" in printed
    purity = purity_threshold(300, 1.0, inflation=1.4)
    assert f"a purity of {purity:.2g}" in printed


def test_verdict_detected(capsys):
    word, number, values, printed = judge(capsys, "--observed_auc", 0.65, *RESULT)
    assert (word, number) == ("detected", 1) and values["p"] == detection_p(0.65, 150, 150) < 0.05
    # At purity .1 no probe exceeds .595: something else than the marked texts gives the labels away.
    assert "Doubtful" in printed and "0.595" in printed and "overstates the effect" in printed
    word, _, _, printed = judge(capsys, "--observed_auc", 0.7, "--n", 300, "--purity", 0.5, "--separation", 1.0)
    assert word == "detected" and "Doubtful" not in printed and "overstates" not in printed


def test_verdict_not_detected_and_what_it_excludes(capsys):
    word, number, values, printed = judge(
        capsys, "--observed_auc", 0.52, "--n", 2000, "--purity", 0.5, "--separation", 1.0
    )
    assert (word, number) == ("not detected", 0) and values["power"] > 0.8
    smallest = values["smallest_detectable_separation"]
    assert smallest < 1.0
    assert detection_power(2000, 0.5, smallest, inflation=1.4) == pytest.approx(0.8)
    assert f"s from {smallest:.2g} on" in printed


def test_a_family_of_tests_turns_a_detection_into_none(capsys):
    words = ("--observed_auc", 0.6, "--n", 300, "--purity", 0.1, "--separation", 1.0)
    assert judge(capsys, *words)[0] == "detected"
    word, _, values, printed = judge(capsys, *words, "--tests", 24)
    assert word == "underpowered" and values["p_adjusted"] == pytest.approx(24 * values["p"])
    assert values["power"] == pytest.approx(detection_power(300, 0.1, 1.0, level=0.05 / 24, inflation=1.4))
    assert "24 tests, each at level 0.0021" in printed


def test_held_out_results_are_judged_by_the_exact_null(capsys):
    words = ("--observed_auc", 0.57, *RESULT)
    assert judge(capsys, *words)[0] == "underpowered"
    word, _, values, _ = judge(capsys, *words, "--evaluation", "held_out")
    assert word == "detected" and values["z"] == pytest.approx(0.07 / null_std(150, 150))


def test_unequal_groups(capsys):
    words = ("--observed_auc", 0.55, "--purity", 0.5, "--separation", 1.0)
    both = judge(capsys, *words, "--n_positive", 30, "--n_negative", 270)[2]
    assert both == judge(capsys, *words, "--n", 300, "--n_positive", 30)[2]
    assert both == judge(capsys, *words, "--n", 300, "--n_negative", 270)[2]
    assert both["z"] == detection_z(0.55, 30, 270)
    spread = 1.4 * null_std(30, 270)
    wanted = stats.norm.sf(stats.norm.isf(0.05) - (auc_max(1.0, 0.5) - 0.5) / spread)
    assert both["power"] == pytest.approx(wanted)  # the power formula with the unequal null itself
    assert both["power"] < judge(capsys, *words, "--n", 300)[2]["power"]


def test_learned_probe_in_unequal_groups_trains_on_all_there_is():
    given = PowerArguments(separation=[2.0], purity=0.3, n_positive=50, n_negative=250, dimension=40)
    question = Question.of(given)
    s_w = 2.0 / math.sqrt(1 + 4 * 40 / (0.8 * 300 * 0.3**2 * 4))
    wanted = stats.norm.sf(stats.norm.isf(0.05) - (auc_max(s_w, 0.3) - 0.5) / (1.4 * null_std(50, 250)))
    assert question.power_there(2.0, "cross_validated", True) == pytest.approx(wanted)


def test_below_chance_is_doubted(capsys):
    word, _, values, printed = judge(capsys, "--observed_auc", 0.4, *RESULT)
    assert word == "underpowered" and values["p"] > 0.95 and "labels swapped" in printed


def test_where_no_effect_is_large_enough(capsys):
    word, _, values, printed = judge(
        capsys, "--observed_auc", 0.5, "--n", 300, "--purity", 0.02, "--separation", 1, "--dimension", 10
    )
    assert word == "underpowered" and values["smallest_detectable_separation"] is None
    assert "no effect shows" in printed


def test_none_is_null_with_a_note(capsys):
    records, printed = run(capsys, "--separation", 0.1, "--n", 20)
    record = next(record for record in records if record["metric"] == "purity_threshold")
    assert record["value"] is None and record["note"].startswith("none") and "none" in printed


def test_records_are_flat_and_carry_their_parameters(capsys):
    records, _ = run(capsys, "--separation", 1, "--purity", 0.3, "--offset", 0.5, "--dimension", 8)
    assert all(record["measure"] == "power" for record in records)
    assert not any(isinstance(entry, (list, dict)) for record in records for entry in record.values())
    learned = next(record for record in records if record["probe"] == "learned" and record["group"] == "held_out")
    assert (learned["dimension"], learned["train_fraction"], learned["offset"]) == (8, 4.0, 0.5)
    assert value(records, "n", "held_out") == sample_budget(0.3, 1.0, offset=0.5)


def test_json_and_figure_files(tmp_path, capsys):
    record_file, figure = tmp_path / "new" / "plan.json", tmp_path / "plan.svg"
    main(["--n", "300", "--purity", "0.1", "--json", str(record_file), "--figure", str(figure)])
    assert str(figure) in capsys.readouterr().out
    assert len(json.loads(record_file.read_text())) == 4 * len(SEPARATIONS)
    root = ElementTree.fromstring(figure.read_text())
    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {f"s = {s:g}" for s in SEPARATIONS} <= set(words) and "this audit: n = 300" in words


def test_a_figure_alone_is_something_to_do(tmp_path, capsys):
    main(["--separation", "3", "--figure", str(tmp_path / "phases.SVG")])
    out = capsys.readouterr().out
    assert "s = 3" in out and (tmp_path / "phases.SVG").exists()
    document = (tmp_path / "phases.SVG").read_text()
    assert "one held-out split" in document and "pooled cross-validation" in document and "<circle" not in document


def test_planned_point_lies_on_its_frontier(tmp_path, capsys):
    main(["--separation", "1", "--purity", "0.3", "--figure", str(tmp_path / "a.svg")])
    assert f"n = {sample_budget(0.3, 1.0, inflation=1.4)}" in (tmp_path / "a.svg").read_text()
    main(["--separation", "1", "--n", "300", "--figure", str(tmp_path / "a.svg")])
    assert "purity 0.43" in (tmp_path / "a.svg").read_text()


def test_config_file(tmp_path, capsys):
    config = tmp_path / "audit.yaml"
    config.write_text("separation: 1.0\npurity: 0.3\ntests: 4\n")
    records, _ = run(capsys, "--config", config, "--tests", 2)
    assert value(records, "n", "held_out") == sample_budget(0.3, 1.0, level=0.025)


BAD = [
    ("", "nothing to compute"),
    ("--separation 1", "nothing to compute"),
    ("--purity 0", "`purity` must lie in"),
    ("--purity 1.2", "`purity` must lie in"),
    ("--purity nan", "`purity` must lie in"),
    ("--n 3", "`n` must be from 4"),
    ("--n 300 --separation 0", "`separation` must be above 0"),
    ("--n 300 --separation 1 inf", "`separation` must be above 0"),
    ("--n 300 --auc 0.5", "`auc` must lie"),
    ("--n 300 --auc 1", "`auc` must lie"),
    ("--n 300 --auc 0.7 --separation 1", "`auc` and `separation`"),
    ("--n 300 --level 0", "`level` must lie"),
    ("--n 300 --level 1", "`level` must lie"),
    ("--n 300 --power 1", "`power` must lie"),
    ("--n 300 --power 0.04", "`power` must lie"),
    ("--n 300 --tests 0", "`tests` must be at least 1"),
    ("--n 300 --inflation 0.9", "`inflation` must be at least 1"),
    ("--n 300 --offset nan", "`offset` must be finite"),
    ("--n 300 --dimension 0", "`dimension` must be at least 1"),
    ("--n 300 --train_fraction 2", "`train_fraction` is for a learned"),
    ("--n 300 --dimension 5 --train_fraction 0", "`train_fraction` must be above 0"),
    ("--n_positive 100", "one of `n_positive` and `n_negative`"),
    ("--n_positive 100 --n_negative 0", "`n_negative` must be from 1"),
    ("--n_positive 1 --n_negative 2", "must be at least 4"),
    ("--n 300 --n_positive 100 --n_negative 100", "contradicts"),
    ("--n 300 --n_positive 300", "one alone was given 300"),
    ("--observed_auc 0.6 --n 300 --purity 0.1 --separation 1 2", "against one effect.*got 2: 1, 2"),
    ("--observed_auc 1.1 --n 300 --purity 0.1 --separation 1", "`observed_auc` must lie"),
    ("--observed_auc 0.6 --purity 0.1 --separation 1", "depends on --n:"),
    ("--observed_auc 0.6 --n 300 --separation 1", "depends on --purity"),
    ("--observed_auc 0.6 --n 300 --purity 0.1", "depends on --separation"),
    ("--n 300 --figure plot.png", "`figure` must end in .svg"),
    ("--purity 1e-9 --separation 1e-7", "more than"),
    ("--purty 0.3", "did you mean `purity`"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=[words or "(none)" for words, _ in BAD])
def test_bad_input_is_one_error_before_anything_is_written(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    figure = [] if "--figure" in words else ["--figure", "plan.svg"]
    if message == "nothing to compute":
        figure = []
    with pytest.raises(ValueError, match=message):
        main([*words.split(), *figure, "--json", "plan.json"])
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""


def test_places_that_cannot_be_written_are_found_first(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for name, target in (
        ("json", tmp_path),
        ("json", tmp_path / "file" / "a.json"),
        ("figure", tmp_path / "file/a.svg"),
    ):
        with pytest.raises(ValueError, match=f"`{name}`"):
            main(["--n", "300", f"--{name}", str(target)])
    assert capsys.readouterr().out == ""


def test_wrong_evaluation_in_a_config_file(tmp_path):
    (tmp_path / "audit.yaml").write_text("n: 300\nevaluation: bootstrap\n")
    with pytest.raises((ValueError, SystemExit)):
        main(["--config", str(tmp_path / "audit.yaml")])


def test_is_a_command_and_prints_errors_without_a_traceback(capsys):
    assert "power" in COMMANDS
    assert cli(["power", "--purity", "0.3", "--separation", "1"]) == 0
    assert "312" in capsys.readouterr().out
    assert cli(["power", "--purity", "3"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("latentwatch power: error: `purity`") and "Traceback" not in err


def test_starts_without_torch_and_transformers():
    code = (
        "import sys; from recipes.cli import main; main(['power', '--n', '300', '--separation', '1']); "
        "print(sorted({'torch', 'transformers', 'sklearn', 'scipy.stats'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.splitlines()[-1] == "[]"
