import pytest
import torch

from monitor.activations import States
from monitor.measures.detectability_design import design
from monitor.stimuli.counterfactual_grid import load_counterfactual_sets


def made(n=60, purity=0.3, dimension="gender", **options):
    stimuli = load_counterfactual_sets((dimension,), cells=60)[dimension]
    options = {"n_folds": 5, "n_seeds": 3, "seed": 0} | options
    return stimuli, design(stimuli, States(stimuli.texts), n, purity, **options)


def test_all_pairs_then_the_mixture():
    stimuli, plan = made()
    full, mixed = plan.regimes
    assert (full.suffix, full.n, full.purity) == ("", 120, 1.0)
    assert (mixed.suffix, mixed.n, mixed.n_marked, mixed.purity) == ("_mixed", 60, 18, 0.3)
    assert full.rows.tolist() == list(range(120)) and full.labels.tolist() == [1] * 60 + [0] * 60
    texts = [stimuli.texts[row] for row in mixed.rows]
    assert all(text in stimuli.positive for text in texts[:9]) and all(text in stimuli.negative for text in texts[9:18])
    assert all(text in stimuli.neutral for text in texts[18:])


@pytest.mark.parametrize("which", [0, 1])
def test_no_cell_is_in_two_folds_of_a_seed_and_random_folds_part_some(which):
    regime = made()[1].regimes[which]
    assert regime.folds.shape == regime.random_folds.shape == (3, regime.n)

    def parted(folds):
        return sum(len(folds[regime.groups == group].unique()) > 1 for group in regime.groups.unique())

    assert all(parted(folds) == 0 for folds in regime.folds)
    assert all(parted(folds) > 0 for folds in regime.random_folds)


def test_stereotypes_are_taken_together_by_content_not_by_cell():
    stimuli = load_counterfactual_sets(("gender",))["gender"]
    plan = design(stimuli, States(stimuli.texts), 300, 0.3, n_folds=5, n_seeds=1, seed=0)
    rows, labels, contents = plan.stereotypes
    assert len(rows) == 160 and len(contents.unique()) == 16
    for content in contents.unique():
        assert len(labels[contents == content].unique()) == 1
    assert made(dimension="race")[1].stereotypes is None


def test_same_seed_same_design_and_global_randomness_is_left_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one, other, third = made()[1], made()[1], made(seed=1)[1]
    assert torch.equal(one.regimes[1].rows, other.regimes[1].rows) and torch.equal(
        one.regimes[0].folds, other.regimes[0].folds
    )
    assert not torch.equal(one.regimes[1].rows, third.regimes[1].rows)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_mixture_without_a_single_pair_is_an_error():
    with pytest.raises(ValueError, match="no pair at all"):
        made(n=20, purity=0.01)
