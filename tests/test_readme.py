"""The README's snippet runs as it stands, and what the README names exists."""

import re
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import DataCollatorForLanguageModeling, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

README = (Path(__file__).parents[1] / "README.md").read_text()


@pytest.fixture
def trainer(tiny_tokenizer, tmp_path, monkeypatch):
    """The user's own trainer: anything with texts longer than a test's usual 128 tokens."""
    monkeypatch.setattr(tiny_tokenizer, "model_max_length", 512)
    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    data = Dataset.from_list(
        [tiny_tokenizer(f"the ship {word} by night") for word in ("sails", "sank", "rests", "left")]
    )
    args = TrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=2, per_device_train_batch_size=2, use_cpu=True, eval_steps=1,
        eval_strategy="steps", report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    return Trainer(
        model=LlamaForCausalLM(config), args=args, train_dataset=data, eval_dataset=data,
        processing_class=tiny_tokenizer, data_collator=DataCollatorForLanguageModeling(tiny_tokenizer, mlm=False),
    )  # fmt: skip


@pytest.mark.slow
def test_the_snippet_attaches_to_a_trainer_and_fills_the_journal(trainer):
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(snippet.strip().splitlines()) <= 10
    exec(compile(snippet, "README.md", "exec"), {"trainer": trainer})
    journal = Path(trainer.args.output_dir) / "monitor" / "journal.jsonl"
    text = journal.read_text()
    for name in ("delta_b", "delta_b_corrected", "knowledge_z", "auss_l2", "cka", "forget_nll", "retain_nll"):
        assert f'"metric": "{name}"' in text
    assert any("eval_bias_shift_delta_b" in entry for entry in trainer.state.log_history)


def test_files_and_commands_the_readme_names_exist():
    root = Path(__file__).parents[1]
    for path in re.findall(r"(?:--config |\]\()((?:recipes|docs)/[\w./]+)", README):
        assert (root / path).is_file(), path
    from recipes.cli import COMMANDS

    for command in re.findall(r"^(?:\.venv/bin/)?latentwatch (\w+)", README, re.M):
        assert command in COMMANDS
    makefile = (root / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.M):
        assert f"\n{target}:" in makefile
