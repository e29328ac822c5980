"""A checkpoint that a kill cut short must not be the one to resume from."""

import json

import torch
from safetensors.torch import save_file

from trainers.checkpoints import last_complete_checkpoint


def make(folder, step, state):
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    save_file({"w": torch.zeros(4)}, path / "model.safetensors")
    if state is not None:
        (path / "trainer_state.json").write_text(state)
    return str(path)


def test_the_newest_by_step_not_by_name(tmp_path):
    make(tmp_path, 9, "{}")
    newest = make(tmp_path, 10, json.dumps({"global_step": 10}))
    assert last_complete_checkpoint(tmp_path) == newest


def test_unfinished_ones_are_passed_over(tmp_path, caplog):
    complete = make(tmp_path, 2, "{}")
    make(tmp_path, 4, '{"global_st')
    make(tmp_path, 6, None)
    assert last_complete_checkpoint(tmp_path) == complete
    assert "checkpoint-6" in caplog.text and "checkpoint-4" in caplog.text


def test_weights_that_were_cut_short_are_passed_over(tmp_path, caplog):
    complete = make(tmp_path, 2, "{}")
    damaged = tmp_path / "checkpoint-4" / "model.safetensors"
    make(tmp_path, 4, "{}")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert last_complete_checkpoint(tmp_path) == complete
    assert "checkpoint-4" in caplog.text and "damaged" in caplog.text


def test_none_where_there_is_none(tmp_path):
    assert last_complete_checkpoint(tmp_path / "nowhere") is None
    make(tmp_path, 2, None)
    (tmp_path / "checkpoint-8").write_text("a file")
    assert last_complete_checkpoint(tmp_path) is None
