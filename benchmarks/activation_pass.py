"""The activation pass against its limit and against the way published implementations read hidden states.

    python -m benchmarks.activation_pass --model smollm2-135m --texts 150

Prints ratios from one run, alternating the contestants so that drift of the machine falls on all alike:

- ``pass``: `monitor.activations.run_plan`, all layers pooled in hooks;
- ``bare``: the inner decoder alone over the same batches, nothing read (the limit);
- ``batched``: batches of 16 unsorted texts with ``output_hidden_states=True`` through the language-model head;
- ``published``: one text at a time with ``output_hidden_states=True`` through the head.

Medians over repeats. Peak memory is the rise of the process's resident set (CPU, sampled) or of allocated memory
(CUDA), in a fresh process each.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import sys
import threading
import time
import warnings

import torch

from monitor.activations import States, plan_activations, run_plan
from monitor.anatomy import find_anatomy
from monitor.stimuli.bias import load_bias_stimuli
from monitor.stimuli.encoding import encode_text
from recipes.models import load_model, load_tokenizer
from recipes.summary import write_records


def stimuli(limit: int) -> tuple[str, ...]:
    """Bias-shift sentences and question-answer texts, as a monitored run reads them."""
    from monitor.stimuli.forget_set import load_forget_set  # noqa: PLC0415
    from recipes.concepts import concept_path  # noqa: PLC0415

    bias = load_bias_stimuli("small")
    sentences = [s for group in bias.targets.values() for s in group] + list(bias.positive + bias.negative)
    pairs = load_forget_set(concept_path("harry_potter")).split("forget")
    questions = [f"{q}\nAnswer: {a}" for p in pairs for q, a in ((p.question, p.answer), *p.anonymized[:2])]
    mixed = [text for both in zip(sentences, questions, strict=False) for text in both]
    return tuple(dict.fromkeys(mixed))[:limit]


@torch.no_grad()
def bare(model, plan, token_budget: int) -> None:
    anatomy = find_anatomy(model)
    for batch in plan.batches(token_budget):
        width = max(len(plan.sequences[i]) for i in batch.sequences)
        ids = torch.full((len(batch.sequences), width), plan.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(batch.sequences):
            ids[row, : len(plan.sequences[i])] = torch.tensor(plan.sequences[i])
            mask[row, : len(plan.sequences[i])] = 1
        options = {} if bool(mask.all()) else {"attention_mask": mask.to(anatomy.device)}
        anatomy.inner(ids.to(anatomy.device), use_cache=False, **options)


@torch.no_grad()
def full(model, tokenizer, texts, batch_size: int) -> list[torch.Tensor]:
    device = find_anatomy(model).device
    pooled = []
    for start in range(0, len(texts), batch_size):
        ids = [encode_text(tokenizer, text) for text in texts[start : start + batch_size]]
        width = max(map(len, ids))
        padded = torch.tensor([row + [0] * (width - len(row)) for row in ids], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids], device=device)
        states = model(padded, attention_mask=mask, output_hidden_states=True).hidden_states
        weight = mask[..., None].float()
        pooled += [torch.stack([(h.float() * weight).sum(1) / weight.sum(1) for h in states], 1)]
    return pooled


def contestants(model, tokenizer, texts, token_budget: int) -> dict:
    plan = plan_activations(model, tokenizer, [States(texts, "all", "mean")])
    return {
        "pass": lambda: run_plan(model, plan, token_budget=token_budget),
        "bare": lambda: bare(model, plan, token_budget),
        "batched": lambda: full(model, tokenizer, texts, 16),
        "published": lambda: full(model, tokenizer, texts, 1),
    }


def clock(run, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def memory_of(name: str, args, queue) -> None:
    model, tokenizer = load_model(args.model, dtype=args.dtype).to(args.device).eval(), load_tokenizer(args.model)
    texts = stimuli(args.texts)
    runs = contestants(model, tokenizer, texts, args.token_budget)
    contestants(model, tokenizer, texts[:2], args.token_budget)["published"]()  # what any forward allocates once
    if torch.device(args.device).type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        runs[name]()
        queue.put((torch.cuda.max_memory_allocated() - before) / 2**20)
    else:
        before, peak, done = resident_bytes(), [0], threading.Event()

        def sample() -> None:
            while not done.wait(0.005):
                peak[0] = max(peak[0], resident_bytes())

        sampler = threading.Thread(target=sample)
        sampler.start()
        runs[name]()
        done.set()
        sampler.join()
        queue.put((peak[0] - before) / 2**20)


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--texts", type=int, default=150)
    parser.add_argument("--token-budget", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-memory", action="store_true", help="skip the peak-memory runs")
    parser.add_argument("--json", help="also write the records to this file, - for standard output")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", category=UserWarning)

    model, tokenizer = load_model(args.model, dtype=args.dtype).to(args.device).eval(), load_tokenizer(args.model)
    device = torch.device(args.device)
    texts = stimuli(args.texts)
    runs = contestants(model, tokenizer, texts, args.token_budget)
    runs["bare"]()  # warm up
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(args.repeats):
        for name, run in runs.items():
            if name in ("pass", "bare") or repeat < 2:
                times[name].append(clock(run, device))
    limit = statistics.median(times["bare"])
    records = [{"reader": n, "seconds": statistics.median(t), "ratio_to_bare": statistics.median(t) / limit}
               for n, t in times.items()]  # fmt: skip
    if not args.no_memory:
        context = multiprocessing.get_context("spawn")
        for record in records:
            queue = context.Queue()
            process = context.Process(target=memory_of, args=(record["reader"], args, queue))
            process.start()
            record["peak_mib"] = queue.get()
            process.join()
    out = sys.stderr if args.json == "-" else sys.stdout
    print(f"{len(texts)} texts, {args.model}, {args.dtype}, {args.device}, token budget {args.token_budget}", file=out)
    for record in records:
        memory = f"{record['peak_mib']:9.0f} MiB" if "peak_mib" in record else ""
        print(f"{record['reader']:10} {record['ratio_to_bare']:6.2f} x bare {memory}", file=out)
    speedup = statistics.median(times["published"]) / statistics.median(times["pass"])
    print(f"published / pass: {speedup:.2f}", file=out)
    write_records(records, args.json)
    return records


if __name__ == "__main__":
    main()
