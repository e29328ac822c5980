"""Nonlinear probes, by scikit-learn: diagnostics beside the linear one, under the same folds."""

from __future__ import annotations

import os
import warnings

import numpy as np
import torch
from joblib import Parallel, delayed
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import Tensor

KINDS = ("svm", "mlp")


def nonlinear_probes(
    features: Tensor, labels: Tensor, folds: Tensor, kind: str, *, n_jobs: int | None = None, seed: int = 0
) -> Tensor:
    """Out-of-fold scores of nonlinear classifiers, one a layer, fold and seed.

    Parameters
    ----------
    features : Tensor [n, L, d], floating
    labels : Tensor [n]
        1 for the positive class, 0 for the other.
    folds : LongTensor [S, n]
        From `monitor.geometry.probes.grouped_folds`.
    kind : {"svm", "mlp"}
        An RBF-kernel SVM (C = 1, gamma = 1/(d Var), decision function), or a network with one hidden layer of 64 ReLU
        units (Adam, early stopping; log-odds).
    n_jobs : int, optional
        Worker processes; by default one, all CPUs where there are more than 20 fits.
    seed : int
        Of the network's initial weights and early-stopping split.

    Returns
    -------
    scores : Tensor [S, L, n], float64, on the device of `features`

    Raises
    ------
    ValueError
        For shapes that do not fit, features that are not finite, labels that are not 0 and 1, another kind.

    Notes
    -----
    On features standardised in the training folds; arXiv 2609.22337, App. F-D. It runs on the CPU. A network that stops
    at its last iteration, or early, is what the protocol asks for, so scikit-learn's warning about it is not shown.
    """
    if kind not in KINDS:
        raise ValueError(f"`kind` must be one of {', '.join(KINDS)}; got {kind!r}.")
    if features.ndim != 3 or not features.is_floating_point() or 0 in features.shape:
        raise ValueError(f"`features` must be floating [n, L, d], got {features.dtype} {tuple(features.shape)}.")
    if labels.shape != (len(features),) or folds.ndim != 2 or folds.shape[1] != len(features):
        raise ValueError(
            f"`labels` must have the shape ({len(features)},) and `folds` [S, {len(features)}], got "
            f"{tuple(labels.shape)} and {tuple(folds.shape)}."
        )
    if not bool(((labels == 0) | (labels == 1)).all()):
        raise ValueError("`labels` must be 0 and 1 only.")
    if not bool(torch.isfinite(features).all()):
        raise ValueError("`features` must be finite; some are inf or nan.")
    x = features.detach().to("cpu", torch.float64).numpy()
    y, assigned = labels.cpu().numpy(), folds.cpu().numpy()
    fits = [(s, layer, f) for s in range(len(assigned)) for layer in range(x.shape[1]) for f in np.unique(assigned[s])]
    if n_jobs is None:
        n_jobs = os.cpu_count() if len(fits) > 20 else 1
    found = Parallel(n_jobs=n_jobs)(
        delayed(_held_out)(kind, x[:, layer], y, assigned[s] == f, seed) for s, layer, f in fits
    )
    scores = np.empty((len(assigned), x.shape[1], len(y)))
    for (s, layer, f), held_out in zip(fits, found, strict=True):
        scores[s, layer, assigned[s] == f] = held_out
    return torch.from_numpy(scores).to(features.device)


def _held_out(kind: str, x: np.ndarray, y: np.ndarray, held_out: np.ndarray, seed: int) -> np.ndarray:
    if kind == "svm":
        model = make_pipeline(StandardScaler(), SVC(C=1.0, gamma="scale"))
    else:
        network = MLPClassifier(hidden_layer_sizes=(64,), early_stopping=True, random_state=seed)
        model = make_pipeline(StandardScaler(), network)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(x[~held_out], y[~held_out])
    if kind == "svm":
        return model.decision_function(x[held_out])
    odds = model.predict_proba(x[held_out])
    return np.log(odds[:, 1].clip(1e-300)) - np.log(odds[:, 0].clip(1e-300))
