"""The task check: hits counted as published, on models that know all, nothing, or the first token only."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from processes import run
from scipy.stats import binomtest
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from monitor.anatomy import find_anatomy
from monitor.concept_task import Rate, _likeliest, _rate, concept_task
from monitor.generation import Decoder, encode_prompt
from monitor.stimuli.concepts import ConceptSet, Context, Entity, load_concept_sets


def entity(name: str, *texts: str, forms: tuple[str, ...] = ()) -> Entity:
    return Entity(name, name, (name, *forms), tuple(Context(text, i) for i, text in enumerate(texts)))


class Speaker(LlamaForCausalLM):
    """Says the rest of the first of its `whole` texts that begins as its input does, then EOS."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, cache=None, logits_to_keep=0, **kwargs):
        if len(input_ids) > self.room:
            raise torch.OutOfMemoryError("out of memory")
        # The tokens so far stand in the cache instead of keys, so that rows which are dropped there are dropped here.
        tokens = input_ids.float()[:, None, :, None]
        kept, _ = cache.update(tokens, tokens, 0)
        logits = torch.zeros(len(input_ids), self.config.vocab_size)
        for row, (so_far, mask) in enumerate(zip(kept[:, 0, :, 0].long(), attention_mask.bool(), strict=True)):
            for place, token in enumerate([self.following(so_far[mask].tolist()), *self.seconds]):
                logits[row, token] = 10.0 - place
        return CausalLMOutputWithPast(logits=logits.unsqueeze(1))

    def following(self, so_far: list[int]) -> int:
        rests = [whole[len(so_far) :] for whole in self.whole if whole[: len(so_far)] == so_far]
        return next((rest[0] for rest in rests if rest), self.config.eos_token_id)


@pytest.fixture
def speaker(tiny_llama, tiny_tokenizer):
    """A function from texts and what is said after them (and a second choice everywhere) to a model that says it."""

    def make(answers: dict[str, str], seconds: str = "") -> Speaker:
        model = tiny_llama()
        model.__class__ = Speaker
        model.room = 10**6
        model.whole = [tiny_tokenizer(text + answer)["input_ids"] for text, answer in answers.items()]
        model.seconds = tiny_tokenizer(seconds)["input_ids"]
        return model

    return make


TOOLS = ConceptSet(
    "tools",
    (
        entity("axe", "It fells trees:", "It has a blade:", forms=("axes",)),
        entity("hammer", "It drives nails:", "It is heavy:"),
    ),
)


def values(scores) -> tuple[float, float, float]:
    return scores.top1.value, scores.top5.value, scores.continuation.value


def test_nothing_said_is_nothing_known(speaker, tiny_tokenizer):
    assert values(concept_task(speaker({}), tiny_tokenizer, TOOLS)) == (0.0, 0.0, 0.0)


def test_beginnings_and_whole_entities_are_told_apart(speaker, tiny_tokenizer):
    """Letters are tokens here, the space too: five of them are " axes", but never " hammer"."""
    model = speaker(
        {"It fells trees:": " axe", "It has a blade:": " AXES", "It drives nails:": " hammer", "It is heavy:": " anvil"}
    )
    scores = concept_task(model, tiny_tokenizer, TOOLS)
    assert values(scores) == (0.75, 0.75, 0.5) and scores.n == 4
    assert values(concept_task(model, tiny_tokenizer, TOOLS, max_new_tokens=9)) == (0.75, 0.75, 0.75)


def test_the_second_likeliest_counts_among_five_only(speaker, tiny_tokenizer):
    model = speaker({text: " x" for text in TOOLS.texts}, seconds="h")
    assert values(concept_task(model, tiny_tokenizer, TOOLS)) == (0.0, 0.5, 0.0)


def test_a_form_inside_another_word_is_no_mention(speaker, tiny_tokenizer):
    model = speaker({"It fells trees:": " coaxed", "It has a blade:": " an axe."})
    assert values(concept_task(model, tiny_tokenizer, TOOLS, max_new_tokens=9))[2] == 0.25


def test_what_all_entities_begin_with_counts_for_none(speaker, tiny_tokenizer):
    """Digits are tokens here: "1" after the space is no knowledge of a year, "196" is."""
    years = ConceptSet("years", (entity("1945", "The war ended in"), entity("1969", "Men walked on the Moon in")))
    know = {"The war ended in": " 1945", "Men walked on the Moon in": " 1969"}
    assert values(concept_task(speaker(know), tiny_tokenizer, years)) == (1.0, 1.0, 1.0)
    century = dict.fromkeys(know, " 19")
    assert values(concept_task(speaker(century), tiny_tokenizer, years)) == (0.0, 0.0, 0.0)
    always = dict.fromkeys(know, " 1969")
    assert values(concept_task(speaker(always), tiny_tokenizer, years)) == (0.5, 0.5, 0.5)


def test_top_tokens_are_those_of_the_model_alone_whatever_the_batch(tiny_llama, tiny_tokenizer):
    """A random model against its own plain forward, one context at a time, and the model as it was."""
    model = tiny_llama().train()
    days = load_concept_sets(["days"])["days"]
    few = tuple(replace(day, contexts=day.contexts[::9]) for day in days.entities)
    concept = replace(days, entities=few)
    shared = tiny_tokenizer(" ")["input_ids"]
    hits = []
    with torch.no_grad():
        model.eval()
        for text, label in zip(concept.texts, concept.labels, strict=True):
            ids = torch.tensor([tiny_tokenizer(text)["input_ids"] + shared])
            letters = [tiny_tokenizer.decode(token).casefold() for token in model(ids).logits[0, -1].topk(5).indices]
            name = concept.entities[label].name.casefold()
            hits.append([bool(letter.strip()) and name.startswith(letter) for letter in letters])
    model.train()
    state, weights = torch.random.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    expected = (sum(h[0] for h in hits) / len(hits), sum(any(h) for h in hits) / len(hits))
    for batch_tokens in (1, 300):
        assert values(concept_task(model, tiny_tokenizer, concept, batch_tokens=batch_tokens))[:2] == expected
    assert model.training and torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())


RANKS = """
import json, sys, torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from monitor.anatomy import find_anatomy
from monitor.concept_task import _likeliest
from monitor.generation import Decoder, encode_prompt
from monitor.stimuli.concepts import load_concept_sets

folder = sys.argv[1]
dist.init_process_group("gloo")
tokenizer = AutoTokenizer.from_pretrained(folder + "/model")
model = AutoModelForCausalLM.from_pretrained(folder + "/model")
sequences = [encode_prompt(tokenizer, text) for text in load_concept_sets(["days"])["days"].texts]
read = []
model.model.register_forward_hook(lambda module, args, output: read.append(output[0].shape[0]))
found = _likeliest(Decoder(find_anatomy(model), tokenizer), sequences, 400, None)
json.dump([found, sum(read)], open(f"{folder}/{dist.get_rank()}.json", "w"))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_share_the_contexts_and_get_the_same(tiny_llama, tiny_tokenizer, tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "script.py").write_text(RANKS)
    run(tmp_path / "script.py", [tmp_path], tmp_path, ranks=2)
    sequences = [encode_prompt(tiny_tokenizer, text) for text in load_concept_sets(["days"])["days"].texts]
    alone = _likeliest(Decoder(find_anatomy(model), tiny_tokenizer), sequences, 400, None)
    parts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert [found for found, _ in parts] == [alone, alone]
    assert sum(rows for _, rows in parts) == len(sequences)


def test_out_of_memory_halves_the_batch(speaker, tiny_tokenizer):
    model = speaker(dict.fromkeys(TOOLS.texts, " axe"))
    expected = concept_task(model, tiny_tokenizer, TOOLS)
    model.room = 1
    assert concept_task(model, tiny_tokenizer, TOOLS) == expected
    model.room = 0
    with pytest.raises(torch.OutOfMemoryError):
        concept_task(model, tiny_tokenizer, TOOLS)


@pytest.mark.parametrize("hits", [0, 3, 10])
def test_the_interval_is_wilsons_when_contexts_are_independent(hits):
    """One context an entity."""
    rate = _rate([i < hits for i in range(10)], list(range(10)))
    interval = binomtest(hits, 10).proportion_ci(method="wilson")
    assert rate.value == hits / 10
    assert (rate.low, rate.high) == pytest.approx((interval.low, interval.high), abs=1e-12)


def test_contexts_that_succeed_together_count_once():
    together = [True] * 12 + [False] * 12 + [True] * 12 + [False] * 12
    labels = [i // 12 for i in range(48)]
    spread = [i % 2 == 0 for i in range(48)]
    narrow, wide = _rate(spread, labels), _rate(together, labels)
    assert narrow.value == wide.value == 0.5
    interval = binomtest(2, 4).proportion_ci(method="wilson")
    assert (wide.low, wide.high) == pytest.approx((interval.low, interval.high))
    interval = binomtest(24, 48).proportion_ci(method="wilson")
    assert (narrow.low, narrow.high) == pytest.approx((interval.low, interval.high))
    assert isinstance(narrow, Rate)


@pytest.mark.slow
def test_smollm2_names_days_and_a_random_model_names_none(smollm2, tiny_llama, tiny_tokenizer):
    days = load_concept_sets(["days"])["days"]
    knows = concept_task(*smollm2, days)
    assert knows.top5.value > 0.3 and knows.continuation.value > 0
    assert concept_task(tiny_llama(), tiny_tokenizer, days).continuation.value == 0
