from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from monitor.geometry import auc as module
from monitor.geometry.auc import auc, auc_interval


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mixed_labels(n, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).permutation(np.arange(n) % 3 == 0).astype(int))


@pytest.mark.parametrize("rounding", [None, 2, 0], ids=["no ties", "some ties", "nearly all tied"])
def test_equals_scikit_learn(rounding):
    labels = mixed_labels(211)
    scores = draw(4, 6, 211) + 0.4 * labels
    if rounding is not None:
        scores = scores.round(decimals=rounding)
    expected = [[roc_auc_score(labels, row) for row in block] for block in scores.numpy()]
    assert np.allclose(auc(scores, labels), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_ties_of_coarse_dtypes_stay_ties(dtype):
    labels = mixed_labels(300)
    scores = (20 * draw(300)).to(dtype)
    assert float(auc(scores, labels)) == pytest.approx(roc_auc_score(labels, scores.double()), abs=1e-14)


def test_is_the_share_of_pairs_in_order():
    labels = torch.tensor([1, 0, 1, 0, 0])
    scores = torch.tensor([2.0, 1.0, 1.0, 3.0, 1.0])
    # 2 beats 1 and 1, loses to 3; 1 ties twice, loses to 3.
    assert float(auc(scores, labels)) == pytest.approx((2 + 0 + 0.5 + 0.5) / 6)


def test_monotone_maps_leave_it_and_exchanged_classes_mirror_it():
    labels, scores = mixed_labels(100), draw(3, 100)
    assert torch.equal(auc(scores.exp(), labels), auc(scores, labels))
    assert torch.allclose(auc(scores, 1 - labels), 1 - auc(scores, labels), atol=1e-15)
    assert torch.allclose(auc(-scores, labels), 1 - auc(scores, labels), atol=1e-15)


def test_chunks_change_nothing(monkeypatch):
    labels, scores = mixed_labels(90), draw(5, 7, 90).round(decimals=1)
    groups = torch.arange(90) // 2
    whole = auc(scores, labels), *auc_interval(scores, labels, groups)
    monkeypatch.setattr(module, "_MAX_SCORES", 200)
    parts = auc(scores, labels), *auc_interval(scores, labels, groups)
    for a, b in zip(whole, parts, strict=True):
        assert a.shape == (5, 7)
        assert torch.equal(a, b)


def reference_variance(scores, labels, groups):
    """Obuchowski 1997, written out sample by sample."""
    kernel = lambda p, q: float(p > q) + 0.5 * float(p == q)  # noqa: E731
    positives, negatives = np.flatnonzero(labels == 1), np.flatnonzero(labels == 0)
    area = np.mean([[kernel(scores[i], scores[j]) for j in negatives] for i in positives])
    a, b, m, k = {}, {}, {}, {}
    for c in set(groups.tolist()):
        of_cell = [i for i in positives if groups[i] == c]
        a[c] = sum(np.mean([kernel(scores[i], scores[j]) for j in negatives]) - area for i in of_cell)
        m[c] = len(of_cell)
        of_cell = [j for j in negatives if groups[j] == c]
        b[c] = sum(np.mean([kernel(scores[i], scores[j]) for i in positives]) - area for j in of_cell)
        k[c] = len(of_cell)
    i10, i01, i = sum(v > 0 for v in m.values()), sum(v > 0 for v in k.values()), len(m)
    big_m, big_n = len(positives), len(negatives)
    s10 = i10 / (i10 - 1) / big_m * sum(v**2 for v in a.values())
    s01 = i01 / (i01 - 1) / big_n * sum(v**2 for v in b.values())
    s11 = i / (i - 1) * sum(a[c] * b[c] for c in a)
    return area, s10 / big_m + s01 / big_n + 2 * s11 / (big_m * big_n)


@pytest.mark.parametrize("cells", [60, 17], ids=["DeLong", "clustered"])
def test_interval_is_the_logit_interval_of_the_written_out_variance(cells):
    labels = mixed_labels(60, seed=3)
    scores = (draw(60, seed=3) + 0.5 * labels).round(decimals=1).double()
    groups = torch.from_numpy(np.random.default_rng(5).permutation(np.arange(60) % cells))
    area, variance = reference_variance(scores.numpy(), labels.numpy(), groups.numpy())
    low, high = auc_interval(scores, labels, groups, level=0.9, inflation=1.4)
    reach = 1.6448536269514722 * 1.4 * np.sqrt(variance) / (area * (1 - area))
    logit = np.log(area / (1 - area))
    assert float(low) == pytest.approx(1 / (1 + np.exp(reach - logit)), abs=1e-12)
    assert float(high) == pytest.approx(1 / (1 + np.exp(-reach - logit)), abs=1e-12)
    if cells == 60:
        # DeLong's own form, with numpy's variances of placement values.
        p, q = scores[labels == 1].numpy(), scores[labels == 0].numpy()
        wins = (p[:, None] > q) + 0.5 * (p[:, None] == q)
        assert variance == pytest.approx(
            wins.mean(1).var(ddof=1) / len(p) + wins.mean(0).var(ddof=1) / len(q), rel=1e-12
        )


def coverage(low, high, truth):
    return float(((low <= truth) & (truth <= high)).double().mean())


# Near 1 the bound for perfect separation is the longer one, and coverage may only grow.
@pytest.mark.parametrize("distance, truth, most", [(0.0, 0.5, 0.96), (1.0, 0.7602499, 0.97), (2.5, 0.9614501, 0.99)])
def test_intervals_of_independent_samples_hold_the_truth_95_times_in_100(distance, truth, most):
    labels = (torch.arange(100) < 40).long()
    scores = draw(4000, 100, seed=1) + distance * labels
    # 4,000 runs: standard error 0.35 %.
    assert 0.94 < coverage(*auc_interval(scores, labels), truth) < most


def test_grouped_intervals_hold_the_truth_where_cells_repeat_a_class_and_plain_ones_do_not():
    # 50 cells of four samples of one class that share three quarters of their variance.
    cell = torch.arange(200) // 4
    labels = cell % 2
    scores = (0.75**0.5) * draw(3000, 50, seed=2)[:, cell] + 0.5 * draw(3000, 200, seed=3) + labels
    truth = 0.7602499
    assert 0.93 < coverage(*auc_interval(scores, labels, cell), truth) < 0.97
    assert coverage(*auc_interval(scores, labels), truth) < 0.8


def test_grouped_intervals_are_shorter_and_still_right_where_pairs_share_their_context():
    # Counterfactual pairs: the context cancels between the members, which the plain variance cannot know.
    cell = torch.arange(160) // 2
    labels = torch.arange(160) % 2
    scores = (0.75**0.5) * draw(3000, 80, seed=4)[:, cell] + 0.5 * draw(3000, 160, seed=5) + labels
    truth = 0.7602499
    grouped, plain = auc_interval(scores, labels, cell), auc_interval(scores, labels)
    assert 0.93 < coverage(*grouped, truth) < 0.97
    assert coverage(*plain, truth) > 0.985
    assert float((grouped[1] - grouped[0]).mean() / (plain[1] - plain[0]).mean()) < 0.8


def test_perfect_separation_gives_a_one_sided_interval_from_the_number_of_cell_pairs():
    labels = torch.arange(40) % 2
    perfect = torch.stack([labels * 2.0 + draw(40).abs().clamp_max(0.9), -labels.double()])
    low, high = auc_interval(perfect, labels)
    limit = 0.05 ** (1 / 20)
    assert torch.allclose(low, torch.tensor([limit, 0.0], dtype=torch.float64))
    assert torch.allclose(high, torch.tensor([1.0, 1 - limit], dtype=torch.float64))
    # Pairs in one cell: 20 cells are only 10 disjoint pairs of cells. Inflation by f costs f² of them.
    low, _ = auc_interval(perfect, labels, torch.arange(40) // 2, inflation=1.4)
    assert float(low[0]) == pytest.approx(0.05 ** (1.96 / 10))
    # Two groups of positives, many of negatives: two trials.
    low, _ = auc_interval(
        perfect[0], labels, torch.where(labels == 1, torch.arange(40) % 4 // 2, 10 + torch.arange(40))
    )
    assert float(low) == pytest.approx(0.05**0.5)


def test_the_rule_for_perfect_separation_is_exact_where_it_is_hardest():
    # One positive in few lies below every negative: AUC = 1 - p, and a sample without one looks perfect. With p a
    # little above the limit the interval fails exactly when no such positive is drawn, with probability just under 5 %.
    n, labels = 30, torch.arange(60) % 2
    p = (1 - 0.05 ** (1 / n)) * 1.001
    rare = torch.rand(20_000, 60, generator=torch.Generator().manual_seed(7)) < p
    scores = torch.where(rare & (labels == 1), -1.0, labels + 0.5 * draw(20_000, 60, seed=8).abs().clamp_max(1.9))
    low, _ = auc_interval(scores, labels)
    failures = float((low > 1 - p).double().mean())
    assert 0.05 - 0.006 < failures < 0.05 + 0.006  # four standard errors


def test_one_misordered_pair_is_not_surer_than_none():
    labels = torch.arange(400) % 2
    scores = labels * 1000.0 + torch.arange(400)
    nearly = scores.clone()
    nearly[399], nearly[398] = nearly[398].clone(), nearly[399].clone()
    nearly[1], nearly[398] = 699.0, 699.5  # the lowest positive just below the highest negative
    assert 0.9999 < float(auc(nearly, labels)) < 1
    assert float(auc_interval(nearly, labels)[0]) <= float(auc_interval(scores, labels)[0])


def test_intervals_are_never_empty_and_hold_the_estimate():
    labels = mixed_labels(40)
    scores = torch.cat([draw(200, 40) * 1e-3 + labels * draw(200, 1), torch.zeros(1, 40)]).round(decimals=3)
    area = auc(scores, labels)
    low, high = auc_interval(scores, labels)
    assert bool((low < high).all())
    assert bool(((0 <= low) & (low <= area) & (area <= high) & (high <= 1)).all())
    # All tied: nothing is known but the 13 trials behind the estimate.
    assert float(low[-1]) < 0.3
    assert float(high[-1]) > 0.7


def test_exchanged_classes_mirror_the_interval():
    labels, scores, groups = mixed_labels(90), draw(5, 90), torch.arange(90) // 3
    low, high = auc_interval(scores, labels, groups)
    other_low, other_high = auc_interval(scores, 1 - labels, groups)
    assert torch.allclose(other_low, 1 - high, atol=1e-12)
    assert torch.allclose(other_high, 1 - low, atol=1e-12)


def test_wider_at_a_higher_level_and_with_inflation():
    labels, scores = mixed_labels(90), draw(90)
    width = lambda **options: float(torch.subtract(*reversed(auc_interval(scores, labels, **options))))  # noqa: E731
    assert width(level=0.8) < width() < width(inflation=1.4) < width(level=0.99, inflation=1.4)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((torch.tensor([0.0, float("nan"), 1.0, 2.0]), torch.tensor([0, 1, 1, 0])), "scores must be finite; 1 "),
        ((torch.zeros(3), torch.tensor([0, 1])), "labels must give one label per sample"),
        ((torch.zeros(3), torch.tensor([0, 1, 2])), "labels must be 0 or 1"),
        ((torch.zeros(3), torch.tensor([1, 1, 1])), "both classes; got 3 positive of 3"),
        ((torch.zeros(2, 0), torch.zeros(0)), "scores must be"),
    ],
)
def test_bad_input_is_named(arguments, message):
    for function in (auc, auc_interval):
        with pytest.raises(ValueError, match=message):
            function(*arguments)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"groups": torch.zeros(3)}, "one group per sample"),
        ({"groups": torch.tensor([0, 0, 1, 2])}, "at least two independent samples.*got 1 with a positive and 2"),
        ({"level": 1.0}, "level must lie"),
        ({"inflation": 0.0}, "inflation must be"),
    ],
)
def test_bad_interval_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        auc_interval(torch.arange(4.0), torch.tensor([1, 1, 0, 0]), **options)
