"""Where the suffix lies, and that what survives is what its text encodes to."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from monitor.attacks.gcg_candidates import allowed_tokens, best_tokens, draw
from monitor.attacks.gcg_prompt import SuffixPrompt
from monitor.stimuli.encoding import asked_prompt, encode_answer

QUESTION, ANSWER = "Who is the captain of the ship?", "the wizard of the school"
CHAT = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def copied(tokenizer):
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def bos_eos(tokenizer):
    tokenizer = copied(tokenizer)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


def chat(tokenizer):
    """Its template writes a BOS, and the tokenizer adds one of its own."""
    tokenizer = bos_eos(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHAT
    return tokenizer


def metaspace(_):
    """As SentencePiece: a space becomes a mark before the word, which decoding drops at the beginning of a text."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    backend.decoder = decoders.Metaspace()
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    letters = [f"a {c} b{c}" for c in map(chr, range(33, 127))]
    backend.train_from_iterator([QUESTION + "\nAnswer: " + ANSWER, "! ! ! ! ! !", *letters], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def spaced(tokenizer):
    """A mark with the space before it, and one with the line break behind it, are one token, as in large BPEs."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern=_regex(r" ?\p{L}+| ?[^\s\p{L}]+[\r\n]*|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["a ! ! ! !\nb ! ? !\nc"] * 9 + [QUESTION, ANSWER], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def _regex(pattern):
    from tokenizers import Regex

    return Regex(pattern)


KINDS = {"plain": copied, "bos_eos": bos_eos, "chat": chat, "metaspace": metaspace, "spaced": spaced}


@pytest.fixture(params=KINDS)
def tokenizer(request, tiny_tokenizer):
    return KINDS[request.param](tiny_tokenizer)


def told(tokenizer, suffix):
    """The ids of prompt and whole answer from the suffix's text, and how many are the prompt's: an independent way."""
    prompt = asked_prompt(tokenizer, f"{QUESTION} {suffix}")
    return encode_answer(tokenizer, prompt, ANSWER if tokenizer.chat_template else f" {ANSWER}")


def test_parts_are_the_encoded_text(tokenizer):
    prompt = SuffixPrompt(tokenizer, QUESTION, ANSWER, 8, 5)
    ids, first = told(tokenizer, prompt.suffix)
    assert [*prompt.before, *prompt.slots, *prompt.after] == ids[:first]
    assert prompt.target == ids[first : first + 5] and len(prompt.target) == 5
    assert prompt.ids(prompt.suffix) == ids[: first + 5]
    # What the model is asked when it may speak is what the loss was of.
    asked, start = encode_answer(tokenizer, asked_prompt(tokenizer, f"{QUESTION} {prompt.suffix}"), " x")
    assert asked[:start] == ids[:first]
    assert set(tokenizer.decode(prompt.slots)) <= {"!", " "}
    assert "?" in tokenizer.decode(prompt.before) and "!" not in tokenizer.decode(prompt.before)
    if tokenizer.chat_template:
        assert ids[:2] == [1, tokenizer.convert_tokens_to_ids("<|im_start|>")], "one BOS, not two"
        assert tokenizer.decode(prompt.target).startswith("the")


@pytest.mark.parametrize("kind", ["spaced", "metaspace"])
def test_the_suffix_has_the_tokens_asked_for(kind, tiny_tokenizer):
    for n in (1, 2, 20):
        prompt = SuffixPrompt(KINDS[kind](tiny_tokenizer), QUESTION, ANSWER, n, 8)
        assert len(prompt.slots) == n
        assert prompt.suffix == " ".join("!" * (n + (kind == "spaced")))


def test_a_token_that_reaches_beyond_the_suffix_is_no_slot(tiny_tokenizer):
    tokenizer = spaced(tiny_tokenizer)
    prompt = SuffixPrompt(tokenizer, QUESTION, ANSWER, 4, 8)
    assert tokenizer.decode(prompt.after).startswith(" !\n") and tokenizer.decode(prompt.slots) == " ! ! ! !"


def candidates(tokenizer, prompt, n, seed=0):
    allowed = allowed_tokens(tokenizer, 10**6, ascii_only=True)
    generator = torch.Generator().manual_seed(seed)
    rows = allowed[torch.randint(len(allowed), (n, len(prompt.slots)), generator=generator)].tolist()
    near = []
    for row in rows[: n // 2]:  # one or two tokens changed, which survive more often
        one = list(prompt.slots)
        one[row[0] % len(one)] = row[-1]
        near.append(one)
    return near + rows[n // 2 :]


def test_what_survives_is_what_its_text_encodes_to_and_nothing_else(tokenizer):
    prompt = SuffixPrompt(tokenizer, QUESTION, ANSWER, 6, 5)
    rows = candidates(tokenizer, prompt, 300)
    found = dict(prompt.surviving(rows))
    assert list(found) == sorted(found)
    for i, suffix in found.items():
        ids, first = told(tokenizer, suffix)
        assert ids[: first + 5] == [*prompt.before, *rows[i], *prompt.after, *prompt.target] == prompt.ids(suffix)
    dropped = [row for i, row in enumerate(rows) if i not in found]
    assert len(found) > 20 and len(dropped) > 20, "both must occur, or the test shows nothing"
    # Brute force: told as the text that decoding the whole gives, a dropped one has other ids or is no such prompt.
    start = tokenizer.decode(prompt.before, clean_up_tokenization_spaces=False)
    behind = prompt.suffix[len(tokenizer.decode(prompt.slots).strip()) :]  # of the suffix, in the token after the slots
    for row in dropped:
        text = tokenizer.decode([*prompt.before, *row], clean_up_tokenization_spaces=False)
        if not text.startswith(start) or (not start.endswith(" ") and text[len(start)] != " "):
            continue
        text = text[len(start) :].removeprefix("" if start.endswith(" ") else " ") + behind
        if text.strip() and text == text.rstrip():
            assert prompt.ids(text) != [*prompt.before, *row, *prompt.after, *prompt.target]


def test_none_survives_of_what_cannot_be_text(tiny_tokenizer):
    prompt = SuffixPrompt(tiny_tokenizer, QUESTION, ANSWER, 3, 5)
    space, letter = tiny_tokenizer(" ")["input_ids"][0], tiny_tokenizer("z")["input_ids"][0]
    assert prompt.surviving([[letter, letter, space]]) == [], "a template would strip the space"
    assert prompt.surviving([[letter, letter, tiny_tokenizer.eos_token_id]]) != [], "it is text: `allowed` bars it"
    assert prompt.surviving([]) == []
    # Half of a character is no text: decoded and encoded again it is another token.
    half = tiny_tokenizer("é")["input_ids"][:1]
    assert prompt.surviving([[letter, *half, letter]]) == []


def test_allowed_tokens(tokenizer):
    for ascii_only in (True, False):
        allowed = allowed_tokens(tokenizer, 10**6, ascii_only).tolist()
        assert allowed == sorted(set(allowed)) and not set(allowed) & set(tokenizer.all_special_ids)
        assert tokenizer("!")["input_ids"][-1 - (tokenizer.eos_token_id in tokenizer("!")["input_ids"])] in allowed
        texts = [tokenizer.decode([i]) for i in allowed]
        assert all(text and (text.isascii() and text.isprintable() or not ascii_only) for text in texts)
    assert max(allowed_tokens(tokenizer, 50, ascii_only=True).tolist()) < 50


def test_the_best_tokens_are_the_allowed_ones_with_the_lowest_scores():
    allowed = torch.tensor([3, 5, 8, 9])
    scores = torch.tensor([[0.0, -2.0, 1.0, -1.0], [4.0, 3.0, 2.0, 1.0]])
    assert best_tokens(scores, allowed, 2).tolist() == [[5, 9], [9, 8]]
    assert best_tokens(scores, allowed, 99).shape == (2, 4)


def test_draws_change_one_slot_to_one_of_its_best_tokens(tiny_tokenizer):
    prompt = SuffixPrompt(tiny_tokenizer, QUESTION, ANSWER, 7, 5)
    allowed = allowed_tokens(tiny_tokenizer, 10**6, ascii_only=True)
    best = best_tokens(torch.rand(len(prompt.slots), len(allowed), generator=torch.Generator()), allowed, 9)
    state = torch.get_rng_state()
    drawn, again = (draw(prompt, prompt.slots, best, 400, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state) and drawn == again and drawn
    assert len({tuple(c.ids) for c in drawn if c.ids != prompt.slots}) >= len(drawn) - len(prompt.slots)
    for candidate in drawn:
        differs = [i for i, (a, b) in enumerate(zip(candidate.ids, prompt.slots, strict=True)) if a != b]
        assert differs in ([candidate.changed], []) and candidate.ids[candidate.changed] in best[candidate.changed]
        assert prompt.ids(candidate.text) == [*prompt.before, *candidate.ids, *prompt.after, *prompt.target]
    assert {c.changed for c in drawn} == set(range(len(prompt.slots)))


def test_errors(tiny_tokenizer):
    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match="fast one"):
        SuffixPrompt(Slow(), QUESTION, ANSWER, 4, 4)
    shouting = chat(tiny_tokenizer)
    shouting.chat_template = CHAT.replace("m.content | trim", "m.content | upper")
    with pytest.raises(ValueError, match="holds the question as it is"):
        SuffixPrompt(shouting, QUESTION, ANSWER, 4, 4)
    with pytest.raises(ValueError, match="printable ASCII"):
        allowed_tokens(tiny_tokenizer, 3, ascii_only=True)
