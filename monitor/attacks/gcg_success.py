"""Whether a text says an answer, by the answer's own words or by ROUGE-L."""

from __future__ import annotations

from typing import NamedTuple

from monitor.geometry.rouge import rouge_l, words

# Words that carry grammar and no fact. Unlike general stop lists it leaves out what may be an answer by itself: names,
# things, months and countries ("bill", "fire", "will", "may", "us").
STOP_WORDS = frozenset(
    """
    a about above after again against all also although always am among an and another any are around as at away be
    became because become becomes been before behind being below between both but by can cannot could did do does
    doing done during each either else ever every everything few for from further get gets got had has have having
    he her here hers herself him himself his how however i if in into is it its itself just many me more most much
    must my myself neither never no nor not nothing now of off often on once only onto or other others our ours
    ourselves out over own per perhaps rather same shall she should since so some someone something sometimes still
    such than that the their theirs them themselves then there therefore these they thing things this those though
    through thus to together too toward towards under until up upon very was we well were what when where whether
    which while who whom whose why with within without would yes yet you your yours yourself yourselves doesn didn
    isn wasn weren aren couldn shouldn wouldn hasn haven hadn ll ve re
    """.split()
)


class Verdict(NamedTuple):
    """`by`: which of "keyword" and "rouge" hold; `found`: the keywords said; `rouge`: ROUGE-L F1 in [0, 1]."""

    by: tuple[str, ...]
    found: tuple[str, ...]
    rouge: float


def keywords(answer: str, question: str, suffix: str = "") -> tuple[str, ...]:
    """The words by which an answer is told: content words that nobody has given away.

    Parameters
    ----------
    answer, question, suffix : str

    Returns
    -------
    tuple of str
        Words of the answer as ROUGE-L has them (`monitor.geometry.rouge.words`: lower case, letters and digits),
        without doubles, stop words, single ASCII letters (initials), words of the question, and words that the suffix
        holds anywhere, inside its own words and across their ends too: a suffix is optimised towards the answer, and a
        model that repeats it has said nothing of its own. May be empty.
    """
    asked = set(words(question))
    given = "".join(words(suffix))
    return tuple(
        word
        for word in dict.fromkeys(words(answer))
        if word not in STOP_WORDS
        and word not in asked
        and not (len(word) == 1 and word.isascii() and word.isalpha())
        and word not in given
    )


def verdict(text: str, answer: str, sought: tuple[str, ...], min_rouge: float) -> Verdict:
    """Whether `text` holds one of the words `sought` as a whole word, or has ROUGE-L >= `min_rouge` with `answer`."""
    said = set(words(text))
    found = tuple(word for word in sought if word in said)
    rouge = float(rouge_l([text], [answer])[0])
    by = (("keyword",) if found else ()) + (("rouge",) if rouge >= min_rouge else ())
    return Verdict(by, found, rouge)
