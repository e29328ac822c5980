"""A training step against the way published unlearning code makes one, and a run's memory against plain fine-tuning.

    python -m benchmarks.training_step                     # the bundled concept's own pairs
    python -m benchmarks.training_step --words 24 40       # pairs as long as TOFU's

``ours`` is the trainer's own step: cached reference, one concatenated forward, logits of answer tokens alone (RMU: one
forward that stops at its layer, cached hidden states). ``peers`` takes the same loss from a live frozen copy of the
model, a forward of its own for each part, and logits of every token (RMU: whole forwards with a hook at the layer, of
the model and of the frozen copy). Both train the same weights with AdamW; a step is forward, backward and update.

Prints the ratio of medians over alternating repeats in one process, the losses of both, and the peak memory of a short
run of NPO and of plain fine-tuning of the same model on the same rows, each in a fresh process (CPU: the process's peak
resident set; CUDA: peak allocated memory).
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from monitor.anatomy import find_anatomy
from monitor.stimuli.forget_set import load_forget_set
from recipes.concepts import concept_path
from recipes.models import load_model, load_tokenizer
from recipes.summary import write_records
from trainers.data import Example, PairCollator
from trainers.dpo import DPOTrainer
from trainers.npo import NPOTrainer
from trainers.objectives import random_direction
from trainers.rmu import RMUTrainer
from trainers.terms import count

SETTINGS = {
    "npo": {"beta": 0.1, "retain_loss": "nll"},
    "npo+kl": {"beta": 0.1, "retain_loss": "kl"},
    "dpo": {"beta": 0.1, "retain_loss": "nll", "chosen": "alternate"},
    "rmu": {"coefficient": 20.0, "alpha": 100.0},
}
TRAINERS = {"npo": NPOTrainer, "npo+kl": NPOTrainer, "dpo": DPOTrainer, "rmu": RMUTrainer}


def pairs(n: int, options, split: str) -> list[dict]:
    """The bundled concept's pairs, or pairs of so many of their words."""
    bundled = load_forget_set(concept_path("harry_potter"))
    if options.words is None:
        chosen = [bundled.split(split)[i % 80] for i in range(n)]
        return [{"question": p.question, "answer": p.answer, "alternate": "I don't know."} for p in chosen]
    words = [word for pair in bundled.pairs for word in f"{pair.question} {pair.answer}".split()]
    generator = torch.Generator().manual_seed(("forget", "retain").index(split))

    def text(length: int) -> str:
        return " ".join(words[int(i)] for i in torch.randint(len(words), (length,), generator=generator))

    prompt, answer = options.words
    return [{"question": text(prompt), "answer": text(answer), "alternate": text(answer)} for _ in range(n)]


def build(method: str, model: nn.Module, tokenizer, options, folder: str):
    trainer_class = TRAINERS[method]
    args = trainer_class.config_class(
        output_dir=folder, report_to="none", disable_tqdm=True, save_strategy="no", learning_rate=1e-6,
        per_device_train_batch_size=options.batch, **SETTINGS[method],
    )  # fmt: skip
    forget, retain = (pairs(options.batch, options, split) for split in ("forget", "retain"))
    return trainer_class(model, args, forget, retain, processing_class=tokenizer)


def ours(trainer, optimizer, batch) -> float:
    loss = trainer.training_step(trainer.model, batch, count([batch]))
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def peers(method: str, model: nn.Module, frozen: nn.Module, optimizer, batch, args, layer: int | None) -> float:
    parts = {name: {k: v for k, v in part.items() if k != "keys"} for name, part in batch.items()}
    model.train()
    if method == "rmu":
        loss = peers_rmu(model, frozen, parts, args, layer)
    else:
        forget = sequence_nll(model, parts["forget"])
        with torch.no_grad():
            forget_frozen = sequence_nll(frozen, parts["forget"])
        if method == "dpo":
            chosen = sequence_nll(model, parts["chosen"])
            with torch.no_grad():
                chosen_frozen = sequence_nll(frozen, parts["chosen"])
            loss = -F.logsigmoid(args.beta * ((forget - forget_frozen) - (chosen - chosen_frozen))).mean()
        else:
            loss = -2 / args.beta * F.logsigmoid(args.beta * (forget - forget_frozen)).mean()
        loss = loss + args.alpha * peers_retain(model, frozen, parts["retain"], args.retain_loss)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def sequence_nll(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=part["input_ids"], attention_mask=part["attention_mask"], use_cache=False).logits
    nll = F.cross_entropy(
        logits[:, :-1].transpose(1, 2).float(), part["labels"][:, 1:], ignore_index=-100, reduction="none"
    )
    return nll.sum(1)


def peers_retain(model: nn.Module, frozen: nn.Module, part: dict[str, Tensor], kind: str) -> Tensor:
    if kind == "nll":
        return model(**part, use_cache=False).loss
    inputs = {"input_ids": part["input_ids"], "attention_mask": part["attention_mask"], "use_cache": False}
    answers = part["labels"][:, 1:] != -100
    log_probs = model(**inputs).logits[:, :-1].float().log_softmax(-1)
    with torch.no_grad():
        target = frozen(**inputs).logits[:, :-1].float().log_softmax(-1)
    return F.kl_div(log_probs, target, reduction="none", log_target=True).sum(-1)[answers].mean()


def peers_rmu(model: nn.Module, frozen: nn.Module, parts, args, layer: int) -> Tensor:
    def states(which: nn.Module, part: dict[str, Tensor]) -> Tensor:
        kept = []
        handle = find_anatomy(which).blocks[layer - 1].register_forward_hook(lambda m, a, output: kept.append(output))
        which(input_ids=part["input_ids"], attention_mask=part["attention_mask"], use_cache=False)
        handle.remove()
        return kept[0]

    forget = states(model, parts["forget"])
    direction = random_direction(forget.shape[-1], args.seed).to(forget.device)
    retain = states(model, parts["retain"])
    with torch.no_grad():
        target = states(frozen, parts["retain"])

    def mse(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return (x - y).square().mean(-1)[mask.bool()].mean()

    steered = mse(forget, args.coefficient * direction, parts["forget"]["attention_mask"])
    return steered + args.alpha * mse(retain, target, parts["retain"]["attention_mask"])


def compare(method: str, options) -> dict:
    model, tokenizer = load_model(options.model), load_tokenizer(options.model)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(method, model, tokenizer, options, folder)
        model = trainer.model
        batch = trainer._prepare_inputs(trainer.data_collator([trainer.train_dataset[i] for i in range(options.batch)]))
        frozen = copy.deepcopy(model).requires_grad_(False)
        trainer._measure_reference()
        trained = [p for p in model.parameters() if p.requires_grad]
        # Alternating on the same weights; AdamW of the same kind.
        optimizer = torch.optim.AdamW(trained, lr=1e-6)
        layer = trainer.reference.scores.layer
        trainer.accelerator.gradient_accumulation_steps = 1
        contestants = {
            "ours": lambda: ours(trainer, optimizer, batch),
            "peers": lambda: peers(method, model, frozen, optimizer, batch, trainer.args, layer),
        }
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        losses = {}
        for name, step in contestants.items():  # the first is a warm-up, and both start from the same weights
            model.load_state_dict(state)
            with torch.no_grad():  # away from the reference, where losses are constants
                noise = torch.Generator(device=trained[0].device).manual_seed(0)
                for parameter in trained:
                    parameter.add_(
                        1e-3 * torch.randn(parameter.shape, generator=noise, device=parameter.device) * parameter.std()
                    )
            losses[name] = step()
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(options.repeats):
            for name, step in contestants.items():
                _synchronise()
                start = time.perf_counter()
                step()
                _synchronise()
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "method": method,
        "peers_over_ours": medians["peers"] / medians["ours"],
        "loss_ours": losses["ours"],
        "loss_peers": losses["peers"],
    }


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_memory(kind: str, options) -> int:
    """Peak memory in bytes of a short run of "npo", or of "plain" fine-tuning on the same rows."""
    model, tokenizer = load_model(options.model), load_tokenizer(options.model)
    with tempfile.TemporaryDirectory() as folder:
        if kind == "npo":
            options.batch *= 4  # several batches, as a run has
            trainer = build("npo", model, tokenizer, options, folder)
            options.batch //= 4
            trainer.args.per_device_train_batch_size = options.batch
            trainer._train_batch_size = options.batch
        else:
            n = 8 * options.batch
            rows = pairs(n, options, "forget")
            trainer = Trainer(
                model,
                TrainingArguments(
                    folder, per_device_train_batch_size=2 * options.batch, report_to="none", save_strategy="no",
                    disable_tqdm=True, remove_unused_columns=False, learning_rate=1e-6, max_steps=3,
                ),
                train_dataset=[_plain(tokenizer, row) for row in rows],
                data_collator=_collate,
            )  # fmt: skip
        trainer.args.max_steps = 3
        trainer.train()
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    # Not getrusage: its peak is handed on from the process that started this one.
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))


def _plain(tokenizer, row: dict) -> dict[str, Example]:
    ids = tuple(tokenizer(f"{row['question']}\nAnswer: {row['answer']}")["input_ids"])
    return {"rows": Example(row["question"], row["answer"], ids, 1)}


def _collate(items) -> dict[str, Tensor]:
    batch = PairCollator()(items)["rows"]
    del batch["keys"]
    return batch


def _memory_in_child(kind: str, options, queue) -> None:
    queue.put(peak_memory(kind, options))


def _in_fresh_process(kind: str, options) -> int:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_memory_in_child, args=(kind, options, queue))
    process.start()
    result = queue.get()
    process.join()
    return result


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batch", type=int, default=8, help="forget pairs a step, each with a retain pair")
    parser.add_argument(
        "--words", type=int, nargs=2, metavar=("QUESTION", "ANSWER"), help="longer pairs of so many words, made up"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--methods", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--json", help="write the figures to this file, - for standard output")
    options = parser.parse_args(argv)
    records = []
    out = sys.stderr if options.json == "-" else sys.stdout
    for method in options.methods:
        record = compare(method, options)
        records.append(record)
        print(
            f"{method:8} peers / ours {record['peers_over_ours']:.2f} x   loss {record['loss_ours']:.6f} (ours) "
            f"{record['loss_peers']:.6f} (peers)", file=out, flush=True,
        )  # fmt: skip
    memory = {kind: _in_fresh_process(kind, options) for kind in ("npo", "plain")}
    records.append({"method": "memory", "npo_over_plain": memory["npo"] / memory["plain"], **memory})
    print(
        f"memory   NPO / plain fine-tuning {memory['npo'] / memory['plain']:.2f} x "
        f"({memory['npo'] / 2**20:.0f} / {memory['plain'] / 2**20:.0f} MiB)", file=out,
    )  # fmt: skip
    write_records(records, options.json)


if __name__ == "__main__":
    main()
