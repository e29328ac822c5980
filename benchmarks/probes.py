"""The probe engine against scikit-learn, on the same features, folds and protocol.

    python -m benchmarks.probes --model smollm2-135m
    python -m benchmarks.probes --width 4096

Grouped 5-fold x 5 seeds of l2 logistic regression at every layer: of the gender grid's 340 pairs ("separable"), and of
a mixture of as many texts at purity 0.3 ("mixed"). Contestants, in one run: `logistic_probes`; a plain scikit-learn
loop at its default tolerance and threads; the same over joblib workers of one thread each. Prints seconds, ratios, and
the largest difference of an out-of-fold AUC (a seed's, at a layer) to the loop's, and on two layers to scikit-learn's
optimum (tol = 1e-12). `--width` reads synthetic features of a decaying spectrum instead.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable

import numpy as np
import torch
from joblib import Parallel, delayed
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits
from torch import Tensor

from monitor.geometry.auc import auc
from monitor.geometry.probes import grouped_folds, logistic_probes
from monitor.stimuli.counterfactual import load_counterfactual_sets
from monitor.stimuli.mixture import draw_mixture


def one_fit(x: np.ndarray, y: np.ndarray, out: np.ndarray, tol: float, max_iter: int) -> np.ndarray:
    scaler = StandardScaler().fit(x[~out])
    model = LogisticRegression(C=1.0, tol=tol, max_iter=max_iter).fit(scaler.transform(x[~out]), y[~out])
    return model.decision_function(scaler.transform(x[out]))


def single_threaded_fit(*arguments) -> np.ndarray:
    with threadpool_limits(1):
        return one_fit(*arguments)


def scikit_learn(
    x: Tensor, labels: Tensor, folds: Tensor, jobs: int = 1, tol: float = 1e-4, max_iter: int = 3000
) -> Tensor:
    features, y, assigned = x.double().numpy(), labels.numpy(), folds.numpy()
    fits = [
        (s, layer, f) for s in range(len(assigned)) for layer in range(x.shape[1]) for f in range(assigned.max() + 1)
    ]
    if jobs == 1:
        found = [one_fit(features[:, layer], y, assigned[s] == f, tol, max_iter) for s, layer, f in fits]
    else:
        found = Parallel(n_jobs=jobs)(
            delayed(single_threaded_fit)(features[:, layer], y, assigned[s] == f, tol, max_iter) for s, layer, f in fits
        )
    scores = np.empty((len(assigned), x.shape[1], len(y)))
    for (s, layer, f), held_out in zip(fits, found, strict=True):
        scores[s, layer, assigned[s] == f] = held_out
    return torch.from_numpy(scores)


def real_problems(model_name: str, step: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Name -> features [680, L, d], labels, cells."""
    from monitor.activations import States, measure_activations  # noqa: PLC0415
    from recipes.models import load_model, load_tokenizer  # noqa: PLC0415

    gender = load_counterfactual_sets(("gender",))["gender"]
    request = States(gender.texts, "all", "mean_no_sink")
    model, tokenizer = load_model(model_name).eval(), load_tokenizer(model_name)
    states = measure_activations(model, tokenizer, [request]).states(request)[:, ::step]
    mixture = draw_mixture(gender, 680, 0.3)
    marked = torch.arange(2 * gender.n_pairs)
    groups = torch.tensor(gender.groups)
    return {
        "separable": (states[marked], torch.tensor(gender.labels), groups[marked]),
        "mixed": (states[mixture.rows], mixture.labels, mixture.groups),
    }


def wide_problems(width: int, layers: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """The same shapes at another width: contexts shared within a pair, a spectrum that decays as k^-0.7."""
    generator = torch.Generator().manual_seed(0)
    pairs = 340
    labels = torch.cat([torch.ones(pairs), torch.zeros(pairs)]).long()
    problems = {}
    for name, purity in (("separable", 1.0), ("mixed", 0.3)):
        marked = (torch.arange(pairs) < purity * pairs).float().repeat(2)[:, None]
        x = []
        for _ in range(layers):
            context = torch.randn(pairs, width, generator=generator).repeat(2, 1)
            own = 0.4 * torch.randn(2 * pairs, width, generator=generator)
            states = context + own + marked * (labels[:, None] - 0.5) * torch.randn(width, generator=generator)
            states = states * torch.arange(1, width + 1) ** -0.7
            x.append(
                torch.fft.rfft(states, norm="ortho").real @ torch.randn(width // 2 + 1, width, generator=generator)
            )
        problems[name] = (torch.stack(x, dim=1), labels, torch.arange(pairs).repeat(2))
    return problems


def timed(run: Callable[[], Tensor]) -> tuple[float, Tensor]:
    start = time.perf_counter()
    found = run()
    return time.perf_counter() - start, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--every", type=int, default=1, help="read every n-th layer only")
    parser.add_argument("--width", type=int, default=None, help="synthetic features of this width instead of a model's")
    parser.add_argument("--layers", type=int, default=2, help="layers of the synthetic features")
    parser.add_argument("--no_joblib", action="store_true", help="leave the parallel loop out")
    parser.add_argument("--json", action="store_true", help="print JSON records instead of the table")
    args = parser.parse_args()

    problems = real_problems(args.model, args.every) if args.width is None else wide_problems(args.width, args.layers)
    jobs = os.cpu_count() or 1
    records = []
    for name, (x, labels, cells) in problems.items():
        folds = grouped_folds(cells)
        logistic_probes(x[:, :1], labels, folds)  # warm up
        ours, scores = timed(lambda: logistic_probes(x, labels, folds))  # noqa: B023
        loop, reference = timed(lambda: scikit_learn(x, labels, folds))  # noqa: B023
        record = {
            "labels": name,
            "n": len(labels),
            "layers": x.shape[1],
            "width": x.shape[2],
            "ours": ours,
            "loop": loop,
        }
        if not args.no_joblib:
            record["joblib"] = timed(lambda: scikit_learn(x, labels, folds, jobs=jobs))[0]  # noqa: B023
        record["auc_difference"] = float((auc(scores, labels) - auc(reference, labels)).abs().max())
        few = x[:, :: max(1, x.shape[1] - 1)][:, :2]
        if args.width is None:
            exact = scikit_learn(few, labels, folds, jobs=jobs, tol=1e-12, max_iter=100_000)
            found = auc(logistic_probes(few, labels, folds), labels)
            record["auc_difference_to_optimum"] = float((found - auc(exact, labels)).abs().max())
        records.append(record)
    together = {key: sum(r[key] for r in records) for key in ("ours", "loop", "joblib") if key in records[0]}
    records.append({"labels": "together", **together, "auc_difference": max(r["auc_difference"] for r in records)})
    if args.json:
        print(json.dumps(records))
        return
    first = records[0]
    print(f"{first['n']} texts, {first['layers']} layers, width {first['width']}, {25 * first['layers']} fits a row")
    print(
        f"{'labels':<10} {'ours':>8} {'loop':>8} {'joblib':>8}  {'loop/ours':>9} {'joblib/ours':>11}  "
        "AUC difference (optimum)"
    )
    for r in records:
        joblib = f"{r['joblib']:>7.2f}s" if "joblib" in r else "       -"
        ratio = f"{r['joblib'] / r['ours']:>11.1f}" if "joblib" in r else "          -"
        optimum = f" ({r['auc_difference_to_optimum']:.1e})" if "auc_difference_to_optimum" in r else ""
        row = f"{r['labels']:<10} {r['ours']:>7.2f}s {r['loop']:>7.2f}s {joblib}  {r['loop'] / r['ours']:>9.1f} {ratio}"
        print(f"{row}  {r['auc_difference']:.1e}{optimum}")


if __name__ == "__main__":
    main()
