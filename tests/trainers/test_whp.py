from __future__ import annotations

import pytest


def test_pairs_without_another_answer(make_trainer, forget, caplog):
    with pytest.raises(ValueError, match=r"`forget_dataset\[0\]` must have an `alternate` that holds text.*got None"):
        make_trainer("whp", forget_dataset=forget)
    pairs = [{**pair, "alternate": "w9"} for pair in forget]
    make_trainer("whp", forget_dataset=pairs)
    assert not caplog.text
    pairs[0]["alternate"] = pairs[0]["answer"]
    trainer = make_trainer("whp", forget_dataset=pairs)
    assert "`forget_dataset`: the `alternate` of 1 of 8 pairs is their `answer`" in caplog.text
    assert len(trainer.train_dataset) == 7
    with pytest.raises(ValueError, match="the `alternate` of all 8 pairs is their `answer`"):
        make_trainer("whp", forget_dataset=[{**pair, "alternate": pair["answer"]} for pair in forget])
    with pytest.raises(ValueError, match=r"`eval_dataset\[0\]` must have an `alternate`"):
        make_trainer("whp", forget_dataset=pairs, eval_dataset=forget)


def test_the_true_answers_are_read_at_evaluations_alone(make_trainer):
    trainer = make_trainer("whp", max_steps=1)
    trainer.train()
    assert {"forget_loss", "retain_nll"} <= set(trainer.state.log_history[0])
    assert "forget_nll" not in trainer.state.log_history[0]
    assert trainer.evaluate()["eval_forget_nll"] > 0


def test_teaches_the_other_answers(make_trainer, taught):
    trainer = make_trainer("whp", taught(), num_train_epochs=15)
    start = trainer.evaluate()
    trainer.train()
    assert trainer.evaluate()["eval_forget_loss"] < 0.3 * start["eval_forget_loss"]
