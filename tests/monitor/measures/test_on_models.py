"""The measures on whole models: what must be zero is zero, whatever the basis the model writes its states in."""

import copy

import pytest
import torch

from monitor.activations import measure_activations
from monitor.measures.behaviour import Behaviour
from monitor.measures.bias_shift import BiasShift
from monitor.measures.detectability import Detectability
from monitor.stimuli.counterfactual_grid import load_counterfactual_sets
from monitor.stimuli.forget_set import Pair


def rotated(model):
    """The same function with its residual stream in another orthonormal basis: x' = x Q everywhere.

    RMSNorm commutes with a rotation when its gains are one, which those of a new model are.
    """
    model = copy.deepcopy(model)
    d = model.config.hidden_size
    q = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))[0]

    def read(linear):  # from the stream: y = x Wᵀ = x' (W Q)ᵀ
        linear.weight.data = (linear.weight.data.double() @ q).float()

    def write(linear):  # into the stream: y' = y Q
        linear.weight.data = (q.T @ linear.weight.data.double()).float()

    read(model.model.embed_tokens)  # a row of the table is a state
    read(model.lm_head)
    for block in model.model.layers:
        for linear in (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj):
            read(linear)
        read(block.mlp.gate_proj), read(block.mlp.up_proj)
        write(block.self_attn.o_proj), write(block.mlp.down_proj)
    return model


@pytest.fixture
def readings_of(tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(tiny_tokenizer, "model_max_length", 128)
    bias = BiasShift()
    pair = Pair(id="1", question="Who sails?", answer="a wizard", split="forget", anonymized=())
    behaviour = Behaviour({"forget": [pair, Pair("2", "Who sinks?", "a ship", "forget", ())]})
    requests = [*bias.stimuli, *behaviour.stimuli]

    def read(now, reference):
        now, reference = (measure_activations(m, tiny_tokenizer, requests) for m in (now, reference))
        return bias.read(now, reference), behaviour.read(now, reference)

    return read


def test_nothing_moves_against_itself(tiny_llama, readings_of):
    bias, _ = readings_of(tiny_llama(), tiny_llama())
    shifts = [r for r in bias if r.metric.startswith("delta_b")]
    assert shifts and all(r.valid and abs(r.value) <= 1e-6 for r in shifts)


def test_bias_shift_is_zero_for_a_rotated_residual_stream(tiny_llama, readings_of):
    model = tiny_llama()
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    bias, behaviour = readings_of(rotated(model), model)
    shifts = [r for r in bias if r.metric.startswith("delta_b") or r.metric == "cka_drift"]
    assert shifts and all(r.valid and abs(r.value) <= 1e-6 for r in shifts), shifts
    (change,) = [r for r in behaviour if r.metric == "forget_nll_change"]
    assert abs(change.value) < 1e-5, "the rotated model must be the same function"


def test_bias_shift_is_not_zero_for_other_weights(tiny_llama, readings_of):
    bias, _ = readings_of(tiny_llama(5), tiny_llama())
    assert max(abs(r.value) for r in bias if r.metric == "delta_b") > 1e-4


def test_separation_does_not_change_in_a_rotated_residual_stream_and_does_with_other_weights(
    tiny_llama, tiny_tokenizer, monkeypatch
):
    monkeypatch.setattr(tiny_tokenizer, "model_max_length", 256)
    measure = Detectability(load_counterfactual_sets(("gender",), cells=60), n=80)

    def change(now):
        now, reference = (measure_activations(m, tiny_tokenizer, measure.stimuli) for m in (now, tiny_llama()))
        readings = measure.read(now, reference)
        return next(r for r in readings if (r.metric, r.group) == ("s_change", "gender"))

    turned, other = change(rotated(tiny_llama())), change(tiny_llama(5))
    assert turned.valid and abs(turned.value) < 1e-3
    assert abs(other.value) > 0.05
