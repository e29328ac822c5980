"""What a reading of concept recovery costs beside the pass that it reads.

    python -m benchmarks.concept_reading --model smollm2-135m --concept animals

One concept and the control's contexts: the activation pass once, then `ConceptRecovery.read` against a reference that
differs. Prints (pass + reading) / pass; it should stay below 1.3. The pass stops at the measure's layer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from monitor.activations import Activations, plan_activations, run_plan
from monitor.measures.concept_recovery import ConceptRecovery
from monitor.stimuli.concepts import CONCEPTS, load_concept_sets
from recipes.models import load_model, load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--concept", default="animals", choices=CONCEPTS)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one JSON record instead of the table")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(args.model).eval().to(device), load_tokenizer(args.model)
    measure = ConceptRecovery(load_concept_sets((args.concept,)))
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
    forward, reading = statistics.median(passes), statistics.median(readings)
    record = {
        "model": args.model, "concept": args.concept, "texts": len(plan.sequences), "device": device,
        "pass_seconds": forward, "reading_seconds": reading, "ratio": (forward + reading) / forward,
    }  # fmt: skip
    if args.json:
        print(json.dumps(record))
        return
    print(f"{args.model}: {args.concept}, {record['texts']} texts, {args.repeats} repeats, {device}")
    print(f"pass {forward:.1f} s, reading {reading:.2f} s: (pass + reading) / pass = {record['ratio']:.2f}")


if __name__ == "__main__":
    main()
