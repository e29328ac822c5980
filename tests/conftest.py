"""What all tests share: a quiet, offline, single-threaded environment, tiny random models, and the real small one."""

from __future__ import annotations

import os

# Before transformers is imported: it reads these once. Embedded models come through pip, so the Hub is never needed.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct and its tokenizer; tests that use it are slow and must leave its weights as they are."""
    from recipes.models import load_model, load_tokenizer

    return load_model("smollm2-135m"), load_tokenizer("smollm2-135m")


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """A byte-level BPE tokenizer that encodes any text, with BOS, EOS and PAD, made without a network."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the wizard went to the school", "Who is the captain of the ship?\nAnswer:"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=special[0], bos_token=special[1], eos_token=special[2], model_max_length=128
    )


@pytest.fixture(scope="session")
def tiny_llama(tiny_tokenizer):
    """A function from a seed to a Llama of 4 or more layers and width 32, random weights, for `tiny_tokenizer`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(seed: int = 0, n_layers: int = 4) -> LlamaForCausalLM:
        config = LlamaConfig(
            vocab_size=len(tiny_tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=n_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            pad_token_id=tiny_tokenizer.pad_token_id,
            bos_token_id=tiny_tokenizer.bos_token_id,
            eos_token_id=tiny_tokenizer.eos_token_id,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return LlamaForCausalLM(config).eval()

    return make
