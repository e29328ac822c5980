"""What a detectability reading costs beside the pass that it reads.

    python -m benchmarks.detectability --model smollm2-135m

Four dimensions over the bundled grid (3,400 texts), every layer: the activation pass once, then `Detectability.read`
against a reference that differs, so that nothing is skipped. Prints (pass + reading) / pass; the reading may not cost
more than the pass, so this should stay below 2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from monitor.activations import Activations, plan_activations, run_plan
from monitor.measures.detectability import Detectability
from recipes.models import load_model, load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one JSON record instead of the table")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(args.model).eval().to(device), load_tokenizer(args.model)
    measure = Detectability(scan=True)
    plan = plan_activations(model, tokenizer, measure.stimuli)
    passes, readings = [], []
    for _ in range(args.repeats):
        start = time.perf_counter()
        now = run_plan(model, plan)
        passes.append(time.perf_counter() - start)
        reference = Activations(plan, {name: tensor * 1.01 for name, tensor in now.tensors.items()})
        start = time.perf_counter()
        measure.read(now, reference)
        readings.append(time.perf_counter() - start)
    one_pass, one_reading = statistics.median(passes), statistics.median(readings)
    record = {
        "model": args.model, "layers": plan.n_layers + 1, "texts": len(plan.sequences), "pass_seconds": one_pass,
        "reading_seconds": one_reading, "ratio": (one_pass + one_reading) / one_pass,
    }  # fmt: skip
    if args.json:
        print(json.dumps(record))
        return
    print(f"{args.model}: {record['texts']} texts, {record['layers']} layers, {args.repeats} repeats, {device}")
    print(f"pass {one_pass:.1f} s, reading {one_reading:.1f} s: (pass + reading) / pass = {record['ratio']:.2f}")


if __name__ == "__main__":
    main()
