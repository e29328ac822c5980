"""`accelerate launch -m recipes.unlearn` on two processes: the single process's update, table and verdict."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_processes_of_the_command_equal_one(tiny_llama, tiny_tokenizer, tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    pairs = [
        {"question": f"Where is ship {i}?", "answer": "at sea " * (1 + i % 3) + str(i), "split": split}
        for i in range(8)
        for split in ("forget", "retain")
    ]
    for pair in pairs:
        pair["question"] += f" ({pair['split']})"
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    found = {}
    for ranks in (1, 2):
        folder = tmp_path / f"ranks{ranks}"
        launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"] if ranks == 2 else []
        options = {
            "method": "kl_min", "model_name_or_path": tmp_path / "model", "forget_set": tmp_path / "pairs.jsonl",
            "output_dir": folder, "measures": "behaviour", "per_device_train_batch_size": 4 // ranks,
            "gradient_accumulation_steps": 2, "max_steps": 2, "optim": "sgd", "learning_rate": 1e-2,
            "max_grad_norm": 0, "train_sampling_strategy": "sequential", "use_cpu": "true", "report_to": "none",
            "disable_tqdm": "true", "save_strategy": "no", "json": tmp_path / f"{ranks}.json",
        }  # fmt: skip
        command = [sys.executable, *launch, "-m", "recipes.unlearn"]
        command += [str(part) for key, value in options.items() for part in (f"--{key}", value)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr[-4000:]
        assert done.stdout.count("Verification:") == 1  # one process speaks
        weights = load_file(folder / "model.safetensors")
        found[ranks] = weights, json.loads((tmp_path / f"{ranks}.json").read_text())
    start = load_file(tmp_path / "model" / "model.safetensors")
    one, two = (torch.cat([(found[r][0][name] - start[name]).flatten() for name in sorted(start)]) for r in (1, 2))
    assert one.norm() > 1e-4
    assert (two - one).norm() <= 1e-5 * one.norm()
    for a, b in zip(found[1][1], found[2][1], strict=True):
        assert (a["metric"], a["end"]) == (b["metric"], pytest.approx(b["end"], rel=1e-4, abs=1e-6))
