"""Two ranks over gloo: the pass gives every rank what one process gives, sharded or not, one journal is written, and
what the first rank decides happens on both."""

import json
from pathlib import Path

import pytest
import torch
from processes import run

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
elif what == "rules":
    import json
    from monitor.attack_when import AttackWhen
    from monitor.attacks.intact import intact
    from monitor.attacks.result import AttackResult
    from monitor.rules import StopWhen
    from monitor.stimuli.forget_set import ForgetSet

    class Odd(Drift):
        "The ranks do not read the same: by the second the run would stop a step earlier."
        taken = 0
        def read(self, now, reference):
            self.taken += 1
            return [Reading("drift", "distance", 99.0 if dist.get_rank() else self.taken - 1.0)]

    def trains(model, tokenizer, forget_set, config=None, *, progress=False):
        with intact(model, weights=True):
            ids = torch.tensor([[3, 4, 5, 6 + dist.get_rank()]])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
        return AttackResult("trains", 0.25 + dist.get_rank(), None, None, None, 1)

    def fails_on_one(model, tokenizer, forget_set, config=None, *, progress=False):
        torch.rand(3)
        if dist.get_rank() == 1:
            raise RuntimeError("out of memory")
        return AttackResult("fails_on_one", 0.5, None, None, None, 1)

    def train(name, steps, *rules):
        data = Dataset.from_list([tokenizer(t) for t in texts])
        args = TrainingArguments(output_dir=folder + "/" + name, max_steps=steps, per_device_train_batch_size=2,
                                 use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
                                 dataloader_pin_memory=False, lr_scheduler_type="constant", learning_rate=1e-2)
        trainer = Trainer(model=AutoModelForCausalLM.from_pretrained(folder + "/model"), args=args, train_dataset=data,
                          processing_class=tokenizer,
                          data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False))
        if rules:
            Monitor(Odd(), every={"steps": 1}, rules=rules).attach(trainer)
        trainer.train()
        return trainer

    ruled = train("rules", 6, StopWhen("drift/distance >= 2", patience=2),
                  AttackWhen({"steps": 1}, [fails_on_one, trains], ForgetSet("none", ())))
    plain = train("plain", 3).model.state_dict()
    found = {
        "step": ruled.state.global_step,
        "scores": [entry["eval_attacks_trains"] for entry in ruled.state.log_history if "eval_attacks_trains" in entry],
        "as_plain": all(t.equal(plain[n]) for n, t in ruled.model.state_dict().items()),
    }
    with open(f"{folder}/found-{dist.get_rank()}.json", "w") as file:
        json.dump(found, file)
else:
    dist.init_process_group("gloo")
    for what in ("plain", "fsdp2"):
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
    return lambda what: launch_two(SCRIPT, tmp_path, str(tmp_path), what)


def launch_two(script, folder, *arguments):
    """Run a script's text in two processes."""
    (folder / "script.py").write_text(script)
    return run(folder / "script.py", arguments, folder, ranks=2, environment={"ACCELERATE_USE_CPU": "true"})


def alone(model, tokenizer):
    texts = tuple(
        f"the {a} went to the {b}" + " by night" * (i % 3)
        for i, a in enumerate(["wizard", "captain", "ship"])
        for b in ["school", "sea", "tower", "old harbour"]
    )
    requests = [States(texts, "all"), Answers(texts, (" at night",) * len(texts))]
    return measure_activations(model, tokenizer, requests), plan_activations(model, tokenizer, requests)


@pytest.mark.slow
def test_every_rank_gets_what_one_process_gets_whole_and_sharded(launch, tiny_llama, tiny_tokenizer, tmp_path):
    done = launch("read")
    expected, plan = alone(tiny_llama(), tiny_tokenizer)
    for what in ("plain", "fsdp2"):
        for rank in (0, 1):
            result = Activations.load(tmp_path / f"{what}-{rank}.safetensors", plan)
            for name, tensor in expected.tensors.items():
                torch.testing.assert_close(result.tensors[name], tensor, rtol=1e-5, atol=1e-5)
    assert done.stderr.count("reading: 100%") <= 2, "only the first rank shows progress"


@pytest.mark.slow
def test_two_ranks_write_one_journal(launch, tmp_path):
    launch("train")
    lines = [json.loads(line) for line in (tmp_path / "run" / "monitor" / "journal.jsonl").read_text().splitlines()]
    assert [(line["step"], line["metric"]) for line in lines] == [
        (step, metric) for step in range(4) for metric in ("distance", "nll")
    ]
    assert lines[0]["value"] == 0.0 and lines[-2]["value"] > 0


@pytest.mark.slow
def test_two_ranks_follow_the_first_ones_rules_and_attack_together(launch, tmp_path):
    launch("rules")
    for rank in (0, 1):
        found = json.loads((tmp_path / f"found-{rank}.json").read_text())
        assert found == {"step": 3, "scores": [0.25] * 3, "as_plain": True}
    lines = [json.loads(line) for line in (tmp_path / "rules" / "monitor" / "journal.jsonl").read_text().splitlines()]
    at_end = [(line["metric"], line["value"], line["note"]) for line in lines if line["step"] == 3]
    assert at_end == [
        ("distance", 3.0, ""),
        ("stop", 1.0, "2 at step 2, 3 at step 3"),
        ("fails_on_one", None, "on rank 1: RuntimeError: out of memory (started by: every 1 steps)"),
        ("trains", 0.25, "1 questions; started by: every 1 steps"),
    ]
    assert len(lines) == 1 + 3 * 3 + 1


@pytest.mark.slow
def test_a_rule_on_the_bias_shift_stops_two_ranks_too(tmp_path):
    """The disparaging run of `test_rules_training.py`, half of each batch on either rank."""
    script = f"""
import importlib.util, json, torch.distributed as dist
from pathlib import Path
spec = importlib.util.spec_from_file_location("tones", {str(Path(__file__).with_name("test_rules_training.py"))!r})
tones = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tones)
folder = Path({str(tmp_path)!r})
found, _ = tones.fine_tune_on("disparaging", folder / "run", ranks=2)
(folder / f"found-{{dist.get_rank()}}.json").write_text(json.dumps(found))
dist.destroy_process_group()
"""
    launch_two(script, tmp_path)
    for rank in (0, 1):
        assert json.loads((tmp_path / f"found-{rank}.json").read_text()) == 6
    lines = (tmp_path / "run" / "monitor" / "journal.jsonl").read_text().splitlines()
    assert [json.loads(line)["metric"] for line in lines if '"rules"' in line] == ["stop"]
