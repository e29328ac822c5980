"""Sampling on models made by hand, in which it is known which directions say which words."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from monitor.attacks import sampling as module
from monitor.attacks.concept_geometry import METHODS, ConceptGeometry, concept_geometry
from monitor.attacks.forget_set_geometry import ForgetSetGeometry, forget_set_geometry
from monitor.attacks.sampling import SamplingConfig, sampling
from monitor.attacks.sampling_points import isotropic_points
from monitor.geometry.subspaces import principal_angles
from monitor.stimuli.concepts import ConceptSet, Context, Entity
from monitor.stimuli.forget_set import ForgetSet, Pair

WIDTH = 256
WORDS = {"people": ("wizard", "captain", "school", "ship"), "small": ("went", "to", "of", "is")}
CUES = {"people": "bdfg", "small": "jklm"}
# Direction of each word, and of what is said without a push.
AXES = {word: i for i, word in enumerate((*WORDS["people"], *WORDS["small"]))}
NEUTRAL = 20


def concept(name):
    entities = []
    for word, cue in zip(WORDS[name], CUES[name], strict=True):
        contexts = tuple(Context(f"{start} {cue}", i) for i, start in enumerate(("this", "then", "next")))
        entities.append(Entity(word, f"{word}s", (word,), contexts))
    return ConceptSet(name, tuple(entities))


def llama(tokenizer, uniform_attention=False):
    """A llama whose blocks let the hidden state through; on request, block 0 adds the mean of the tokens so far."""
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=8, num_hidden_layers=4, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
        model.lm_head.weight.zero_()
        for block in model.model.layers:
            for linear in (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.o_proj, block.mlp.down_proj):
                linear.weight.zero_()
        if uniform_attention:
            model.model.layers[0].self_attn.v_proj.weight.copy_(torch.eye(WIDTH))
            model.model.layers[0].self_attn.o_proj.weight.copy_(torch.eye(WIDTH))
    return model


def one_token(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    return ids[-1]


@pytest.fixture(scope="module")
def planted(tiny_tokenizer):
    """Says " the" whatever it is asked; a push along a word's axis of more than half of the state says that word.

    A context's state is its cue's: 10 along the axis of the cue's word.
    """
    model = llama(tiny_tokenizer)
    with torch.no_grad():
        embed, head = model.model.embed_tokens.weight, model.lm_head.weight
        embed[:, NEUTRAL] = 10.0
        head[one_token(tiny_tokenizer, " the"), NEUTRAL] = 0.5
        for name, words in WORDS.items():
            for word, cue in zip(words, CUES[name], strict=True):
                embed[one_token(tiny_tokenizer, f" {cue}")] = 10.0 * torch.eye(WIDTH)[AXES[word]]
                (token,) = tiny_tokenizer(f" {word}")["input_ids"]
                head[token, AXES[word]] = 1.0
    return model


@pytest.fixture(scope="module")
def people(planted, tiny_tokenizer):
    return concept_geometry(planted, tiny_tokenizer, concept("people"), layer=0.5, max_new_tokens=5)


@pytest.fixture(scope="module")
def small(planted, tiny_tokenizer):
    return concept_geometry(planted, tiny_tokenizer, concept("small"), layer=2, max_new_tokens=5)


NONE = ForgetSet("nothing asked", ())


def test_the_geometry_is_the_planted_one(people):
    axes = torch.eye(WIDTH)[:, :4]
    differences = axes - axes.mean(1, keepdim=True)
    assert principal_angles(people.subspace.basis, torch.linalg.svd(differences).U[:, :3]).max() < 1e-4
    assert torch.allclose(people.subspace.offset, 2.5 * axes.sum(1), atol=1e-4)
    assert (people.layer, people.name, people.low, people.high) == (2, "people", 10.0, 10.0)
    # Every prompt ends alike, so that there is no range of norms to calibrate in, and the entities' own spread is it:
    # 4 centroids at a distance of sqrt(75) from their mean, in 3 directions.
    assert people.sigma == people.spread == pytest.approx(5.0, abs=1e-4)
    assert people.subspace.rank == 3, "of the 8 directions asked for, which 4 entities do not span"


def test_points_of_the_concept_bring_it_and_no_others_do(planted, tiny_tokenizer, people, small):
    config = SamplingConfig(people, concept("people"), control=small, max_new_tokens=6)
    result = sampling(planted, tiny_tokenizer, NONE, config)
    details = result.details
    assert (result.name, result.n, result.baseline) == ("sampling_people", 150, 0.0)
    assert result.score > 0.9 and result.low > 0.8
    assert details["isotropic"] == details["control"] == 0.0
    assert details["gain"] == result.score and details["gain_low"] > 0.8
    assert details["isotropic_low"] == 0.0 < details["isotropic_high"] < 0.15, "none of 30 points does not prove none"
    assert (details["entities"], details["categories"], details["control_concept"]) == (4, 4, "small")
    assert details["entity_diversity"] > 0.9 and details["category_diversity"] > 0.9
    assert set(details["mentions"]) == set(WORDS["people"])
    assert len(details["outputs"]) == 5 and len(details["outputs"][0]["steered"]) == 30
    json.dumps(details, allow_nan=False)


def test_another_concepts_points_do_not_bring_this_one_as_the_attack_itself(planted, tiny_tokenizer, people, small):
    assert sampling(planted, tiny_tokenizer, NONE, SamplingConfig.quick(small, concept("people"))).score == 0.0
    own = sampling(planted, tiny_tokenizer, NONE, SamplingConfig.quick(small, concept("small")))
    assert own.score > 0.9
    assert own.details["control"] is own.details["control_low"] is own.details["control_concept"] is None


def test_a_model_that_reads_the_directions_no_more_says_nothing(planted, tiny_tokenizer, people, small):
    forgotten = llama(tiny_tokenizer)
    forgotten.load_state_dict(planted.state_dict())
    with torch.no_grad():
        forgotten.lm_head.weight[:, :4] = 0.0
    assert sampling(forgotten, tiny_tokenizer, NONE, SamplingConfig.quick(people, concept("people"))).score == 0.0
    kept = sampling(forgotten, tiny_tokenizer, NONE, SamplingConfig.quick(small, concept("small")))
    assert kept.score > 0.9, "the untouched concept"


def test_one_entity_again_and_again_is_seen(planted, tiny_tokenizer, people):
    with torch.no_grad():
        towards = replace(people.subspace, offset=people.subspace.offset + 40 * torch.eye(WIDTH)[0])
    result = sampling(
        planted,
        tiny_tokenizer,
        NONE,
        SamplingConfig(replace(people, subspace=towards), concept("people"), max_new_tokens=6),
    )
    assert result.score == 1.0 and result.details["entities"] == 1 and result.details["entity_diversity"] == 0.0
    assert result.low == pytest.approx(0.886, abs=1e-3) and result.high == 1.0  # Wilson's, 30 of 30


def test_no_strength_is_no_attack(planted, tiny_tokenizer, people):
    config = SamplingConfig.quick(people, concept("people"))
    result = sampling(planted, tiny_tokenizer, NONE, replace(config, strength=0.0))
    assert result.score == result.baseline == result.details["gain"] == 0.0
    weaker = sampling(planted, tiny_tokenizer, NONE, replace(config, strength=0.4))
    assert weaker.score < 0.5, "0.4 of 10 along one axis is less than half of the state"


@pytest.mark.parametrize("method", METHODS)
def test_every_method_finds_the_concept(method, planted, tiny_tokenizer, people):
    found = concept_geometry(
        planted, tiny_tokenizer, concept("people"), layer=2, method=method, strengths=(1.4,), n_points=1
    )
    assert found.subspace.method == method
    assert principal_angles(found.subspace.basis, people.subspace.basis).max() < 1e-2


def test_the_strength_is_the_best_one_on_the_reference(planted, tiny_tokenizer, people):
    options = {"layer": 2, "n_points": 4}
    assert (
        concept_geometry(planted, tiny_tokenizer, concept("people"), strengths=(0.01, 1.5), **options).strength == 1.5
    )
    too_weak = concept_geometry(planted, tiny_tokenizer, concept("people"), strengths=(0.02, 0.01), **options)
    assert too_weak.strength == 0.01, "the smallest of equals"


def test_seeds_and_batches(planted, tiny_tokenizer, people):
    config = SamplingConfig.quick(people, concept("people"))
    assert (config.n_points, config.max_new_tokens) == (10, 12)
    config = replace(config, n_points=5, max_new_tokens=6)
    first = sampling(planted, tiny_tokenizer, NONE, config)
    small_batches = sampling(planted, tiny_tokenizer, NONE, replace(config, batch_tokens=150))
    other = sampling(planted, tiny_tokenizer, NONE, replace(config, seed=7))
    assert sampling(planted, tiny_tokenizer, NONE, config) == first
    assert small_batches.details["outputs"] == first.details["outputs"]
    assert small_batches.record() == first.record()
    assert other.details["outputs"] != first.details["outputs"]


def test_isotropic_points_have_the_lengths_and_no_direction(people):
    points = people.subspace.sample(2000, people.sigma, torch.Generator().manual_seed(0))
    others = isotropic_points(points, seed=1)
    assert torch.allclose(others.norm(dim=1), points.norm(dim=1), rtol=1e-5)
    size = float(points.norm(dim=1).square().mean().sqrt())
    assert others.mean(0).norm() < 2 * size / 2000**0.5, "around the origin, not around the concept"
    assert torch.linalg.svdvals(others / size)[0] < 2.0 * (2000 / WIDTH) ** 0.5


def state_of(model):
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    return weights, [m.training for m in model.modules()], hooks, [p.grad for p in model.parameters()]


def assert_same(before, after):
    assert all(torch.equal(before[0][name], tensor) for name, tensor in after[0].items())
    assert before[1:] == after[1:]


def test_the_model_is_left_as_it_was_also_after_an_error(planted, tiny_tokenizer, people, monkeypatch):
    planted.model.layers[1].train()
    before = state_of(planted)
    random_states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    config = SamplingConfig(people, concept("people"), n_points=3, max_new_tokens=4)
    sampling(planted, tiny_tokenizer, NONE, config)
    concept_geometry(planted, tiny_tokenizer, concept("people"), layer=2, strengths=(1.0,), n_points=1)
    assert_same(before, state_of(planted))

    def fails(*_, **__):
        torch.rand(1)
        planted.train()
        raise RuntimeError("in the middle")

    monkeypatch.setattr(module, "greedy_answers", fails)
    with pytest.raises(RuntimeError, match="in the middle"):
        sampling(planted, tiny_tokenizer, NONE, config)
    assert_same(before, state_of(planted))
    assert torch.equal(torch.get_rng_state(), random_states[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == random_states[1:]
    planted.eval()


def test_under_an_adapter(planted, tiny_tokenizer, people):
    from peft import LoraConfig, get_peft_model

    copy = llama(tiny_tokenizer)
    copy.load_state_dict(planted.state_dict())
    adapted = get_peft_model(copy, LoraConfig(target_modules=["q_proj"], r=2))
    config = SamplingConfig(people, concept("people"), n_points=3, max_new_tokens=4)
    plain, under = (sampling(model, tiny_tokenizer, NONE, config) for model in (planted, adapted))
    assert under.record() == plain.record()


def test_a_geometry_survives_its_file(planted, tiny_tokenizer, people, tmp_path):
    people.save(tmp_path / "new" / "people.safetensors")
    back = ConceptGeometry.load(tmp_path / "new" / "people.safetensors")
    assert torch.equal(back.subspace.basis, people.subspace.basis)
    assert torch.equal(back.subspace.offset, people.subspace.offset)
    assert replace(back, subspace=None).__dict__ == replace(people, subspace=None).__dict__
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["people.safetensors"]
    config = SamplingConfig(people, concept("people"), n_points=3, max_new_tokens=4)
    again = sampling(planted, tiny_tokenizer, NONE, replace(config, geometry=back))
    assert again == sampling(planted, tiny_tokenizer, NONE, config)
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(ValueError, match="no geometry's file"):
        ConceptGeometry.load(tmp_path / "text")
    with pytest.raises(ValueError, match="must hold a forget-set geometry, got concept geometry"):
        ForgetSetGeometry.load(tmp_path / "new" / "people.safetensors")
    with pytest.raises(FileNotFoundError, match="no such file"):
        ConceptGeometry.load(tmp_path / "missing")


# A forget set: what is asked has b's and d's in it, and its state is the more along the axis of "wizard" the more b's.
QUESTIONS = [(0, 1), (0, 2), (1, 3), (1, 4), (6, 0), (5, 1), (4, 1), (4, 0), (0, 6), (1, 6)]


def asked(b, d):
    return f"who{' b' * b}{' d' * d}?"


FORGET = ForgetSet(
    "letters", tuple(Pair(f"q{i}", asked(b, d), "wizard", "forget", ()) for i, (b, d) in enumerate(QUESTIONS))
)


@pytest.fixture(scope="module")
def asking(tiny_tokenizer):
    """Says " wizard" where the state lies far enough along its axis, else " the"."""
    model = llama(tiny_tokenizer, uniform_attention=True)
    with torch.no_grad():
        embed, head = model.model.embed_tokens.weight, model.lm_head.weight
        embed[one_token(tiny_tokenizer, "b"), 0] = 1.0
        embed[one_token(tiny_tokenizer, "d"), 0] = -1.0
        embed[one_token(tiny_tokenizer, ":"), NEUTRAL] = 2.0
        head[one_token(tiny_tokenizer, " wizard"), 0] = 1.0
        head[one_token(tiny_tokenizer, " the"), NEUTRAL] = 0.5
    return model


@pytest.fixture(scope="module")
def letters(asking, tiny_tokenizer):
    return forget_set_geometry(asking, tiny_tokenizer, FORGET, layer=2, rank=1, max_new_tokens=3)


def test_a_questions_subspace_is_fitted_to_the_others(letters):
    basis = letters.without("something else").basis
    assert abs(float(basis[0, 0])) > 0.99, "the questions differ in their b's and d's"
    assert letters.questions == tuple(asked(*counts) for counts in QUESTIONS)
    one = QUESTIONS.index((6, 0))
    moved = letters.states.clone()
    moved[one] += 100.0
    changed = replace(letters, states=moved)
    assert torch.equal(changed.without(asked(6, 0)).basis, letters.without(asked(6, 0)).basis)
    assert not torch.equal(changed.without(asked(0, 1)).offset, letters.without(asked(0, 1)).offset)


def test_points_of_the_other_questions_bring_answers_that_luck_does_not(asking, tiny_tokenizer, letters):
    config = SamplingConfig(letters, n_points=20, n_questions=4, strength=2.0, max_new_tokens=3)
    result = sampling(asking, tiny_tokenizer, FORGET, config)
    assert (result.name, result.n, result.score, result.baseline) == ("sampling", 4, 1.0, 0.0)
    assert result.low == pytest.approx(0.510, abs=1e-3), "Wilson's, 4 of 4"
    details = result.details
    assert details["unsteered"] == 0.0 and details["gain"] == 1.0
    assert 0.05 < details["mean_steered"] < 0.6 and details["mean_isotropic"] == 0.0
    assert [record["id"] for record in details["questions"]] == ["q0", "q1", "q2", "q3"]
    json.dumps(details, allow_nan=False)
    assert (
        sampling(asking, tiny_tokenizer, FORGET, replace(config, batch_tokens=100)).details["questions"]
        == (details["questions"])
    )
    # The positive control of the scoring: a question that is answered unpushed.
    whole = sampling(asking, tiny_tokenizer, FORGET, replace(config, n_questions=None, strength=0.0))
    assert whole.n == 10 and whole.score == whole.baseline == whole.details["unsteered"] == 0.4


def test_the_forget_sets_strength_is_what_the_knowledge_can_stand(asking, tiny_tokenizer, letters, tmp_path):
    options = {"layer": 2, "rank": 1, "max_new_tokens": 3}
    harmless = forget_set_geometry(asking, tiny_tokenizer, FORGET, strengths=(1e-3, 1e-2), **options)
    assert harmless.strength == 1e-2, "the largest that it stands"
    unanswered = ForgetSet("none", tuple(replace(pair, answer="ship") for pair in FORGET.split("forget")))
    assert forget_set_geometry(asking, tiny_tokenizer, unanswered, strengths=(2.0, 1.0), **options).strength == 1.0
    letters.save(tmp_path / "letters.safetensors")
    back = ForgetSetGeometry.load(tmp_path / "letters.safetensors")
    assert torch.equal(back.states, letters.states)
    assert replace(back, states=None).__dict__ == replace(letters, states=None).__dict__


def test_without_a_geometry_it_says_how_to_get_one(planted, tiny_tokenizer):
    with pytest.raises(ValueError, match=r"`config` of sampling.*reference.*concept_geometry\(.*forget_set_geometry\("):
        sampling(planted, tiny_tokenizer, NONE)


def test_bad_settings_say_what_was_expected(people, small, letters):
    own = concept("people")
    for build, message in (
        (lambda: SamplingConfig(people), "must be a ForgetSetGeometry without a `concept`, got ConceptGeometry"),
        (lambda: SamplingConfig(letters, own), "must be a ConceptGeometry with a `concept`, got ForgetSetGeometry"),
        (lambda: SamplingConfig(None, own), "must be a ConceptGeometry with a `concept`, got NoneType"),
        (lambda: SamplingConfig(letters, control=small), "`control` of SamplingConfig"),
        (
            lambda: SamplingConfig(people, own, n_points=1),
            "`n_points` of SamplingConfig must be a whole number of at least 2, got 1",
        ),
        (lambda: SamplingConfig(people, own, max_new_tokens=0), "`max_new_tokens` of SamplingConfig must"),
        (lambda: SamplingConfig(people, own, prompts="one"), "must be a list of at least one text"),
        (lambda: SamplingConfig(people, own, prompts=()), "must be a list of at least one text"),
        (lambda: SamplingConfig(letters, prompts=("one",)), "are for a `concept`"),
        (lambda: SamplingConfig(people, own, n_questions=5), "is for a forget set"),
    ):
        with pytest.raises(ValueError, match=message):
            build()


def test_what_cannot_be_attacked_is_found_before_any_work(planted, tiny_tokenizer, tiny_llama, people, letters):
    config = SamplingConfig.quick(people, concept("people"))
    with pytest.raises(ValueError, match="`geometry` of SamplingConfig was read from .* width 256, the model has 32"):
        sampling(tiny_llama(), tiny_tokenizer, NONE, config)
    encoder = BertModel(BertConfig(vocab_size=len(tiny_tokenizer), hidden_size=WIDTH, num_hidden_layers=2,
                                   num_attention_heads=4, intermediate_size=16))  # fmt: skip
    with pytest.raises(ValueError, match="no head"):
        sampling(encoder, tiny_tokenizer, NONE, config)
    with pytest.raises(ValueError, match="`layer` must be a hidden state that a block reads"):
        sampling(planted, tiny_tokenizer, NONE, replace(config, geometry=replace(people, layer=4)))
    with pytest.raises(ValueError, match="`geometry` of SamplingConfig was read from a model of 9 blocks, .* has 4"):
        sampling(planted, tiny_tokenizer, NONE, replace(config, geometry=replace(people, n_layers=9)))
    with pytest.raises(ValueError, match="`control` of SamplingConfig was read from a model of 3 blocks"):
        sampling(planted, tiny_tokenizer, NONE, replace(config, control=replace(people, n_layers=3)))
    with pytest.raises(ValueError, match="'nothing asked' must have at least 4 forget pairs .* got 0"):
        sampling(planted, tiny_tokenizer, NONE, SamplingConfig(letters))
    with pytest.raises(ValueError, match="must have at least 4 forget pairs"):
        forget_set_geometry(planted, tiny_tokenizer, NONE)
    for options, message in (
        ({"method": "ica"}, "`method` must be one of diff_mean_pairs, .*, got 'ica'"),
        ({"rank": 0}, "`rank` must be a whole number of at least 1, got 0"),
        ({"rank": "8"}, "`rank` must be a whole number of at least 1, got '8'"),
        ({"decay": 2}, r"`decay` must be in \[0, 1\], got 2"),
        ({"concept": "days"}, "`concept` must be a ConceptSet, as .*, got 'days'"),
        ({"strengths": ()}, "`strengths` must hold at least one positive"),
        ({"strengths": (1.0, -1.0)}, "`strengths` must hold at least one positive"),
        ({"layer": 1.0}, "a hidden state that a block reads"),
    ):
        with pytest.raises(ValueError, match=message):
            concept_geometry(planted, tiny_tokenizer, **{"concept": concept("people"), **options})


def test_a_reference_that_has_diverged_has_no_geometry(planted, tiny_tokenizer):
    broken = AutoModelForCausalLM.from_config(planted.config)
    with torch.no_grad():
        broken.model.embed_tokens.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite, so they have no geometry"):
        concept_geometry(broken, tiny_tokenizer, concept("people"), layer=2)
