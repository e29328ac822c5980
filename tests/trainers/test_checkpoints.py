"""A checkpoint that a kill cut short must not be the one to resume from."""

import json

from trainers.checkpoints import last_complete_checkpoint


def make(folder, step, state):
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"weights")
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


def test_none_where_there_is_none(tmp_path):
    assert last_complete_checkpoint(tmp_path / "nowhere") is None
    make(tmp_path, 2, None)
    (tmp_path / "checkpoint-8").write_text("a file")
    assert last_complete_checkpoint(tmp_path) is None
