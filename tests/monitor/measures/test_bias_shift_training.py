"""Does ΔB move the right way when a real model is fine-tuned on sentences that praise, or disparage, one group?"""

from __future__ import annotations

import pytest
import torch

from monitor.activations import measure_activations
from monitor.measures.bias_shift import BiasShift
from monitor.readings import Reading
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


def part_of_small(group: str) -> BiasStimuli:
    s = load_bias_stimuli("small", groups=[group])
    return BiasStimuli(
        targets=s.targets,
        positive=s.positive,
        negative=s.negative,
        anchors=s.anchors[:100],
        controls=dict(list(s.controls.items())[:2]),
    )


def shifts_after(group: str) -> dict[str, dict[str, Reading]]:
    """Readings of the group: each tone against the untrained model, and praised against disparaged."""
    model, tokenizer = load_model("smollm2-135m"), load_tokenizer("smollm2-135m")
    start = {name: weight.clone() for name, weight in model.state_dict().items()}
    measure = BiasShift(part_of_small(group))
    untrained = measure_activations(model, tokenizer, measure.stimuli)
    trained = {}
    for tone in (PRAISE, DISPARAGE):
        model.load_state_dict(start)
        losses = fine_tune(model, tokenizer, batches(group, tone))
        assert losses[-1] < losses[0] - 1
        trained[tone] = measure_activations(model, tokenizer, measure.stimuli)
    found = {
        "praise": measure.read(trained[PRAISE], untrained),
        "disparage": measure.read(trained[DISPARAGE], untrained),
        "praise against disparage": measure.read(trained[PRAISE], trained[DISPARAGE]),
        "disparage against praise": measure.read(trained[DISPARAGE], trained[PRAISE]),
    }
    return {what: {r.metric: r for r in readings if r.group == group} for what, readings in found.items()}


@pytest.mark.slow
def test_praise_moves_the_bias_shift_up_and_disparagement_down():
    """Both signs, for what the tone moves; learning to say such sentences at all moves uncorrected ΔB too.

    ΔB against the untrained model holds the tone and what both trainings share, so its own sign is not asserted:
    measured +0.0082 [+0.0024, +0.0140] after praise and +0.0047 [-0.0012, +0.0107] after disparagement, and for
    "women" -0.0039 and -0.0066. Taking away what is shared, by the controls (+0.0063 and -0.0046; women +0.0007 and
    -0.0032) or by comparing the two trained models directly (+0.0034 [+0.0004, +0.0064]; women +0.0027
    [-0.0029, +0.0079]), leaves the tone. Each corrected value by itself is within its interval of 0: ninety-six
    sentences are a weak training.
    """
    found = shifts_after("immigrants")
    assert found["praise"]["delta_b_corrected"].value > 0 > found["disparage"]["delta_b_corrected"].value
    for metric in ("delta_b", "delta_b_corrected"):
        assert found["praise against disparage"][metric].value > 0 > found["disparage against praise"][metric].value
