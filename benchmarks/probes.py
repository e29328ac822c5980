"""The probe engine against scikit-learn on the same folds: 5 folds x 5 seeds of logistic regression on every layer.

    python -m benchmarks.probes                        # SmolLM2 on the gender grid, all layers
    python -m benchmarks.probes --layers 5             # five of them, evenly spread
    python -m benchmarks.probes --width 4096           # made-up features of that width instead

Two tasks of 680 texts: ``separable``, all marked pairs, and ``mixed``, purity 0.3. Contestants, eight layers a call and
in turn, so that drift of the machine falls on all alike:

- ``ours``: `monitor.geometry.probes.logistic_probes`;
- ``loop``: the published protocol, StandardScaler and LogisticRegression(C=1, max_iter=3000) in a loop over the fits,
  scikit-learn's default tolerance and threading;
- ``joblib``: the same fits as parallel jobs, one a core, each with a single BLAS thread; its workers are warm.

Prints seconds, their ratios to ours, and the largest difference in a seed's pooled AUC to the loop, and to the loop at
tolerance 1e-12, which is where scikit-learn itself is going (on a few layers).
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from joblib import Parallel, delayed
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits
from torch import Tensor

from monitor.activations import States, plan_activations, run_plan
from monitor.geometry.auc import auc
from monitor.geometry.probes import grouped_folds, logistic_probes
from monitor.stimuli.counterfactual_grid import load_counterfactual_sets
from monitor.stimuli.mixture import draw_mixture
from recipes.models import load_model, load_tokenizer

N, PURITY = 680, 0.3
# Layers a contestant is given at a time.
BLOCK = 8


def of_model(name: str, n_layers: int | None) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Features [n, L, d], labels and groups of the two tasks, read from a model."""
    stimuli = load_counterfactual_sets(("gender",))["gender"]
    model, tokenizer = load_model(name).eval(), load_tokenizer(name)
    states = States(stimuli.texts, "all", "mean_no_sink")
    features = run_plan(model, plan_activations(model, tokenizer, [states])).states(states)
    if n_layers is not None:
        features = features[:, _spread(features.shape[1], n_layers)]
    mixture = draw_mixture(stimuli, N, PURITY)
    groups = torch.tensor(stimuli.groups)
    return {
        "separable": (features[: 2 * stimuli.n_pairs], torch.tensor(stimuli.labels), groups[: 2 * stimuli.n_pairs]),
        "mixed": (features[mixture.rows], mixture.labels, mixture.groups),
    }


def made_up(width: int, n_layers: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """The same tasks on features whose variances fall off as 1/k^2, as a model's do, with pairs on shared contexts."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    half = N // 2
    spectrum = torch.arange(1, width + 1) ** -1.0
    rotation = torch.linalg.qr(draw(width, width))[0]
    labels = torch.cat([torch.ones(half), torch.zeros(half)]).long()
    tasks = {}
    for task, purity in (("separable", 1.0), ("mixed", PURITY)):
        marked = (torch.arange(half) < purity * half).repeat(2)
        layers = []
        for _ in range(n_layers):
            contexts, noise = draw(half, width).repeat(2, 1), draw(N, width)
            signal = (2 * labels - 1)[:, None] * marked[:, None] * draw(width).sign()
            layers.append(((contexts + 0.3 * noise + signal) * spectrum) @ rotation)
        tasks[task] = (torch.stack(layers, dim=1), labels, torch.arange(half).repeat(2))
    return tasks


def fit(x: np.ndarray, y: np.ndarray, held_out: np.ndarray, tolerance: float) -> np.ndarray:
    """Scores of the held-out rows."""
    scaler = StandardScaler().fit(x[~held_out])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        probe = LogisticRegression(C=1.0, tol=tolerance, max_iter=3000 if tolerance > 1e-6 else 100_000)
        probe.fit(scaler.transform(x[~held_out]), y[~held_out])
    return probe.decision_function(scaler.transform(x[held_out]))


def on_one_thread(x: np.ndarray, y: np.ndarray, held_out: np.ndarray, tolerance: float) -> np.ndarray:
    with threadpool_limits(1):
        return fit(x, y, held_out, tolerance)


def scikit_learn(x: np.ndarray, y: np.ndarray, folds: np.ndarray, tolerance: float = 1e-4, jobs: int = 1) -> Tensor:
    """Out-of-fold scores [S, L, n] of features [n, L, d]."""
    fits = [(s, layer, row == k) for layer in range(x.shape[1]) for s, row in enumerate(folds) for k in range(5)]
    if jobs == 1:
        found = [fit(x[:, layer], y, held_out, tolerance) for _, layer, held_out in fits]
    else:
        found = Parallel(n_jobs=jobs)(
            delayed(on_one_thread)(x[:, layer], y, held_out, tolerance) for _, layer, held_out in fits
        )
    scores = np.empty((len(folds), x.shape[1], len(y)))
    for (s, layer, held_out), values in zip(fits, found, strict=True):
        scores[s, layer, held_out] = values
    return torch.from_numpy(scores)


def compare(task: str, features: Tensor, labels: Tensor, groups: Tensor, options) -> dict:
    folds = grouped_folds(groups)
    x, y, rows = features.double().numpy(), labels.numpy(), folds.numpy()
    contestants = {
        "ours": lambda layers: logistic_probes(features[:, layers], labels, folds),
        "loop": lambda layers: scikit_learn(x[:, layers], y, rows),
    }
    if options.jobs > 1:
        contestants["joblib"] = lambda layers: scikit_learn(x[:, layers], y, rows, jobs=options.jobs)
    n_layers = features.shape[1]
    for name, run in contestants.items():  # warm-up; the loop has nothing to start, and takes minutes at 4,096
        if name != "loop":
            run([0])
    seconds = {name: 0.0 for name in contestants}
    areas: dict[str, list[Tensor]] = {name: [] for name in contestants}
    for first in range(0, n_layers, BLOCK):
        for name, run in contestants.items():
            start = time.perf_counter()
            scores = run(list(range(first, min(first + BLOCK, n_layers))))
            seconds[name] += time.perf_counter() - start
            areas[name].append(auc(scores, labels))
    pooled = {name: torch.cat(values, dim=1) for name, values in areas.items()}
    checked = _spread(n_layers, options.check)
    to_optimum = {}
    if checked:
        tight = auc(scikit_learn(x[:, checked], y, rows, tolerance=1e-12), labels)
        to_optimum = {
            "auc_to_optimum": float((pooled["ours"][:, checked] - tight).abs().max()),
            "auc_loop_to_optimum": float((pooled["loop"][:, checked] - tight).abs().max()),
        }
    return {
        "task": task, "n": len(labels), "width": features.shape[2], "layers": n_layers, "seconds": seconds,
        "auc": float(pooled["ours"].mean()), "auc_to_loop": float((pooled["ours"] - pooled["loop"]).abs().max()),
        **to_optimum,
    }  # fmt: skip


def _spread(total: int, chosen: int) -> list[int]:
    return sorted({round(float(i)) for i in np.linspace(0, total - 1, min(chosen, total))})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--layers", type=int, help="so many layers, evenly spread; default: all, or 2 with --width")
    parser.add_argument("--width", type=int, help="made-up features of this width instead of the model's")
    parser.add_argument("--check", type=int, default=3, help="layers on which to compare with tolerance 1e-12; 0: none")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="parallel workers; 1 leaves joblib out")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(argv)

    tasks = made_up(options.width, options.layers or 2) if options.width else of_model(options.model, options.layers)
    load = os.getloadavg()[0]
    print(f"{torch.get_num_threads()} threads, load {load:.1f} before")
    records = [compare(task, *data, options) for task, data in tasks.items()]
    for record in records:
        print(
            f"{record['task']:9} n={record['n']} d={record['width']} {record['layers']} layers, "
            f"AUC {record['auc']:.4f}: " + _times(record["seconds"])
        )
        line = f"{'':9} largest difference in AUC: ours to the loop {record['auc_to_loop']:.1e}"
        if "auc_to_optimum" in record:
            line += f", ours to the optimum {record['auc_to_optimum']:.1e}"
            line += f", the loop to the optimum {record['auc_loop_to_optimum']:.1e}"
        print(line)
    both = {name: sum(record["seconds"][name] for record in records) for name in records[0]["seconds"]}
    print(f"together  {_times(both)}")
    if options.json:
        figures = {"threads": torch.get_num_threads(), "load": load, "tasks": records, "seconds": both}
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _times(seconds: dict[str, float]) -> str:
    ours = seconds["ours"]
    return ", ".join(
        f"{name} {value:.2f} s" + (f" ({value / ours:.1f} x)" if name != "ours" else "")
        for name, value in seconds.items()
    )


if __name__ == "__main__":
    main()
