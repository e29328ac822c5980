"""What a measure's reading costs beside the activation pass that it reads.

    python -m benchmarks.readings
    python -m benchmarks.readings --measures detectability --scan
    python -m benchmarks.readings --measures concept_recovery --concepts animals

Of each measure by itself: the pass over its stimuli once, which stops at its deepest layer, then `read` against a
reference that differs, so that nothing is skipped. Prints (pass + reading) / pass. It should stay below 1.3 for one
concept, and below 2 for detectability of four dimensions at every layer (3,400 texts).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch

from monitor.activations import Activations, plan_activations, run_plan
from monitor.measures.concept_recovery import ConceptRecovery
from monitor.measures.detectability import Detectability
from monitor.stimuli.concepts import CONCEPTS, load_concept_sets
from monitor.stimuli.forget_set import load_forget_set
from recipes.concepts import concept_path
from recipes.measures import MEASURES, behaviour, bias_shift, fragmentation
from recipes.models import load_model, load_tokenizer
from recipes.summary import write_records


def measure_of(name: str, args):
    """The measure as the recipes have it."""
    if name == "detectability":
        return Detectability(scan=args.scan)
    if name == "concept_recovery":
        return ConceptRecovery(load_concept_sets(args.concepts))
    if name == "bias_shift":
        return bias_shift("small")
    pairs = load_forget_set(concept_path("harry_potter"))
    return behaviour(pairs) if name == "behaviour" else fragmentation(pairs, 0.8)


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--measures", nargs="+", default=["bias_shift", "fragmentation", "behaviour"], choices=MEASURES)
    parser.add_argument("--scan", action="store_true", help="detectability at every layer")
    parser.add_argument("--concepts", nargs="+", default=["animals"], choices=CONCEPTS)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--processor-time", action="store_true", help="of this process alone, for a busy machine")
    parser.add_argument("--json", help="also write the records to this file, - for standard output")
    args = parser.parse_args(argv)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    clock = time.process_time if args.processor_time else time.perf_counter
    model, tokenizer = load_model(args.model).eval().to(device), load_tokenizer(args.model)
    out = sys.stderr if args.json == "-" else sys.stdout
    records = []
    for name in args.measures:
        measure = measure_of(name, args)
        plan = plan_activations(model, tokenizer, measure.stimuli)
        passes, readings = [], []
        for _ in range(args.repeats):
            start = clock()
            now = run_plan(model, plan)  # its results are on the CPU: the device is done
            passes.append(clock() - start)
            reference = Activations(plan, {key: tensor * 1.01 for key, tensor in now.tensors.items()})
            start = clock()
            measure.read(now, reference)
            readings.append(clock() - start)
        one_pass, one_reading = statistics.median(passes), statistics.median(readings)
        records.append({
            "measure": name, "model": args.model, "texts": len(plan.sequences), "device": device,
            "pass_seconds": one_pass, "reading_seconds": one_reading, "ratio": (one_pass + one_reading) / one_pass,
        })  # fmt: skip
        print(
            f"{name:16} {len(plan.sequences):5} texts: pass {one_pass:7.2f} s, reading {one_reading:6.2f} s, "
            f"(pass + reading) / pass = {records[-1]['ratio']:.2f}", file=out, flush=True,
        )  # fmt: skip
    write_records(records, args.json)
    return records


if __name__ == "__main__":
    main()
