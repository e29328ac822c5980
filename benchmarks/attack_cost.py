"""What an attack costs, in training steps of the model that it attacks.

    python -m benchmarks.attack_cost
    python -m benchmarks.attack_cost --attacks membership in_context --papers

The unit is one step of gradient descent with AdamW on 16 of the bundled forget pairs, measured before and after the
attacks; the median of six. On the way each attack is run once, with the quick settings or the papers'. `gcg` takes as
long as all the others together, several times over.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings

import torch

from monitor.stimuli.encoding import encode_answer, qa_answer, qa_prompt
from monitor.stimuli.forget_set import load_forget_set
from recipes.attacks import ATTACKS, SAMPLING, chosen, wants_sampling
from recipes.concepts import concept_path
from recipes.models import load_model, load_tokenizer
from recipes.sampling_attacks import sampling_attacks
from recipes.summary import write_records

BATCH = 16


def training_steps(model, tokenizer, pairs, clock, n: int = 3) -> list[float]:
    """Seconds of `n` training steps on answer tokens of one padded batch; the model is copied back afterwards."""
    device = next(model.parameters()).device
    rows = [encode_answer(tokenizer, qa_prompt(p.question), qa_answer(p.answer)) for p in pairs[:BATCH]]
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for i, (row, start) in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = 1
        labels[i, start : len(row)] = ids[i, start : len(row)]
    batch = {"input_ids": ids.to(device), "attention_mask": mask.to(device), "labels": labels.to(device)}
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    seconds = []
    for _ in range(n + 1):  # the first one allocates
        start = clock()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for the device
        seconds.append(clock() - start)
    model.load_state_dict(kept)
    return seconds[1:]


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--attacks", nargs="+", default=["all"], choices=[*ATTACKS, "all"])
    parser.add_argument("--papers", action="store_true", help="the papers' settings instead of the quick ones")
    parser.add_argument("--wall-time", action="store_true", help="instead of this process's processor time")
    parser.add_argument("--json", help="also write the records to this file, - for standard output")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", category=UserWarning)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    clock = time.perf_counter if args.wall_time or device == "cuda" else time.process_time
    model, tokenizer = load_model(args.model, dtype=args.dtype).to(device), load_tokenizer(args.model)
    pairs = load_forget_set(concept_path("harry_potter"))
    quick = not args.papers
    attacks = chosen(args.attacks, quick=quick) if {*args.attacks} != {SAMPLING} else []
    if wants_sampling(args.attacks):
        attacks += sampling_attacks(model, tokenizer, pairs, {}, layer=0.8, rank=8, quick=quick, progress=True)
    model.train()
    forget = pairs.split("forget")
    steps = training_steps(model, tokenizer, forget, clock)
    seconds = {}
    for attack in attacks:
        start = clock()
        result = attack.function(model, tokenizer, pairs, attack.config, progress=True)
        seconds[attack.name] = clock() - start, result.n
    step = statistics.median(steps + training_steps(model, tokenizer, forget, clock))
    records = [
        {"attack": name, "seconds": taken, "questions": n, "training_steps": taken / step, "papers": args.papers}
        for name, (taken, n) in seconds.items()
    ]
    out = sys.stderr if args.json == "-" else sys.stdout
    print(f"{args.model}, {args.dtype}, {device}: a training step on {BATCH} pairs {step:.2f} s", file=out)
    for record in records:
        print(
            f"{record['attack']:14} {record['seconds']:8.1f} s = {record['training_steps']:7.1f} training steps, "
            f"{record['questions']} questions", file=out,
        )  # fmt: skip
    write_records(records, args.json)
    return records


if __name__ == "__main__":
    main()
