"""A question with slots for a suffix: its token ids, and which ids the slots may hold so that text alone gives them."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from monitor.stimuli.encoding import asked_prompt, encode_answer


class SuffixPrompt:
    """``"{question} {suffix}"`` as a user asks it, followed by the beginning of an answer.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        A fast one: where the suffix lies among the tokens is read off the characters they cover.
    question, answer : str
    n_slots : int
        Tokens of the suffix. It starts as ``"! ! ... !"``, the longest one that has no more tokens than this.
    n_target : int
        How many of the answer's first tokens are the target.

    Attributes
    ----------
    before, slots, after, target : list of int
        The ids in their order: up to the suffix, the initial suffix, from there to where the answer begins, and the
        answer's first tokens. A token that covers the suffix's end and something behind it belongs to `after`.
    suffix : str
        The initial suffix.

    Raises
    ------
    ValueError
        For a tokenizer that is not fast, a template that does not hold the question as it is, or tokens that do not
        decode to the text they were encoded from.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, question: str, answer: str, n_slots: int, n_target: int
    ) -> None:
        if not tokenizer.is_fast:
            raise ValueError(
                f"`tokenizer` must be a fast one, which says what characters a token covers, got "
                f"{type(tokenizer).__name__}: load it with AutoTokenizer"
            )
        self.tokenizer, self.question, self.answer, self._n_target = tokenizer, question, answer, n_target
        for count in range(n_slots + 1, 0, -1):
            self._lay_out(" ".join("!" * count))
            if 0 < len(self.slots) <= n_slots:
                return
        raise ValueError(
            f"`suffix_tokens` must leave room for a suffix of at least one token of its own, got {n_slots} with the "
            f"tokenizer {type(tokenizer).__name__}: raise it"
        )

    def ids(self, suffix: str) -> list[int]:
        """Ids of question, suffix and target from text alone; ``before + slots + after + target`` of the suffix."""
        ids, first = encode_answer(self.tokenizer, *self._text(suffix))
        return ids[: first + self._n_target]

    def surviving(self, candidates: Sequence[Sequence[int]]) -> list[tuple[int, str]]:
        """Which candidates for the slots come back when their text is encoded, and that text.

        Parameters
        ----------
        candidates : sequence of n lists of int
            Each as long as `slots`.

        Returns
        -------
        list of (index, suffix)
            Indices in ascending order. Ids of the whole prompt, not of the suffix alone, are compared: tokens merge
            across its ends too. Suffixes that end in white space are left out: templates strip it.
        """
        texts, suffixes = [], {}
        for i, piece in enumerate(self._pieces(candidates)):
            if piece is None or not (self._lead + piece).startswith(self._fixed):
                continue
            suffix = (self._lead + piece + self._end)[len(self._fixed) :]
            if suffix and suffix == suffix.rstrip():
                suffixes[i] = suffix
                texts.append(self._lead + piece + self._tail)
        if not texts:
            return []
        found = []
        for (i, suffix), row in zip(suffixes.items(), self.tokenizer(texts)["input_ids"], strict=True):
            expected = [*self.before, *candidates[i], *self.after, *self.target]
            if list(row[self._dropped : self._dropped + len(expected)]) == expected:
                found.append((i, suffix))
        return found

    def _text(self, suffix: str) -> tuple[str, str]:
        """The prompt, and the answer with a space before it unless the prompt ends in one or in a template's mark."""
        prompt = asked_prompt(self.tokenizer, f"{self.question} {suffix}")
        marked = prompt[-1:].isspace() or prompt.endswith(tuple(self.tokenizer.get_added_vocab()))
        return prompt, self.answer if marked else f" {self.answer}"

    def _lay_out(self, suffix: str) -> None:
        self.suffix = suffix
        prompt, answer = self._text(suffix)
        whole = prompt + answer
        asked = f"{self.question} {suffix}"
        at = prompt.rfind(asked)
        if at < 0:
            raise ValueError(
                f"`tokenizer` must have a chat template that holds the question as it is, but {asked[:80]!r} is not "
                "in the prompt it makes: strip the question, or change the template"
            )
        start, stop = at + len(self.question) + 1, at + len(asked)
        ids, first = encode_answer(self.tokenizer, prompt, answer)
        encoding = self.tokenizer(whole, return_offsets_mapping=True)
        raw, spans = list(encoding["input_ids"]), encoding["offset_mapping"]
        # `encode_answer` drops a doubled BOS in front and special tokens behind.
        self._dropped = next(d for d in range(len(raw)) if raw[d : d + len(ids)] == ids)
        spans = [tuple(span) for span in spans[self._dropped :]]
        places = [
            i for i, (a, b) in enumerate(spans[:first]) if start - 1 <= a < b and max(a, start) < b <= stop
        ]  # a space in front may belong to the first
        self.slots = [ids[i] for i in places]
        if not places:
            return
        low, high = places[0], places[-1] + 1
        self.before, self.after, self.target = ids[:low], ids[high:first], ids[first : first + self._n_target]
        # The slots' text starts with what separates it from the question where that is part of the first token.
        (piece,) = self._pieces([self.slots])
        end = spans[high - 1][1]
        if piece is None or not whole[:end].endswith(piece):
            raise ValueError(
                "`tokenizer` must decode tokens to the text they were encoded from, but "
                f"{type(self.tokenizer).__name__} gives {piece!r} for {suffix!r}: suffixes could not be told as text"
            )
        self._lead, self._tail, self._fixed = whole[: end - len(piece)], whole[end:], whole[:start]
        self._end = whole[end:stop]  # characters of the suffix that belong to the token behind it

    def _pieces(self, candidates: Sequence[Sequence[int]]) -> list[str | None]:
        """What the candidates add to the text before them; None where they change it.

        Decoded after the token before them: at the beginning of a text some tokenizers drop a space.
        """
        context = self.before[-1:]
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        anchor = self.tokenizer.decode(context, **options)
        texts = self.tokenizer.batch_decode([[*context, *row] for row in candidates], **options)
        return [text[len(anchor) :] if text.startswith(anchor) else None for text in texts]
