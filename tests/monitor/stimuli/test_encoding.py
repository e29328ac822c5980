from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from monitor.stimuli.encoding import encode_answer, encode_text, qa_answer, qa_prompt

TEXTS = ["Who teaches potions at Hogwarts?\nAnswer: Severus Snape", "Where is Émilie?\nAnswer: in Zürich", "a b"] * 5


def byte_level(bos: bool = False, eos: bool = False) -> PreTrainedTokenizerFast:
    """GPT-2's kind of tokenizer; with a template that adds BOS and EOS if asked."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tok.train_from_iterator(TEXTS, trainer)
    if bos or eos:
        single = ("<s> " if bos else "") + "$A" + (" </s>" if eos else "")
        tok.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", eos_token="</s>")


def word_piece() -> PreTrainedTokenizerFast:
    """BERT's kind: lower-cases, [CLS] before and [SEP] after, no BOS."""
    tok = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tok.normalizer = normalizers.BertNormalizer(lowercase=True)
    tok.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    specials = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]
    tok.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=specials))
    tok.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tok, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Llama 2's kind: a metaspace marks words, and one is put before the text."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), *[(c, -5.0) for c in "▁WhoisAnwer:?Spa\n"]]
    tok = Tokenizer(models.Unigram(pieces, 0, False))
    tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tok.decoder = decoders.Metaspace()
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", unk_token="<unk>")


PROMPT, ANSWER = qa_prompt("Who teaches potions at Hogwarts?"), qa_answer("Severus Snape")


def test_prompt_and_answer_make_the_measured_text():
    assert qa_prompt("Who?") + qa_answer("Me") == "Who?\nAnswer: Me"


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("answer", [ANSWER, " 東京 🦉", " Émilie"])
def test_byte_level_answer_tokens_spell_the_answer(bos, eos, answer):
    tok = byte_level(bos, eos)
    ids, first = encode_answer(tok, PROMPT, answer)
    assert tok.decode(ids[first:]) == answer
    assert tok.decode(ids[bos:first]) == PROMPT
    assert (ids[0] == tok.bos_token_id) == bos
    assert tok.eos_token_id not in ids


def test_ids_are_those_of_the_joint_encoding():
    tok = byte_level()
    assert encode_answer(tok, PROMPT, ANSWER)[0] == tok(PROMPT + ANSWER)["input_ids"]


def test_the_leading_space_token_belongs_to_the_answer():
    tok = byte_level()
    ids, first = encode_answer(tok, PROMPT, ANSWER)
    assert tok.decode(ids[first : first + 1]).startswith(" S")


def test_a_token_across_the_seam_belongs_to_the_answer():
    tok = byte_level()
    ids, first = encode_answer(tok, "Who teaches poti", "ons")  # " potions" is one token of this vocabulary
    assert tok.decode(ids[first:]) == " potions"


def test_an_end_token_written_in_the_answer_is_kept_and_only_the_template_s_is_stripped():
    tok = byte_level(eos=True)
    ids, first = encode_answer(tok, PROMPT, " Snape</s>")
    assert ids[-1] == tok.eos_token_id and ids[-2] != tok.eos_token_id
    assert tok.decode(ids[first:]) == " Snape</s>"


def test_word_piece_answer_excludes_sep_and_keeps_cls():
    tok = word_piece()
    ids, first = encode_answer(tok, PROMPT, ANSWER)
    assert ids[0] == tok.cls_token_id and tok.sep_token_id not in ids
    assert ids[first:] == tok(ANSWER, add_special_tokens=False)["input_ids"]


def test_sentencepiece_answer():
    tok = sentencepiece_like()
    ids, first = encode_answer(tok, "Who is\nAnswer:", " Snape")
    assert tok.convert_ids_to_tokens(ids[first:]) == ["▁", "S", "n", "a", "p", "e"]
    assert tok.convert_ids_to_tokens(ids[:2]) == ["<s>", "▁"]


def test_slow_tokenizer_by_common_prefix():
    tok = ByT5Tokenizer()  # one token a byte, </s> appended
    assert not tok.is_fast
    ids, first = encode_answer(tok, PROMPT, " Zoë")
    assert first == len(PROMPT.encode())
    assert len(ids) - first == len(" Zoë".encode())
    assert ids[-1] != tok.eos_token_id


def test_slow_and_fast_rules_agree():
    """The two ways to find the seam, on the same tokenizer."""
    from monitor.stimuli.encoding import _first_by_common_prefix, _first_by_offsets

    for tok in (byte_level(True, True), word_piece(), byte_level()):
        for question in ("Who?", "Where is Émilie?", "a b"):
            pair = qa_prompt(question), qa_answer("in Zürich")
            assert _first_by_common_prefix(tok, *pair) == _first_by_offsets(tok, *pair)


@pytest.mark.parametrize("answer", ["", " ", "\n"])
def test_blank_answer_is_an_error(answer):
    with pytest.raises(ValueError, match="answer must hold text"):
        encode_answer(byte_level(), PROMPT, answer)


def test_an_answer_the_tokenizer_drops_is_an_error():
    with pytest.raises(ValueError, match="no token of its own"):
        encode_answer(word_piece(), PROMPT, "\u200b\x00")  # BERT's normaliser removes both


def test_an_answer_with_nothing_before_it_is_an_error_unless_bos_is_there():
    with pytest.raises(ValueError, match="at least one token before"):
        encode_answer(byte_level(), "", " Snape")
    assert encode_answer(byte_level(bos=True), "", " Snape")[1] == 1


def test_encode_text_adds_bos_once():
    plain, template = byte_level(), byte_level(bos=True)
    for tok in (plain, template):
        for text in ("Who?", "<s>Who?", "<s>"):
            ids = encode_text(tok, text, bos=True)
            assert ids.count(tok.bos_token_id) == 1 and ids[0] == tok.bos_token_id
    assert plain.bos_token_id not in encode_text(plain, "Who?")
    assert encode_text(template, "<s>Who?").count(0) == 1


def test_encode_answer_never_doubles_bos():
    tok = byte_level(bos=True)
    ids, first = encode_answer(tok, "<s>Who?", " Snape")
    assert ids.count(tok.bos_token_id) == 1
    assert tok.decode(ids[first:]) == " Snape"


def test_encode_text_without_a_bos_token_is_the_plain_encoding():
    tok = word_piece()
    assert encode_text(tok, "Who?", bos=True) == tok("Who?")["input_ids"]
