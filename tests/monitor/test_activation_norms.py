"""The range of norms against transformers' own hidden states, and against what the steered state is."""

from __future__ import annotations

import pytest
import torch

from monitor.activation_norms import activation_norm_range
from monitor.generation import encode_prompt
from monitor.steered_generation import entering, steered_answers
from monitor.stimuli.encoding import encode_text

PROMPTS = ["Who is the captain?", "t", "the wizard went to the school of the ship\nAnswer:", "the ship"]


def last_norms(model, tokenizer, layer):
    with torch.no_grad():
        return [
            float(
                model(
                    input_ids=torch.tensor([encode_text(tokenizer, prompt)]), output_hidden_states=True
                ).hidden_states[layer][0, -1].norm()
            )
            for prompt in PROMPTS
        ]  # fmt: skip


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_it_is_the_range_of_the_last_tokens_norms(layer, tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    norms = last_norms(model, tiny_tokenizer, layer)
    for budget in (1, 2048):
        found = activation_norm_range(model, tiny_tokenizer, PROMPTS, layer=layer, token_budget=budget)
        assert found == pytest.approx((min(norms), max(norms)), rel=1e-5)
    one = activation_norm_range(model, tiny_tokenizer, PROMPTS[2:3], layer=layer)
    assert one == pytest.approx((norms[2], norms[2]), rel=1e-5)
    assert max(norms) > 1.01 * min(norms), "or any of them would do"


def test_it_is_what_steering_finds(tiny_llama, tiny_tokenizer):
    """The state that is steered first is the one whose norm is read."""
    model, seen = tiny_llama(), []

    def look(hidden):
        seen.append(hidden[:, -1].norm(dim=-1))
        return hidden

    with entering(model.model.layers[2], look):
        steered_answers(model, tiny_tokenizer, PROMPTS[:1], torch.zeros(1, 32), layer=2, strength=1.0, max_new_tokens=1)
    low, high = activation_norm_range(model, tiny_tokenizer, PROMPTS[:1], layer=2)
    assert len(encode_prompt(tiny_tokenizer, PROMPTS[0])) > 1
    assert low == high == pytest.approx(float(seen[-1]), rel=1e-5)


def test_states_that_have_no_range_are_told(tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    with pytest.raises(ValueError, match="`texts`"):
        activation_norm_range(model, tiny_tokenizer, "a text", layer=2)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0] = torch.nan
    with pytest.warns(UserWarning, match="not finite"), pytest.raises(ValueError, match="layer 2.*not finite"):
        activation_norm_range(model, tiny_tokenizer, PROMPTS, layer=2)
