"""How often a set of samples says an answer's words: pure scoring of texts."""

from __future__ import annotations

from collections.abc import Sequence

from monitor.geometry.rouge import words

# Words that a text says whatever it is about. An answer's score may not rest on them.
FUNCTION_WORDS = frozenset(
    "a an the this that these those there here it its he him his she her hers they them their theirs we us our ours "
    "you your yours i me my mine who whom whose which what when where why how is are was were be been being am do does "
    "did done has have had having will would shall should can could may might must and or but nor not no so if then "
    "than as of in on at by to for from with into onto over under about after before between through during out up "
    "down off again also too very just only own same such both each every all any some more most other one".split()
)


def content_words(answer: str, question: str = "") -> tuple[str, ...]:
    """The words by which an answer is recognised, each once, in the answer's order.

    Parameters
    ----------
    answer : str
    question : str
        Its words do not count: a model that only repeats the question would seem to know the answer.

    Returns
    -------
    tuple of str
        Lower-cased words, as `monitor.geometry.rouge.words` cuts them, that are neither function words (English) nor
        single letters nor in the question. Empty where the answer has none: nothing then tells it from another.

    Notes
    -----
    Single letters (initials, the s of a genitive) are said in passing; single digits and single characters of a script
    without letter case count.
    """
    known = set(words(question)) | FUNCTION_WORDS
    return tuple(dict.fromkeys(w for w in words(answer) if w not in known and not (len(w) == 1 and w.upper() != w)))


def word_frequency(samples: Sequence[str], answer_words: Sequence[str]) -> float:
    """Word-frequency score: the largest share of samples that say one and the same word of the answer.

    Parameters
    ----------
    samples : sequence of n str, n >= 1
    answer_words : sequence of str
        As `content_words` returns them, at least one.

    Returns
    -------
    float in [0, 1]
        max over words w of  #{samples that contain w as a whole word} / n.  Higher: the answer is said more often.

    Raises
    ------
    ValueError
        Without samples or words.

    Notes
    -----
    arXiv 2611.05272, App. B.6, after arXiv 2411.02631. A sample counts once for a word however often it says it, so
    that one sample that repeats itself does not make a score. A word cut off by the end of a sample is no whole word.
    """
    if isinstance(samples, str) or not samples:
        raise ValueError(f"`samples` must hold at least one text, got {samples!r}")
    if isinstance(answer_words, str) or not answer_words:
        raise ValueError(f"`answer_words` must hold at least one word, got {answer_words!r}: leave the pair out")
    said = [set(words(sample)) for sample in samples]
    return max(sum(word in sample for sample in said) for word in answer_words) / len(said)
