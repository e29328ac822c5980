"""Is knowledge_z calibrated? The concept and the invented control on a model, and the concept under random weights.

    python -m benchmarks.knowledge_null --model smollm2-135m --seeds 20

Prints knowledge_z at the layer of a monitored run for the forget pairs and for the held-out pairs of the concept, and
for the forget pairs on models of the same architecture whose weights are drawn anew (`torch.manual_seed(seed)`), which
know nothing: those should lie within ±2 in about 95 of 100 cases.
"""

from __future__ import annotations

import argparse
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from monitor.activations import measure_activations
from monitor.measures.fragmentation import Fragmentation
from monitor.stimuli.forget_set import load_forget_set
from recipes.concepts import concept_path
from recipes.models import load_model, load_tokenizer, resolve_model
from recipes.summary import write_records


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--forget-set", default="harry_potter")
    parser.add_argument("--layer", type=float, default=0.8)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", help="also write the records to this file, - for standard output")
    args = parser.parse_args(argv)
    out = sys.stderr if args.json == "-" else sys.stdout

    forget_set = load_forget_set(concept_path(args.forget_set))
    tokenizer = load_tokenizer(args.model)
    forget = Fragmentation(forget_set.fragmentation_pairs("forget"), layer=args.layer)
    heldout = Fragmentation(forget_set.fragmentation_pairs("heldout"), layer=args.layer)
    records = []

    def read(weights: str, model, pairs: str, measure: Fragmentation) -> None:
        activations = measure_activations(model, tokenizer, measure.stimuli)
        (z,) = [r for r in measure.read(activations, activations) if r.metric == "knowledge_z"]
        records.append({"weights": weights, "pairs": pairs, "layer": z.layer, "knowledge_z": z.value,
                        "low": z.low, "high": z.high, "note": z.note})  # fmt: skip
        reading = f"layer {z.layer}  z {z.value:6.2f}  [{z.low:.2f}, {z.high:.2f}]"
        print(f"{weights:10} {pairs:8} {reading}", file=out, flush=True)

    model = load_model(args.model).to(args.device)
    read("trained", model, "forget", forget)
    read("trained", model, "heldout", heldout)
    del model
    config = AutoConfig.from_pretrained(resolve_model(args.model))
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        random = AutoModelForCausalLM.from_config(config).to(args.device).eval()
        read(f"seed {seed}", random, "forget", forget)
    inside = sum(abs(r["knowledge_z"]) <= 2 for r in records[2:])
    if args.seeds:
        print(f"random weights within ±2: {inside} of {args.seeds}", file=out)
    write_records(records, args.json)
    return records


if __name__ == "__main__":
    main()
