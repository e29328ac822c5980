"""A GCG step with and without the cache of the prompt's beginning, and with logits of all rows or the target's alone.

    python -m benchmarks.gcg --model smollm2-135m

Each contestant takes the same step: gradient, the same candidates drawn and filtered, their losses. They take turns, so
that drift of the machine falls on all alike; what each prints is the median, and the median of the ratios within turns.

- ``plain``: every candidate whole, logits of every row;
- ``cache only``: keys and values of what comes before the first changed token computed once, logits of every other row;
- ``target only``: every candidate whole, logits of the rows that predict the target;
- ``both``: what `monitor.attacks.gcg` does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings

import torch

from monitor.attacks.gcg_candidates import allowed_tokens, best_tokens, draw
from monitor.attacks.gcg_loss import TargetLoss
from monitor.attacks.gcg_prompt import SuffixPrompt
from monitor.attacks.intact import intact
from monitor.stimuli.forget_set import load_forget_set
from recipes.concepts import concept_path
from recipes.models import load_model, load_tokenizer
from recipes.summary import write_records


class AllRows(TargetLoss):
    """Logits of every row, of which the last are then read."""

    def _logits(self, cache, **inputs):
        return self._forward(cache, **inputs)[:, -len(self.prompt.target) :]


CONTESTANTS = {
    "plain": (AllRows, False),
    "cache only": (AllRows, True),
    "target only": (TargetLoss, False),
    "both": (TargetLoss, True),
}


def step(loss: TargetLoss, allowed: torch.Tensor, args) -> tuple[float, torch.Tensor]:
    """Seconds of one step from the initial suffix, and the candidates' losses."""
    slots = loss.prompt.slots
    if loss.anatomy.device.type == "cuda":
        torch.cuda.synchronize()
    clock = time.process_time if args.processor_time else time.perf_counter
    start = clock()
    _, gradient = loss.gradient(slots)
    best = best_tokens(loss.scores(gradient, allowed), allowed, args.top_k)
    drawn = draw(loss.prompt, slots, best, args.candidates, torch.Generator().manual_seed(0))
    losses = loss.losses([c.ids for c in drawn], [c.changed for c in drawn])  # on the CPU: the device is done
    return clock() - start, losses


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--candidates", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--suffix-tokens", type=int, default=20)
    parser.add_argument("--target-tokens", type=int, default=8)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--processor-time", action="store_true", help="of this process alone, for a busy machine")
    parser.add_argument("--no-chat", action="store_true", help="without the tokenizer's template: a shorter beginning")
    parser.add_argument("--json", help="also write the records to this file, - for standard output")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", category=UserWarning)

    model, tokenizer = load_model(args.model, dtype=args.dtype).to(args.device), load_tokenizer(args.model)
    if args.no_chat:
        tokenizer.chat_template = None
    pairs = load_forget_set(concept_path("harry_potter")).split("forget")
    pair = max(pairs, key=lambda pair: len(tokenizer(pair.answer)["input_ids"]))  # short ones have fewer target tokens
    prompt = SuffixPrompt(tokenizer, pair.question, pair.answer, args.suffix_tokens, args.target_tokens)
    with intact(model) as anatomy:
        model.requires_grad_(False)
        allowed = allowed_tokens(tokenizer, model.get_input_embeddings().weight.shape[0], True)
        losses = {name: kind(anatomy, prompt, args.batch_size, cache) for name, (kind, cache) in CONTESTANTS.items()}
        step(losses["both"], allowed, args)  # what a first forward allocates once
        turns, found = [], {}
        for _ in range(args.turns):
            turn = {}
            for name, loss in losses.items():
                turn[name], found[name] = step(loss, allowed, args)
            turns.append(turn)
    apart = max(float((found[name] - found["plain"]).abs().max()) for name in found)
    records = [
        {
            "contestant": name,
            "seconds": statistics.median(turn[name] for turn in turns),
            "times_plain": statistics.median(turn["plain"] / turn[name] for turn in turns),
        }
        for name in CONTESTANTS
    ]
    parts = " + ".join(str(len(part)) for part in (prompt.before, prompt.slots, prompt.after, prompt.target))
    out = sys.stderr if args.json == "-" else sys.stdout
    print(f"{args.model}, {args.dtype}, {args.device}: {len(found['plain'])} candidates of {parts} tokens", file=out)
    for record in records:
        print(
            f"{record['contestant']:12} {record['seconds']:8.3f} s/step {record['times_plain']:6.2f} x plain's speed",
            file=out,
        )
    print(f"plain / both: {records[-1]['times_plain']:.2f}; losses at most {apart:.1e} apart", file=out)
    write_records(records, args.json)
    return records


if __name__ == "__main__":
    main()
