"""Tiny models and a word-level tokenizer, so that no test needs the network."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = [f"w{i}" for i in range(60)]
FORGET = [
    {
        "question": f"w{i} w{i + 1} w{i + 2}"[: 5 + 3 * (i % 3)],
        "answer": " ".join(f"w{30 + i + j}" for j in range(1 + i % 4)),
    }
    for i in range(8)
]
RETAIN = [
    {"question": f"w{2 * i} w50", "answer": " ".join(f"w{20 + i + j}" for j in range(1 + (i + 1) % 3))}
    for i in range(5)
]


def _tokenizer(padding_side: str = "right", pad: bool = True) -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "<pad>", "Answer:", *WORDS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        bos_token="<s>",
        pad_token="<pad>" if pad else None,
        padding_side=padding_side,
        model_max_length=64,
    )


def _llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,  # far from uniform predictions, so that losses tell tokens apart
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(name="make_tokenizer")
def _make_tokenizer():
    return _tokenizer


@pytest.fixture
def tokenizer():
    return _tokenizer()


@pytest.fixture
def llama():
    return _llama


@pytest.fixture
def forget():
    return [dict(pair) for pair in FORGET]


@pytest.fixture
def retain():
    return [dict(pair) for pair in RETAIN]
