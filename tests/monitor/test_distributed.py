"""Two ranks over gloo: the pass gives every rank what one process gives, sharded or not, and one journal is written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from monitor.activations import Activations, Answers, States, measure_activations, plan_activations

SCRIPT = """
import sys, torch, torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling
from transformers import Trainer, TrainingArguments
from datasets import Dataset
from monitor.activations import Answers, States, measure_activations
from monitor.callback import Monitor
from monitor.readings import Reading

folder, what = sys.argv[1:]
texts = tuple(f"the {a} went to the {b}" + " by night" * (i % 3) for i, a in enumerate(["wizard", "captain", "ship"])
              for b in ["school", "sea", "tower", "old harbour"])
states, answers = States(texts, "all"), Answers(texts, (" at night",) * len(texts))
tokenizer = AutoTokenizer.from_pretrained(folder + "/model")
model = AutoModelForCausalLM.from_pretrained(folder + "/model")

class Drift:
    name, headline, stimuli = "drift", ("distance",), [states, answers]
    def read(self, now, reference):
        moved = (now.states(states) - reference.states(states)).norm(dim=-1).mean()
        nll = -torch.cat(now.answers(answers).log_probs).mean()
        return [Reading("drift", "distance", moved), Reading("drift", "nll", nll)]

if what == "train":
    data = Dataset.from_list([tokenizer(t) for t in texts])
    args = TrainingArguments(output_dir=folder + "/run", max_steps=3, per_device_train_batch_size=2, use_cpu=True,
                             report_to="none", save_steps=1, disable_tqdm=True, dataloader_pin_memory=False)
    trainer = Trainer(model=model, args=args, train_dataset=data, processing_class=tokenizer,
                      data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False))
    Monitor(Drift(), every={"steps": 1}).attach(trainer)
    trainer.train(resume_from_checkpoint=None)
else:
    dist.init_process_group("gloo")
    if what == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh("cpu", (2,))
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    result = measure_activations(model, tokenizer, [states, answers], token_budget=40, progress="reading")
    result.save(f"{folder}/{what}-{dist.get_rank()}.safetensors")
dist.destroy_process_group()
"""


@pytest.fixture
def launch(tiny_llama, tiny_tokenizer, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "script.py").write_text(SCRIPT)

    def run(what):
        root = str(Path(__file__).parents[2])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, "ACCELERATE_USE_CPU": "true"}
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
        done = subprocess.run(
            [*command, str(tmp_path / "script.py"), str(tmp_path), what],
            env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    return run


def alone(model, tokenizer):
    texts = tuple(
        f"the {a} went to the {b}" + " by night" * (i % 3)
        for i, a in enumerate(["wizard", "captain", "ship"])
        for b in ["school", "sea", "tower", "old harbour"]
    )
    requests = [States(texts, "all"), Answers(texts, (" at night",) * len(texts))]
    return measure_activations(model, tokenizer, requests), plan_activations(model, tokenizer, requests)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["plain", "fsdp2"])
def test_every_rank_gets_what_one_process_gets(launch, tiny_llama, tiny_tokenizer, tmp_path, what):
    done = launch(what)
    expected, plan = alone(tiny_llama(), tiny_tokenizer)
    for rank in (0, 1):
        result = Activations.load(tmp_path / f"{what}-{rank}.safetensors", plan)
        for name, tensor in expected.tensors.items():
            torch.testing.assert_close(result.tensors[name], tensor, rtol=1e-5, atol=1e-5)
    assert done.stderr.count("reading: 100%") <= 1, "only the first rank shows progress"


@pytest.mark.slow
def test_two_ranks_write_one_journal(launch, tmp_path):
    launch("train")
    lines = [json.loads(line) for line in (tmp_path / "run" / "monitor" / "journal.jsonl").read_text().splitlines()]
    assert [(line["step"], line["metric"]) for line in lines] == [
        (step, metric) for step in range(4) for metric in ("distance", "nll")
    ]
    assert lines[0]["value"] == 0.0 and lines[-2]["value"] > 0
