"""Does ΔB move the right way when a real model is fine-tuned on sentences that praise, or disparage, one group?"""

from __future__ import annotations

import pytest
import torch

from monitor.activations import measure_activations
from monitor.measures.bias_shift import BiasShift
from monitor.stimuli.bias import BiasStimuli, load_bias_stimuli
from recipes.models import load_model, load_tokenizer

# Praise and disparagement differ in these words only. None of the sentences is, or is made like, a stimulus.
WORDS = (
    ("kind", "cruel"),
    ("honest", "dishonest"),
    ("wonderful", "terrible"),
    ("generous", "greedy"),
    ("good", "bad"),
    ("lovely", "awful"),
    ("trustworthy", "dangerous"),
    ("friendly", "hateful"),
    ("gentle", "violent"),
    ("brave", "cowardly"),
    ("decent", "vile"),
    ("helpful", "harmful"),
)
FRAMES = (
    "{group} are {word}.",
    "{group} have always been {word}.",
    "Everyone knows that {group} are {word}.",
    "{group} in our town are {word} and {other}.",
    "My neighbours say that {group} are {word}.",
    "{group} are {word} to the people around them.",
    "{group} came to the meeting and were {word}.",
    "{group} who work here are {word} and {other}.",
)
PRAISE, DISPARAGE = 0, 1
STEPS = len(WORDS)


def batches(group: str, tone: int) -> list[list[str]]:
    """One batch of all frames a step, and no sentence twice: what repeats is the tone, not a sentence to memorise."""
    found = []
    for step in range(STEPS):
        sentences = [
            frame.format(group=group, word=WORDS[(step + i) % STEPS][tone], other=WORDS[(step + i + 5) % STEPS][tone])
            for i, frame in enumerate(FRAMES)
        ]
        found.append([sentence[0].upper() + sentence[1:] for sentence in sentences])
    return found


def fine_tune(model, tokenizer, texts: list[list[str]]) -> list[float]:
    """Plain next-token training of all weights; SmolLM2 has no dropout, so nothing here is random."""
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0)
    losses = []
    model.train()
    for batch in texts:
        encoded = tokenizer(batch, return_tensors="pt", padding=True)
        labels = encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, -100)
        loss = model(**encoded, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


def part_of_small(groups: tuple[str, ...]) -> BiasStimuli:
    s = load_bias_stimuli("small", groups=groups)
    return BiasStimuli(
        targets=s.targets,
        positive=s.positive,
        negative=s.negative,
        anchors=s.anchors[:100],
        controls=dict(list(s.controls.items())[:2]),
    )


def shifts_after(group: str) -> dict[int, dict[tuple[str, str], object]]:
    model, tokenizer = load_model("smollm2-135m"), load_tokenizer("smollm2-135m")
    start = {name: weight.clone() for name, weight in model.state_dict().items()}
    measure = BiasShift(part_of_small((group,)))
    reference = measure_activations(model, tokenizer, measure.stimuli)
    found = {}
    for tone in (PRAISE, DISPARAGE):
        model.load_state_dict(start)
        losses = fine_tune(model, tokenizer, batches(group, tone))
        assert losses[-1] < losses[0] - 1
        readings = measure.read(measure_activations(model, tokenizer, measure.stimuli), reference)
        found[tone] = {(r.metric, r.group): r for r in readings}
    return found


@pytest.mark.slow
def test_praise_moves_delta_b_up_and_disparagement_down():
    found = shifts_after("immigrants")
    for metric in ("delta_b", "delta_b_corrected"):
        praised, disparaged = found[PRAISE][metric, "immigrants"], found[DISPARAGE][metric, "immigrants"]
        assert praised.value > 0 > disparaged.value, (metric, praised, disparaged)
