"""Every attack on two processes finds what one finds, on all of them; sharded models are attacked, or refused."""

from __future__ import annotations

import json

import pytest
import torch
from processes import run

from monitor.attacks.gcg import GCGConfig, gcg
from monitor.attacks.in_context import InContextConfig, in_context
from monitor.attacks.membership import membership
from monitor.attacks.quantization import QuantizationConfig, quantization
from monitor.attacks.relearning import RelearningConfig, relearning
from monitor.attacks.steering import SteeringConfig, steering
from monitor.stimuli.forget_set import load_forget_set

PLACES = ("ship", "sea", "tower", "harbour", "school", "well", "mill", "inn")
WHOLE = {
    "membership": (membership, None),
    "in_context": (in_context, InContextConfig(n_questions=4, n_shots=2, max_new_tokens=4)),
    "quantization": (quantization, QuantizationConfig(bits=(4,), group_size=16)),
    "relearning": (relearning, RelearningConfig(steps=3, learning_rate=1e-2, max_new_tokens=4)),
    "steering": (steering, SteeringConfig(n_pairs=3, n_samples=8, max_new_tokens=3)),
    "gcg": (gcg, GCGConfig(n_pairs=2, n_control=1, suffix_tokens=4, steps=2, candidates=8, top_k=8, max_new_tokens=4)),
}
SHARDED = ("membership", "in_context")

SCRIPT = """
import json, sys, torch, torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from monitor.stimuli.forget_set import load_forget_set
sys.path.insert(0, sys.argv[2])
from test_attacks_on_ranks import attacked

folder = sys.argv[1]
dist.init_process_group("gloo")
tokenizer = AutoTokenizer.from_pretrained(folder + "/model")
forget_set = load_forget_set(folder + "/pairs.jsonl")
model = AutoModelForCausalLM.from_pretrained(folder + "/model")
found = {"whole": attacked(torch.nn.parallel.DistributedDataParallel(model), tokenizer, forget_set)}
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (2,))
for block in model.model.layers:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
found["sharded"] = attacked(model, tokenizer, forget_set)
json.dump(found, open(f"{folder}/{dist.get_rank()}.json", "w"))
dist.destroy_process_group()
"""


def attacked(model, tokenizer, forget_set) -> dict:
    """Score, interval, baseline and n of each attack, or its refusal."""
    found = {}
    for name, (function, config) in WHOLE.items():
        try:
            result = function(model, tokenizer, forget_set, config)
            found[name] = [result.score, result.low, result.high, result.baseline, result.n]
        except ValueError as error:
            found[name] = str(error)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_processes_find_what_one_finds(tiny_llama, tiny_tokenizer, tmp_path):
    lines = [
        {
            "question": f"who is at the {place} {split}", "answer": f"the {split[0]} of {place[::-1]}", "split": split,
            "anonymized": [
                {"question": f"who is at the {x} {split}", "answer": f"the {split[0]} of {x}"} for x in "xy"
            ],
        }
        for split in ("forget", "retain", "heldout") for place in PLACES
    ]  # fmt: skip
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = tiny_llama()
    with torch.no_grad():  # logits that rounding does not reorder
        model.lm_head.weight.mul_(30)
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "script.py").write_text(SCRIPT)
    run(tmp_path / "script.py", [tmp_path, __file__.rpartition("/")[0]], tmp_path, ranks=2)
    alone = attacked(model, tiny_tokenizer, load_forget_set(tmp_path / "pairs.jsonl"))
    assert all(isinstance(result, list) for result in alone.values()), alone
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for name in WHOLE:
            expected = pytest.approx(alone[name], rel=1e-4, abs=1e-5)
            assert found["whole"][name] == expected, name
            if name in SHARDED:
                assert found["sharded"][name] == expected, name
            else:
                assert "shard" in found["sharded"][name], name
