from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from monitor.attacks.intact import intact
from monitor.attacks.result import AttackResult


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("fails", [False, True])
def test_all_comes_back(tiny_llama, fails):
    model = tiny_llama()
    model.train()
    model.model.layers[1].eval()
    first, second, *_ = model.parameters()
    first.grad, kept = torch.ones_like(first), torch.ones_like(first)
    gradient = first.grad
    second.requires_grad_(False)
    before, modes = state(model), [m.training for m in model.modules()]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = (random.random(), np.random.rand(), torch.rand(()).item())
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    try:
        with intact(model, weights=True) as anatomy:
            assert anatomy.model is model and not model.training and first.grad is None
            torch.rand(3), np.random.rand(3), random.random()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.requires_grad_(True)
                    parameter.add_(1.0)
            first.grad = torch.zeros_like(first)
            if fails:
                raise RuntimeError("the attack failed")
    except RuntimeError:
        assert fails
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert first.grad is gradient and torch.equal(gradient, kept)
    assert not second.requires_grad and first.requires_grad
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected


def test_result_is_checked():
    result = AttackResult("membership", torch.tensor(0.5), 0.4, 0.6, 0.5, 10, {"a": 1})
    assert result.record() == {"name": "membership", "score": 0.5, "low": 0.4, "high": 0.6, "baseline": 0.5, "n": 10}
    with pytest.raises(ValueError, match="must be finite"):
        AttackResult("membership", float("nan"), None, None, None, 10)
    with pytest.raises(ValueError, match="must hold its score"):
        AttackResult("membership", 0.7, 0.4, 0.6, None, 10)
    with pytest.raises(ValueError, match="both"):
        AttackResult("membership", 0.7, 0.4, None, None, 10)
