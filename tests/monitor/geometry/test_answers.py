from __future__ import annotations

import math

import pytest
import torch

from monitor.geometry.answers import answer_nll, answer_probability, exact_memorisation, extraction_strength


def hits(text: str) -> torch.Tensor:
    return torch.tensor([c == "1" for c in text])


def test_likelihood_by_hand():
    log_probs = [torch.tensor([0.5, 0.25, 0.125]).log(), torch.tensor([0.9]).log()]
    assert answer_nll(log_probs).tolist() == pytest.approx([2 * math.log(2), -math.log(0.9)], rel=1e-6)
    # The geometric mean of 1/2, 1/4 and 1/8.
    assert answer_probability(log_probs).tolist() == pytest.approx([0.25, 0.9], rel=1e-6)
    assert answer_nll(log_probs).dtype == torch.float64


def test_a_certain_answer_has_nll_zero_and_an_impossible_one_is_infinite():
    log_probs = [torch.zeros(3), torch.tensor([0.0, -math.inf])]
    assert answer_nll(log_probs).tolist() == [0.0, math.inf]
    assert answer_probability(log_probs).tolist() == [1.0, 0.0]


def test_exact_memorisation_by_hand():
    assert exact_memorisation([hits("1101"), hits("0"), hits("11")]).tolist() == [0.75, 0.0, 1.0]


@pytest.mark.parametrize(
    ("greedy", "strength"),
    [
        ("1111", 1.0),  # nothing need be given
        ("0111", 0.75),  # the first token given
        ("1101", 0.25),  # hits before the last miss do not count
        ("0001", 0.25),
        ("1110", 0.0),  # even the last token is missed: published code says 1/T
        ("0000", 0.0),
        ("1", 1.0),
        ("0", 0.0),
    ],
)
def test_extraction_strength_cases(greedy, strength):
    assert extraction_strength([hits(greedy)]).tolist() == [strength]


def test_extraction_strength_is_that_of_greedy_decoding():
    # A random deterministic "model": next token = argmax of a table indexed by the last two tokens. Answers are its
    # own continuations with some tokens changed, so that every run length occurs.
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(5, (5, 5), generator=generator)

    def decode(prefix: list[int], steps: int) -> list[int]:
        tokens = list(prefix)
        for _ in range(steps):
            tokens.append(int(table[tokens[-2], tokens[-1]]))
        return tokens[len(prefix) :]

    seen = set()
    for trial in range(200):
        prompt = torch.randint(5, (2,), generator=generator).tolist()
        answer = decode(prompt, 6)
        for _ in range(trial % 4):
            answer[int(torch.randint(6, (1,), generator=generator))] = int(torch.randint(5, (1,), generator=generator))
        greedy = [decode(prompt + answer[:t], 1)[0] == answer[t] for t in range(6)]
        k = next((k for k in range(6) if decode(prompt + answer[:k], 6 - k) == answer[k:]), 6)
        assert extraction_strength([torch.tensor(greedy)]).item() == pytest.approx(1 - k / 6)
        seen.add(k)
    assert {0, 6} < seen and len(seen) >= 5


@pytest.mark.parametrize("function", [answer_nll, answer_probability, exact_memorisation, extraction_strength])
def test_empty_answers_are_an_error(function):
    with pytest.raises(ValueError, match=r"\[1\] must be one-dimensional with at least one token"):
        function([torch.zeros(2), torch.zeros(0)])
    with pytest.raises(ValueError, match="at least one answer, got none"):
        function([])
