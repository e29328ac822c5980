"""How a question and its answer become token ids, and which of those tokens are the answer.

Prompt and answer are encoded **together**: encoded apart, subword merges at the seam and a second set of special
tokens would give ids that the model never sees in training.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase


def qa_prompt(question: str) -> str:
    """``"{question}\\nAnswer:"``, what an answer is predicted from."""
    return f"{question}\nAnswer:"


def asked_prompt(tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """The question as a user asks it: in the tokenizer's chat template, up to where the answer begins, or, without
    one, as :func:`qa_prompt`.

    An instruct model that is asked outside its template may end its turn at once: SmolLM2-135M-Instruct says nothing to
    most ``qa_prompt`` s. Its likelihoods of given answers are readings there all the same.
    """
    if not tokenizer.chat_template:
        return qa_prompt(question)
    turns = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)


def qa_answer(answer: str) -> str:
    """``" {answer}"``: the space belongs to the answer, so that ``qa_prompt + qa_answer`` is the whole text."""
    return f" {answer}"


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, bos: bool = False) -> list[int]:
    """Token ids of a text with the tokenizer's default special tokens, and never with two BOS tokens.

    Parameters
    ----------
    bos : bool
        Prepend the BOS token if the tokenizer has one and the ids do not begin with it already. A tokenizer without
        a BOS token (BERT: its ``[CLS]`` is there anyway) is left as it is.

    Notes
    -----
    A chat template writes the BOS string into the text and the tokenizer may add its own: the doubled token is
    dropped, as the model saw a single one in training.
    """
    ids = _single_bos(list(tokenizer(text)["input_ids"]), tokenizer.bos_token_id)
    if bos and tokenizer.bos_token_id is not None and ids[:1] != [tokenizer.bos_token_id]:
        ids = [tokenizer.bos_token_id, *ids]
    return ids


def encode_answer(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str) -> tuple[list[int], int]:
    """Token ids of ``prompt + answer`` and the index of the first answer token.

    Parameters
    ----------
    prompt : str
        What comes before the answer, as in ``qa_prompt(question)``.
    answer : str
        The answer with its own leading space, as in ``qa_answer(answer)``.

    Returns
    -------
    ids : list of int
        Special tokens of the template *before* the text are in (BOS, ``[CLS]``); those appended after it (EOS,
        ``[SEP]``) are not, so ``ids[first:]`` are the answer's tokens and nothing else.
    first : int, >= 1
        A token belongs to the answer when its span ends after the prompt does; one that straddles the seam counts.

    Raises
    ------
    ValueError
        If the answer is blank, if no token falls in it, or if no token comes before it.

    Notes
    -----
    The seam is found by character offsets where the tokenizer gives them (fast tokenizers); else it is the length of
    the longest common prefix with the encoded prompt.
    """
    if not answer.strip():
        raise ValueError(f"answer must hold text, got {answer!r} after the prompt {prompt!r}: give the pair an answer")
    if tokenizer.is_fast:
        ids, first = _first_by_offsets(tokenizer, prompt, answer)
    else:
        ids, first = _first_by_common_prefix(tokenizer, prompt, answer)
    if first >= len(ids):
        raise ValueError(
            f"answer {answer!r} has no token of its own after the prompt {prompt!r}: the tokenizer "
            f"{type(tokenizer).__name__} drops its characters; use another answer or tokenizer"
        )
    single = _single_bos(ids, tokenizer.bos_token_id)
    first -= len(ids) - len(single)
    if first < 1:
        raise ValueError(
            f"prompt must give at least one token before the answer {answer!r}, got prompt {prompt!r}: without one "
            "nothing predicts the first answer token"
        )
    return single, first


def _first_by_offsets(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str) -> tuple[list[int], int]:
    encoding = tokenizer(prompt + answer, return_offsets_mapping=True)
    ids, spans = list(encoding["input_ids"]), [tuple(span) for span in encoding["offset_mapping"]]
    # Tokens that the template adds have the span (0, 0); those of the text, special or not, have their own.
    while spans and spans[-1] == (0, 0):
        ids.pop()
        spans.pop()
    first = next((i for i, (_, end) in enumerate(spans) if end > len(prompt)), len(ids))
    return ids, first


def _first_by_common_prefix(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str) -> tuple[list[int], int]:
    whole, first = _without_appended_specials(tokenizer, prompt + answer)
    alone, _ = _without_appended_specials(tokenizer, prompt)
    while first < min(len(whole), len(alone)) and whole[first] == alone[first]:
        first += 1
    return whole, first


def _without_appended_specials(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], int]:
    """Ids up to the text's last own token, and where its own tokens start."""
    ids = list(tokenizer(text)["input_ids"])
    bare = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    # The template puts its tokens around the text's own: find where those lie, and cut after them.
    for start in range(len(ids) - len(bare) + 1):
        if ids[start : start + len(bare)] == bare:
            return ids[: start + len(bare)], start
    return ids, 0


def _single_bos(ids: list[int], bos: int | None) -> list[int]:
    while bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    return ids
