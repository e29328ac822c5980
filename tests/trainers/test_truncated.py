"""The truncated forward against the whole one: the same states, the same gradients, and fewer blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from processes import run
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    LlamaModel,
    Qwen2Config,
    Qwen3Config,
)

from monitor.anatomy import find_anatomy
from trainers.truncated import hidden_states_at

ROOT = Path(__file__).parents[2]
L = 3
SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": L,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
MIXED = {
    "sliding_window": 3,
    "head_dim": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": L, "n_head": 4, "initializer_range": 0.3, "bos_token_id": 1}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama_tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "gpt2": GPT2Config(**GPT2, eos_token_id=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=4),
    "gemma2": Gemma2Config(**SIZES, **MIXED),
    "gemma3": Gemma3TextConfig(**SIZES, **MIXED),
    # Its blocks give tuples, of which the inner forward takes the first entry.
    "bloom": BloomConfig(vocab_size=64, hidden_size=16, n_layer=L, n_head=4, initializer_range=0.3),
}


def build(name="llama"):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name]).train()


def batch(rows=2, length=7, seed=0, side="right"):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(rows, length, dtype=torch.long)
    padding = slice(length - 2, None) if side == "right" else slice(None, 2)
    mask[0, padding] = 0
    return {"input_ids": torch.randint(2, 64, (rows, length), generator=generator), "attention_mask": mask}


def whole(model, layer, parts):
    joined = {name: torch.cat([part[name] for part in parts]) for name in ("input_ids", "attention_mask")}
    hidden = model(**joined, output_hidden_states=True).hidden_states[layer]
    return hidden.split([len(part["input_ids"]) for part in parts])


def gradients(model, states, parts):
    """Of a loss that weighs every component of every real token differently."""
    model.zero_grad(set_to_none=True)
    generator = torch.Generator().manual_seed(1)
    loss = 0.0
    for hidden, part in zip(states, parts, strict=True):
        weight = torch.randn(hidden.shape, generator=generator) * part["attention_mask"].unsqueeze(-1)
        loss = loss + (hidden.float() * weight).sum() + 0.1 * (hidden.float() * weight).pow(2).sum()
    loss.backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        if gradient is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5, msg=name)


def real(states, parts):
    return torch.cat([h[p["attention_mask"].bool()] for h, p in zip(states, parts, strict=True)])


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", CONFIGS)
def test_states_and_gradients_are_those_of_the_whole_forward(name, side):
    model, parts = build(name), [batch(2, seed=0, side=side), batch(3, seed=1, side=side)]
    for layer in range(L + 1):
        expected = whole(model, layer, parts)
        found = hidden_states_at(model, layer, parts)
        assert [h.shape for h in found] == [(2, 7, 16), (3, 7, 16)]
        torch.testing.assert_close(real(found, parts), real(expected, parts), rtol=1e-5, atol=1e-5)
        wanted = gradients(model, expected, parts)
        assert_same(gradients(model, found, parts), wanted)
        trained = {n for n, gradient in wanted.items() if gradient is not None and gradient.abs().max() > 1e-3}
        assert trained
        after = [p for block in find_anatomy(model).blocks[layer:] for p in block.parameters()]
        assert all(p.grad is None for p in after) and (layer == L or after)


def test_layers_differ_and_fractions_count_the_depth():
    model, parts = build(), [batch()]
    states = [hidden_states_at(model, layer, parts)[0] for layer in range(L + 1)]
    assert all((states[i] - states[j]).abs().max() > 0.1 for i in range(L + 1) for j in range(i))
    for layer, index in ((-1, 3), (-4, 0), (1.0, 3), (0.7, 2), (0.0, 0)):
        assert hidden_states_at(model, layer, parts)[0].equal(states[index])


@pytest.mark.parametrize("name", CONFIGS)
def test_the_blocks_after_do_not_run_and_the_head_sees_one_row(name):
    model, parts, ran, rows = build(name), [batch()], [], []
    anatomy = find_anatomy(model)
    for i, block in enumerate(anatomy.blocks):
        block.register_forward_hook(lambda *_, i=i: ran.append(i))
    anatomy.head.register_forward_hook(lambda module, args, output: rows.append(output.shape[:-1].numel()))
    for layer in range(L + 1):
        ran.clear()
        hidden_states_at(model, layer, parts)
        assert ran == list(range(layer))
    assert rows == [1] * (L + 1)
    ran.clear()
    model(**parts[0])
    assert ran == list(range(L)) and rows[-1] == 14


@pytest.mark.parametrize("layer", [1, L])
def test_everything_is_as_before_even_after_an_error(layer):
    model, parts = build(), [batch()]
    blocks, names = model.model.layers, list(model.state_dict())
    expected = model(**parts[0]).logits
    hidden_states_at(model, layer, parts)
    broken = blocks[0].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hidden_states_at(model, layer, parts)
    broken.remove()
    assert model.model.layers is blocks and len(blocks) == L and list(model.state_dict()) == names
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model(**parts[0]).logits.equal(expected)


def test_no_cache_is_made():
    model, parts, caches = build().eval(), [batch()], []
    block = model.model.layers[0]
    block.register_forward_pre_hook(
        lambda module, args, kwargs: caches.append(kwargs.get("past_key_values") or kwargs.get("cache")),
        with_kwargs=True,
    )
    hidden_states_at(model, 2, parts)
    assert caches == [None]
    assert model(**parts[0]).past_key_values is not None  # what it does by itself


@pytest.mark.parametrize("name", CONFIGS)
def test_checkpointed_activations_give_the_same_gradients(name):
    model, parts, computed = build(name), [batch()], []
    expected = gradients(model, whole(model, 2, parts), parts)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    mlp = find_anatomy(model).blocks[1].mlp
    mlp.register_forward_pre_hook(lambda *_: computed.append(1))
    found = hidden_states_at(model, 2, parts)
    assert len(computed) == 1
    assert_same(gradients(model, found, parts), expected)
    assert len(computed) == 2, "computed again in the backward pass: the checkpoint was in use"


@pytest.mark.parametrize("checkpointed", [False, True])
def test_lora(checkpointed):
    lora = LoraConfig(target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model, parts = get_peft_model(build(), lora).train(), [batch(2), batch(1, seed=3)]
    for layer in (1, 2, L):
        expected = whole(model, layer, parts)
        wanted = gradients(model, expected, parts)
        if checkpointed:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        found = hidden_states_at(model, layer, parts)
        torch.testing.assert_close(real(found, parts), real(expected, parts), rtol=1e-5, atol=1e-5)
        assert_same(gradients(model, found, parts), wanted)
        assert sum(gradient is not None for gradient in wanted.values()) == 4 * layer


def test_bfloat16_autocast():
    model, parts = build(), [batch()]
    exact = hidden_states_at(model, 2, parts)[0]
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = whole(model, 2, parts), hidden_states_at(model, 2, parts)
    assert found[0].dtype == expected[0].dtype and found[0].equal(expected[0])
    assert 0 < (found[0] - exact).norm() < 0.05 * exact.norm()
    wanted = gradients(model, expected, parts)
    assert_same(gradients(model, found, parts), wanted)


def test_the_wrappers_own_conversion_reaches_the_states():
    """accelerate's mixed precision makes outputs float32: the states leave through the output, so theirs too."""
    from accelerate.utils import convert_outputs_to_fp32

    model, parts = build().bfloat16(), [batch()]
    assert hidden_states_at(model, 2, parts)[0].dtype == torch.bfloat16
    model.forward = convert_outputs_to_fp32(model.forward)
    assert hidden_states_at(model, 2, parts)[0].dtype == torch.float32


@pytest.mark.parametrize("layer", [L + 1, -L - 2, 1.5, "last"])
def test_a_layer_out_of_range_is_refused(layer):
    with pytest.raises(ValueError, match="`layer`"):
        hidden_states_at(build(), layer, [batch()])


def test_a_model_without_a_head_is_refused():
    with pytest.raises(ValueError, match="causal language model, got LlamaModel"):
        hidden_states_at(LlamaModel(CONFIGS["llama"]), 1, [batch()])


RANKS = """
import sys, torch, torch.distributed as dist
root, tests, output = sys.argv[1:]
sys.path[:0] = [root, tests]
import test_truncated as t
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from trainers.truncated import hidden_states_at

dist.init_process_group("gloo")
rank, found = dist.get_rank(), {}
for case in ("unused", "frozen", "checkpointed", "plain"):
    model = t.build()
    if case in ("frozen", "checkpointed"):
        t.freeze_after(model)
    if case == "checkpointed":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wrapped = DistributedDataParallel(model, find_unused_parameters=case == "unused")
    called = model if case == "plain" else wrapped  # around the wrapper: nobody sums the gradients
    found[case] = t.train(model, lambda parts: hidden_states_at(called, t.LAYER, parts), [rank])
    total = found[case].clone()
    dist.all_reduce(total)
    found[case + "_together"] = bool(torch.allclose(total, 2 * found[case], atol=1e-7))
model, mesh = t.build(), init_device_mesh("cpu", (2,))
for block in model.model.layers:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
found["fsdp2"] = t.train(model, lambda parts: hidden_states_at(model, t.LAYER, parts), [rank])
found["fsdp2_together"] = True  # one set of weights by construction
torch.save(found, f"{output}{rank}.pt")
dist.destroy_process_group()
"""
LAYER = 2


def freeze_after(model):
    for module in (*model.model.layers[LAYER:], model.model.norm, model.lm_head):
        module.requires_grad_(False)


def train(model, states_of, ranks):
    """Three steps of SGD on what the ranks' batches give on average; returns the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(3):
        optimizer.zero_grad()
        for rank in ranks:
            parts = [batch(2, seed=10 * step + rank), batch(2, seed=100 + 10 * step + rank)]
            loss = sum((h * p["attention_mask"].unsqueeze(-1)).pow(2).sum() for h, p in
                       zip(states_of(parts), parts, strict=True))  # fmt: skip
            (loss / len(ranks)).backward()
        optimizer.step()
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in weights])


@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path):
    """Three steps: a reduction that did not finish would raise in the second."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    run(script, [ROOT, Path(__file__).parent, tmp_path / "rank"], tmp_path, ranks=2)
    model = build()
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    moved = train(model, lambda parts: whole(model, LAYER, parts), [0, 1]) - start
    assert moved.norm() > 1e-2
    for rank in (0, 1):
        found = torch.load(tmp_path / f"rank{rank}.pt")
        for case in ("unused", "frozen", "checkpointed", "fsdp2"):
            assert found[f"{case}_together"], case
            assert (found[case] - start - moved).norm() <= 1e-4 * moved.norm(), case
        assert not found["plain_together"], "without the wrapper's call the ranks part: the comparison can fail"
        assert (found["plain"] - start - moved).norm() > 1e-2 * moved.norm()
