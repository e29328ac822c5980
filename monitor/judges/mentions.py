"""Finding a concept's entities in a text by word lists."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from monitor.geometry.diversity import OTHER
from monitor.stimuli.concepts import ConceptSet

# Names that are another word in lower case ("china" is porcelain), and the other way round.
_NAMES = frozenset("china turkey chad jordan guinea jersey polish march may august mon wed sat sun us".split())
_WORDS = frozenset(("china", "turkey"))
# Of a concept of years every year is a value, listed or not.
_YEAR = re.compile(r"(?<!\w)(?<!\d[.,])(?:1[5-9]|20)\d\d(?![.,]\d)(?!'s)(?!\w)")


@dataclass(frozen=True)
class Mention:
    """An entity in a text, ``text[start:end]``."""

    entity: str
    category: str
    start: int
    end: int


class MentionFinder:
    """Finds the entities of one concept.

    Parameters
    ----------
    concept : ConceptSet

    Attributes
    ----------
    names_others : bool
        Whether it finds what the concept does not list.

    Notes
    -----
    A mention is one of the entity's `forms` or its regular English plural, as whole words. Case makes no difference,
    but for forms that are another word in the other case (``"China"``, ``"US"``), which must have their own. Words of a
    form may be joined by white space or a hyphen. A genitive is a mention ("the lion's mane"); a decade is none of its
    first year ("the 1990s", "the 1990's"), nor is a number of which the year is a part ("1,990"). Of overlapping
    mentions the longest counts, "sea star" and not "star"; of equally long ones the first. Irregular plurals and
    synonyms must be among the forms. What two entities have in common by inflection is a mention of the one that lists
    it, else of the first.

    Word lists know no others than the listed, but for years: where all entities are numbers of four digits, any from
    1500 to 2099 is a mention, of the category ``"other"`` if it is not listed.
    """

    def __init__(self, concept: ConceptSet) -> None:
        owners: dict[str, tuple[str, str]] = {}
        known: set[str] = set()
        for inflect in (lambda form: (form,), plurals):  # forms as they are listed come first
            for entity in concept.entities:
                for form in entity.forms:
                    for variant in inflect(plain(form)):
                        if variant.casefold() not in known:
                            known.add(variant.casefold())
                            owners[variant] = (entity.name, entity.category)
        self.names_others = all(re.fullmatch(r"\d{4}", entity.name) for entity in concept.entities)
        self._patterns = [(_pattern(form), entity, category) for form, (entity, category) in owners.items()]

    def find(self, text: str) -> list[Mention]:
        """All mentions in the text's order; positions are those in ``plain(text)``."""
        text = plain(text)
        found = [
            Mention(entity, category, match.start(), match.end())
            for pattern, entity, category in self._patterns
            for match in pattern.finditer(text)
        ]
        if self.names_others:
            # After the listed ones: of equally long mentions the first counts.
            found += [Mention(year.group(), OTHER, year.start(), year.end()) for year in _YEAR.finditer(text)]
        taken: list[Mention] = []
        for mention in sorted(found, key=lambda m: (m.start - m.end, m.start)):
            if all(mention.end <= other.start or other.end <= mention.start for other in taken):
                taken.append(mention)
        return sorted(taken, key=lambda m: m.start)


def named(mentions: list[Mention]) -> tuple[tuple[str, str], ...]:
    """(entity, category) of each entity once, in the order of first mention: however often a text says it."""
    return tuple(dict.fromkeys((mention.entity, mention.category) for mention in mentions))


def plain(text: str) -> str:
    """The text in Unicode NFC, with straight apostrophes."""
    return unicodedata.normalize("NFC", text).replace("\u2019", "'")


def plurals(form: str) -> tuple[str, ...]:
    """The form with its last word in the regular English plural; several where spelling leaves a choice, or none.

    -s; -es after s, x, z, ch, sh; both after o; -ies for a consonant and y, and -ys for names ("both Germanys"); -ves
    and -fs for f and fe.
    """
    end = form[-2:].casefold()
    if not form[-1:].isalpha():
        return ()
    if end[-1] in "sxz" or end in ("ch", "sh"):
        return (f"{form}es",)
    if end[-1] == "o":
        return f"{form}s", f"{form}es"
    if end[-1] == "y" and end[0] not in "aeiou":
        return f"{form[:-1]}ies", f"{form}s"
    if end[-1] == "f":
        return f"{form[:-1]}ves", f"{form}s"
    if end == "fe":
        return f"{form[:-2]}ves", f"{form}s"
    return (f"{form}s",)


def _pattern(form: str) -> re.Pattern[str]:
    before, after = r"(?<!\w)", r"(?!\w)"
    if form[0].isdigit():
        before += r"(?<!\d[.,])"
    if form[-1].isdigit():
        after += r"(?![.,]\d)(?!'s)"
    written = r"[\s-]+".join(re.escape(word) for word in form.split())
    letters = [letter for letter in form if letter.isalpha()]
    acronym = len(letters) > 1 and all(letter.isupper() for letter in letters)
    if acronym:
        return re.compile(f"{before}{written}{after}")
    word = form.casefold()
    if {word, word.removesuffix("s")} & (_NAMES if form[0].isupper() else _WORDS):
        # Only the first letter tells: "CHINA" is China.
        return re.compile(f"{before}{re.escape(form[0])}(?i:{written[len(re.escape(form[0])) :]}){after}")
    return re.compile(f"{before}{written}{after}", re.IGNORECASE)
