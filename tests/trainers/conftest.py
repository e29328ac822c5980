"""Tiny models, a word-level tokenizer and every method's trainer, so that no test needs the network."""

from __future__ import annotations

import gc
import os
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trainers.ce_u import CEUTrainer
from trainers.data import PairCollator, encode_pairs
from trainers.dpo import DPOTrainer
from trainers.fine_tuning import FineTuningTrainer
from trainers.grad_diff import GradDiffTrainer
from trainers.gradient_ascent import GradientAscentTrainer
from trainers.kl_min import KLMinTrainer
from trainers.npo import NPOTrainer
from trainers.rmu import RMUTrainer
from trainers.satimp import SatImpTrainer
from trainers.simnpo import SimNPOTrainer
from trainers.task_vector import TaskVectorTrainer
from trainers.undial import UNDIALTrainer
from trainers.wga import WGATrainer
from trainers.whp import WHPTrainer
from trainers.whp_reinforced import WHPReinforcedTrainer

WORDS = [f"w{i}" for i in range(60)]
FORGET = [
    {
        "question": f"w{i} w{i + 1} w{i + 2}"[: 5 + 3 * (i % 3)],
        "answer": " ".join(f"w{30 + i + j}" for j in range(1 + i % 4)),
    }
    for i in range(8)
]
# As the forget pairs, each with another answer of another length.
FORGET_ALTERNATE = [
    {**pair, "alternate": " ".join(f"w{10 + i + j}" for j in range(1 + (i + 2) % 4))} for i, pair in enumerate(FORGET)
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


@pytest.fixture(scope="session", autouse=True)
def _imports_out_of_the_garbage_collectors_way():
    """accelerate collects garbage at every `train()`: 0.3 s with all imported modules to look through."""
    gc.freeze()
    yield
    gc.unfreeze()


# Every method


class Method(NamedTuple):
    """A trainer, and settings under which its loss has a gradient on random weights, whose NLL is about 6 nats."""

    name: str
    trainer: type
    settings: dict[str, Any]

    @property
    def config(self) -> type:
        return self.trainer.config_class

    @property
    def has_retain_loss(self) -> bool:
        return "retain_loss" in self.config.__dataclass_fields__


METHODS = {
    name: Method(name, trainer, settings)
    for name, trainer, settings in (
        ("gradient_ascent", GradientAscentTrainer, {}),
        ("grad_diff", GradDiffTrainer, {}),
        ("kl_min", KLMinTrainer, {}),
        ("npo", NPOTrainer, {}),
        ("simnpo", SimNPOTrainer, {"beta": 0.7, "delta": 5.0}),
        ("dpo", DPOTrainer, {}),
        ("rmu", RMUTrainer, {"layer": 1, "coefficient": 2.0, "alpha": 1.0}),
        ("whp", WHPTrainer, {}),
        ("whp_reinforced", WHPReinforcedTrainer, {}),
        ("wga", WGATrainer, {"beta": 0.3}),
        ("satimp", SatImpTrainer, {"beta1": 0.3, "beta2": 1.5}),
        ("undial", UNDIALTrainer, {"strength": 4.0}),
        ("ce_u", CEUTrainer, {}),
        ("fine_tuning", FineTuningTrainer, {}),
        ("task_vector", TaskVectorTrainer, {}),
    )
}
OWN = ("forget_dataset", "retain_dataset", "eval_dataset", "processing_class", "peft_config", "callbacks",
       "reinforced_model")  # fmt: skip


def _trainer(method: Method, output_dir: str, model=None, **overrides):
    """A trainer on a tiny model; keyword arguments that trainers take go there, all others to the config."""
    own = {name: overrides.pop(name) for name in OWN if name in overrides}
    settings = {
        "output_dir": output_dir,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        **method.settings,
        **overrides,
    }
    args = method.config(**settings)
    if method.name == "whp_reinforced":
        own.setdefault("reinforced_model", _llama(3))
    defaults = {
        "forget_dataset": [dict(pair) for pair in FORGET_ALTERNATE],
        "retain_dataset": [dict(pair) for pair in RETAIN] if args.needs_retain else None,
        "processing_class": _tokenizer(),
    }
    return method.trainer(_llama() if model is None else model, args, **{**defaults, **own})


@pytest.fixture(params=METHODS.values(), ids=METHODS)
def method(request) -> Method:
    """Every method in turn; with ``indirect=True`` those that are named."""
    return METHODS[request.param] if isinstance(request.param, str) else request.param


@pytest.fixture(name="methods")
def _methods():
    return METHODS


@pytest.fixture
def make_trainer(tmp_path):
    def make(method: Method | str, model=None, output: str = "run", **overrides):
        method = METHODS[method] if isinstance(method, str) else method
        return _trainer(method, str(tmp_path / output), model, **overrides)

    return make


@pytest.fixture(scope="session")
def _taught_weights() -> dict:
    """Of a model that knows both sets, though not by heart: the mean NLL of their answers is just below 0.2 nats."""
    model, tokenizer = _llama(), _tokenizer()
    examples = encode_pairs(FORGET, tokenizer) + encode_pairs(RETAIN, tokenizer)
    batch = PairCollator()([{"forget": example} for example in examples])["forget"]
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(200):
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        if loss < 0.2:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.2
    return model.state_dict()


@pytest.fixture
def taught(_taught_weights):
    """A function that makes a model which knows both sets."""

    def make() -> LlamaForCausalLM:
        model = _llama()
        model.load_state_dict(_taught_weights)
        return model

    return make
