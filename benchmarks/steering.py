"""Steered generation of many samples at once against one sample at a time.

    python -m benchmarks.steering --model smollm2-135m

Every contestant steers by the same points, random directions as long as the model's states, after the same prompts:

- ``batched``: `monitor.steered_generation.steered_answers`, all points and prompts in one call;
- ``one by one``: the same function, called for each point and prompt alone;
- ``plain loop``: `model.generate` with a hook, for each point and prompt alone, as one would write it down.

The contestants take turns, so that drift of the machine falls on all alike; what is printed is the median of the
seconds a sample, and the median of the ratios within turns. One sample takes as long as another, so the slow two answer
only the first `--alone` points of each prompt (0: all).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable

import torch
from transformers import GenerationConfig

from monitor.activation_norms import activation_norm_range
from monitor.anatomy import find_anatomy
from monitor.generation import encode_prompt
from monitor.requests import resolve_layer
from monitor.steered_generation import entering, instruction_prompt, steered_answers
from monitor.stimuli.instructions import load_instructions
from recipes.models import load_model, load_tokenizer
from recipes.summary import write_records


def plain_loop(model, tokenizer, prompt: str, point: torch.Tensor, settings: dict) -> str:
    """One sample by `model.generate`, without `monitor`'s decoding."""
    step = 0

    def push(hidden):
        nonlocal step
        hidden = hidden.clone()
        hidden[:, -1] += settings["strength"] * settings["decay"] ** step * point.to(hidden.device, hidden.dtype)
        step += 1
        return hidden

    ids = torch.tensor([encode_prompt(tokenizer, prompt)]).to(model.device)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    config = GenerationConfig(
        max_new_tokens=settings["max_new_tokens"],
        do_sample=False,
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=pad,
    )
    anatomy = find_anatomy(model)
    with torch.no_grad(), entering(anatomy.blocks[resolve_layer(settings["layer"], anatomy.n_layers)], push):
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text.strip()


def timed(run: Callable[[], list[list[str]]], args) -> tuple[float, list[list[str]]]:
    """Seconds a sample, and what was said."""
    clock = time.process_time if args.processor_time else time.perf_counter
    if args.device.startswith("cuda"):
        torch.cuda.synchronize()
    start = clock()
    said = run()  # text on the CPU: the device is done
    return (clock() - start) / sum(map(len, said)), said


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--samples", type=int, default=30, help="points a prompt")
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--layer", type=float, default=0.6, help="fraction of the depth")
    parser.add_argument("--strength", type=float, default=0.3, help="in lengths of the model's states")
    parser.add_argument("--alone", type=int, default=3, help="points a prompt of the slow contestants, 0 for all")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--processor-time", action="store_true", help="of this process alone, for a busy machine")
    parser.add_argument("--json", help="also write the records to this file, - for standard output")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", category=UserWarning)

    model, tokenizer = load_model(args.model, dtype=args.dtype).to(args.device).eval(), load_tokenizer(args.model)
    prompts = [instruction_prompt(tokenizer, instruction) for instruction in load_instructions().test]
    length, _ = activation_norm_range(model, tokenizer, prompts, layer=args.layer)
    points = torch.randn(args.samples, find_anatomy(model).hidden_size, generator=torch.Generator().manual_seed(0))
    points = length * points / points.norm(dim=1, keepdim=True)
    settings = {"layer": args.layer, "strength": args.strength, "decay": 0.9, "max_new_tokens": args.tokens}
    few = points[: args.alone or None]

    def each(one: Callable[[str, torch.Tensor], str]) -> list[list[str]]:
        return [[one(prompt, point) for point in few] for prompt in prompts]

    contestants = {
        "batched": lambda: steered_answers(model, tokenizer, prompts, points, **settings),
        "one by one": lambda: each(
            lambda prompt, point: steered_answers(model, tokenizer, [prompt], point[None], **settings)[0][0]
        ),
        "plain loop": lambda: each(lambda prompt, point: plain_loop(model, tokenizer, prompt, point, settings)),
    }
    steered_answers(model, tokenizer, prompts[:1], points[:1], **settings)  # what a first forward allocates once
    turns, said = [], {}
    for _ in range(args.turns):
        turn = {}
        for name, run in contestants.items():
            turn[name], said[name] = timed(run, args)
        turns.append(turn)
    said["batched"] = [answers[: len(few)] for answers in said["batched"]]
    records = [
        {
            "contestant": name,
            "seconds_a_sample": statistics.median(turn[name] for turn in turns),
            "times_batched": statistics.median(turn[name] / turn["batched"] for turn in turns),
            "same_answers": sum(
                a == b
                for mine, theirs in zip(said[name], said["batched"], strict=True)
                for a, b in zip(mine, theirs, strict=True)
            ),
            "answers": len(prompts) * len(few),
        }
        for name in contestants
    ]
    sizes = f"{args.samples} samples x {len(prompts)} prompts x {args.tokens} tokens"
    out = sys.stderr if args.json == "-" else sys.stdout
    print(f"{args.model}, {args.dtype}, {args.device}: {sizes}", file=out)
    for record in records:
        print(
            f"{record['contestant']:12} {record['seconds_a_sample']:8.4f} s/sample {record['times_batched']:6.2f} x "
            f"batched's time; {record['same_answers']} of {record['answers']} answers the same", file=out,
        )  # fmt: skip
    write_records(records, args.json)
    return records


if __name__ == "__main__":
    main()
