"""Nonlinear probes under the protocol of the linear one: a kernel machine and a small network, fit by fit."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from joblib import Parallel, delayed
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from threadpoolctl import threadpool_limits
from torch import Tensor

from monitor.geometry.probes import check_protocol

KINDS = ("svm", "mlp")


def nonlinear_probes(
    features: Tensor, labels: Tensor, folds: Tensor, kind: str, *, n_jobs: int = -1, seed: int = 0
) -> Tensor:
    """Out-of-fold scores of nonlinear probes, one a layer, fold and seed; as `logistic_probes` of linear ones.

    Parameters
    ----------
    features : Tensor [n, L, d] or [n, d], floating
    labels : Tensor [n]
        1 for the positive class, 0 for the other.
    folds : LongTensor [S, n]
        From `monitor.geometry.probes.grouped_folds`.
    kind : "svm" or "mlp"
        A support vector machine with an RBF kernel, or a network with one hidden layer.
    n_jobs : int, default -1
        Threads that share the fits; -1 for one a core. The scores do not depend on it.
    seed : int, default 0
        Of the network's initial weights, batches and validation set, the same for every fit.

    Returns
    -------
    scores : Tensor [S, L, n] ([S, n] for features without layers), float64, on the device of `features`
        Decision values of the machine, probabilities of the network; higher for the positive class.

    Raises
    ------
    ValueError
        As `logistic_probes`, and for another kind.

    Notes
    -----
    arXiv 2609.22337, App. F-D: scikit-learn's ``SVC(C=1, gamma="scale")`` and ``MLPClassifier`` with 64 ReLU units,
    Adam and early stopping, on features standardised in the training folds. Early stopping holds back a tenth of the
    training rows, without regard to groups, to see when they stop improving. A network that is still improving after
    200 epochs is taken as it is, and scikit-learn's warning of that is silenced. All run on the CPU, one thread a fit.
    """
    if kind not in KINDS:
        raise ValueError(f"`kind` must be one of {', '.join(KINDS)}; got {kind!r}.")
    layered = features if features.ndim == 3 else features[:, None]
    check_protocol(features, labels, folds)
    x = layered.detach().to("cpu", torch.float64).numpy()
    y, fold_of = labels.cpu().numpy().astype(np.int64), folds.cpu().numpy()
    fits = [
        (s, layer, fold_of[s] == k)
        for layer in range(x.shape[1])
        for s in range(len(fold_of))
        for k in np.unique(fold_of[s])
    ]
    # Threads, as a process would first import everything anew. Limits and filters are the process's: set once, outside.
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = Parallel(n_jobs=n_jobs, backend="threading")(
            delayed(_held_out_scores)(x[:, layer], y, held_out, kind, seed) for _, layer, held_out in fits
        )
    scores = np.empty((len(fold_of), x.shape[1], len(y)))
    for (s, layer, held_out), values in zip(fits, found, strict=True):
        scores[s, layer, held_out] = values
    result = torch.from_numpy(scores).to(features.device)
    return result if features.ndim == 3 else result[:, 0]


def _held_out_scores(
    x: NDArray[np.float64], y: NDArray[np.int64], held_out: NDArray[np.bool_], kind: str, seed: int
) -> NDArray[np.float64]:
    scaler = StandardScaler().fit(x[~held_out])
    train, test = scaler.transform(x[~held_out]), scaler.transform(x[held_out])
    if kind == "svm":
        return SVC(C=1.0, gamma="scale").fit(train, y[~held_out]).decision_function(test)
    network = MLPClassifier((64,), early_stopping=True, random_state=seed)
    return network.fit(train, y[~held_out]).predict_proba(test)[:, 1]
