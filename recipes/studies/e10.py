"""E10: kernel and MLP probes against the purity law and the curvature ceiling (arXiv 2609.22337, section VI-K).

S1: a flat mixture of known separation and purity, where the law is a Bayes bound and nothing can beat it.
S2: two clusters on a sphere, where a probe that knows the curvature was expected to beat a linear one.
R: the states of a model, in `e10_models`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from tqdm import tqdm

from monitor.geometry.curvature import chordal_auc, geodesic_auc
from monitor.geometry.detection import null_std
from monitor.geometry.probes import fit_probe
from monitor.geometry.purity import auc_max
from recipes.studies.record import record

TITLE = "kernel and MLP probes against the purity law and the curvature ceiling"

PROBES = ("linear", "svm", "mlp")
DIMENSION = 20
Samples = tuple[NDArray[np.float64], NDArray[np.int64]]  # features [n, DIMENSION], labels [n]


@dataclass(frozen=True)
class FlatMixture:
    """Two Gaussian clusters, of which a share `purity` of the samples is marked; the rest lies between them."""

    separation: float
    purity: float

    def draw(self, n: int, rng: np.random.Generator) -> Samples:
        labels = np.arange(n) % 2
        marked = rng.random(n) < self.purity
        x = rng.standard_normal((n, DIMENSION))
        x[:, 0] += marked * (labels - 0.5) * self.separation
        return x, labels

    def oracle(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Score along the true direction, the best of all (Remark 1)."""
        return x[:, 0]


@dataclass(frozen=True)
class Shells:
    """Two centred Gaussians, one of `ratio` times the spread: no linear score tells them apart, the norm does."""

    ratio: float

    def draw(self, n: int, rng: np.random.Generator) -> Samples:
        labels = np.arange(n) % 2
        return rng.standard_normal((n, DIMENSION)) * np.where(labels == 1, self.ratio, 1.0)[:, None], labels

    def oracle(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.linalg.norm(x, axis=1)


@dataclass(frozen=True)
class Sphere:
    """Two clusters at geodesic distance r on a sphere of curvature kappa and dimension d_B, in DIMENSION dimensions.

    Spread by tau along the sphere and by sigma in all directions.
    """

    curvature: float
    distance: float
    dimension: int
    intrinsic_std: float
    ambient_std: float

    @property
    def centres(self) -> NDArray[np.float64]:
        """[2, d_B + 1]: of label 0 and label 1."""
        radius, half = 1 / math.sqrt(self.curvature), math.sqrt(self.curvature) * self.distance / 2
        centres = np.zeros((2, self.dimension + 1))
        centres[:, 0], centres[:, 1] = radius * math.cos(half), (-radius * math.sin(half), radius * math.sin(half))
        return centres

    def draw(self, n: int, rng: np.random.Generator) -> Samples:
        labels, radius = np.arange(n) % 2, 1 / math.sqrt(self.curvature)
        centre = self.centres[labels]
        step = self.intrinsic_std * rng.standard_normal(centre.shape)
        step -= (step * centre).sum(1, keepdims=True) * centre / radius**2  # into the tangent space
        length = np.linalg.norm(step, axis=1, keepdims=True)
        x = self.ambient_std * rng.standard_normal((n, DIMENSION))
        # The exponential map: a great circle of this length in this direction.
        x[:, : self.dimension + 1] += (
            np.cos(length / radius) * centre + radius * np.sin(length / radius) * step / length
        )
        return x, labels

    def oracle(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Difference of the geodesic distances to the two true centres, after projection onto the true sphere."""
        radius = 1 / math.sqrt(self.curvature)
        on_sphere = x[:, : self.dimension + 1]
        on_sphere = on_sphere / np.linalg.norm(on_sphere, axis=1, keepdims=True)
        distances = radius * np.arccos(np.clip(on_sphere @ self.centres.T / radius, -1.0, 1.0))
        return distances[:, 0] - distances[:, 1]


MIXTURES = tuple(FlatMixture(s, a) for s in (1.5, 3.0) for a in (0.1, 0.2, 0.3, 0.5, 0.7, 1.0))
AMBIENT = (
    *(Sphere(4.0, r, 2, 0.1, 0.45) for r in (0.5, 1.0, 1.5)),
    *(Sphere(4.0, r, 10, 0.05, 0.45) for r in (0.5, 1.0, 1.5)),
    *(Sphere(1.0, r, 2, 0.1, 0.45) for r in (0.5, 1.0, 1.5)),
)
INTRINSIC = tuple(Sphere(4.0, r, 2, 0.4, 0.02) for r in (0.5, 1.0, 1.5))

_OVERSHOOT = {"linear": 0.016, "svm": -0.005, "mlp": -0.015}
_AT_1_5 = {"linear": 0.933, "oracle": 0.934}
_S2 = (
    "ambient noise: the paper gives neither spreads nor dimensions; its 0.933 and 0.934 are at curvature 4, r = 1.5. "
    "Our spreads are such that AUCs lie near them: what compares is the order of the probes. "
    "Where all noise is ambient the likelihood ratio of the two Gaussians is linear in the features: the linear probe "
    "is the best there is, and `auc_flat_formula` (Corollary 1) is out of reach for all."
)
_INTRINSIC = (
    "noise along the sphere: here Corollary 1 expects the oracle at `auc_flat_formula`. It stays at the linear probe: "
    "the sphere is closed, no point is farther from its own centre than half a great circle. Both formulas hold for "
    "spreads that are small against the radius; the AUC is then below 1 only where r is small too, and chord and arc "
    "are the same."
)


def run(quick: bool = False, seed: int = 42, model: str | None = None) -> list[dict]:
    """S1, S2 and a control that only nonlinear probes can solve.

    Parameters
    ----------
    quick : bool
        One repeat of 600 samples on a part of the settings instead of five of 2,000 on all.
    seed : int
    model : str, optional
        A folder, a Hub id or an embedded name: part R on its states as well.

    Returns
    -------
    records : list of dict
    """
    n, repeats = (600, 1) if quick else (2_000, 5)
    mixtures = MIXTURES[2::3] if quick else MIXTURES
    ambient = AMBIENT[2:3] if quick else AMBIENT
    intrinsic = INTRINSIC[1:2] if quick else INTRINSIC
    control = Shells(1.3)
    rng = np.random.default_rng(seed)
    tasks = [task for task in (*mixtures, *ambient, *intrinsic, control) for _ in range(repeats)]
    found: dict[FlatMixture | Sphere | Shells, list[dict[str, float]]] = {}
    for task in tqdm(tasks, desc="E10", unit="data set", disable=None):
        found.setdefault(task, []).append(held_out_aucs(task, n, rng))
    aucs = {task: {name: np.array([run[name] for run in runs]) for name in runs[0]} for task, runs in found.items()}
    records = _purity({task: aucs[task] for task in mixtures}, n)
    records += _curvature({task: aucs[task] for task in ambient}, "ambient", _S2)
    records += _curvature({task: aucs[task] for task in intrinsic}, "intrinsic", _INTRINSIC)
    note = "control: two centred clouds, one 1.3 times as wide; nonlinear probes must see it, the linear one cannot."
    for name, values in aucs[control].items():
        records.append(record("e10", "control, two widths", f"auc_{name}", values.mean(), note=note))
    if model is not None:
        from recipes.studies import e10_models  # brings transformers with it, which the rest does without

        records += e10_models.run(quick=quick, seed=seed, model=model)
    return records


def held_out_aucs(task: FlatMixture | Sphere | Shells, n: int, rng: np.random.Generator) -> dict[str, float]:
    """AUC on n new samples of every probe trained on n samples, and of the task's oracle."""
    (x, labels), (x_test, labels_test) = task.draw(n, rng), task.draw(n, rng)
    scores = {name: _scores(name, x, labels, x_test, int(rng.integers(2**31))) for name in PROBES}
    scores["oracle"] = task.oracle(x_test)
    return {name: float(roc_auc_score(labels_test, score)) for name, score in scores.items()}


def _scores(
    name: str, x: NDArray[np.float64], labels: NDArray[np.int64], x_test: NDArray[np.float64], seed: int
) -> NDArray[np.float64]:
    """Test scores of one probe on standardised features (appendix F-D)."""
    if name == "linear":
        probe = fit_probe(torch.from_numpy(x)[:, None], torch.from_numpy(labels))
        return probe.score(torch.from_numpy(x_test)[:, None])[0].numpy()
    if name == "svm":
        return make_pipeline(StandardScaler(), SVC(C=1.0, gamma="scale")).fit(x, labels).decision_function(x_test)
    network = MLPClassifier((64,), early_stopping=True, random_state=seed)
    return make_pipeline(StandardScaler(), network).fit(x, labels).predict_proba(x_test)[:, 1]


def _purity(aucs: dict[FlatMixture, dict[str, NDArray[np.float64]]], n: int) -> list[dict]:
    records = []
    for task, of_task in aucs.items():
        group = f"S1: s={task.separation:g}, purity {task.purity:g}"
        for name in (*PROBES, "oracle"):
            records.append(record("e10", group, f"auc_{name}", of_task[name].mean()))
        records.append(record("e10", group, "auc_law", auc_max(task.separation, task.purity)))
    group, note = (
        f"S1: {len(aucs)} settings",
        f"one data set a setting, as in the paper; {n} training and test samples.",
    )
    law = {task: auc_max(task.separation, task.purity) for task in aucs}
    for name in PROBES:
        largest = max(of_task[name][0] - law[task] for task, of_task in aucs.items())
        records.append(record("e10", group, f"max_over_law_{name}", largest, _OVERSHOOT[name], note))
    records.append(record("e10", group, "null_std_of_an_auc", null_std(n // 2, n // 2)))
    note = "on the same test samples, so that most of the sampling error cancels; mean over repeats."
    for name in PROBES:
        largest = max((of_task[name] - of_task["oracle"]).mean() for of_task in aucs.values())
        records.append(record("e10", group, f"max_over_best_direction_{name}", largest, note=note))
    return records


def _curvature(aucs: dict[Sphere, dict[str, NDArray[np.float64]]], noise: str, note: str) -> list[dict]:
    records = []
    for task, of_task in aucs.items():
        spreads = f"spreads {task.intrinsic_std:g} along and {task.ambient_std:g} around"
        group = f"S2: curvature {task.curvature:g}, r={task.distance:g}, d_B={task.dimension}, {spreads}"
        published = _AT_1_5 if noise == "ambient" and task.curvature == 4.0 and task.distance == 1.5 else {}
        for name in (*PROBES, "oracle"):
            records.append(record("e10", group, f"auc_{name}", of_task[name].mean(), published.get(name), note))
        spread = task.intrinsic_std, task.ambient_std
        records.append(record("e10", group, "auc_chordal_formula", chordal_auc(task.curvature, task.distance, *spread)))
        records.append(record("e10", group, "auc_flat_formula", geodesic_auc(task.distance, *spread)))
    for name in ("svm", "mlp", "oracle"):
        largest = max((of_task[name] - of_task["linear"]).mean() for of_task in aucs.values())
        paper = 0.002 if noise == "ambient" and name == "oracle" else None
        records.append(record("e10", f"S2: {noise} noise", f"max_over_linear_{name}", largest, paper))
    return records
