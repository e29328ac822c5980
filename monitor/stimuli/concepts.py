"""Concepts of many values: entities, and contexts that end just before an entity would be named."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

CONCEPTS = ("animals", "countries", "vehicles", "plants", "days", "years")
CONTROL = "random"


@dataclass(frozen=True)
class Context:
    """A text that a language model would go on from with one entity.

    Parameters
    ----------
    text : str
        Ends just before the entity, without trailing white space.
    clue : int, >= 0
        Number of the clue, within its entity, that the text was made from. Contexts of one clue share their words: in
        cross-validation they are one group.
    """

    text: str
    clue: int


@dataclass(frozen=True)
class Entity:
    """One value of a concept.

    Parameters
    ----------
    name : str
    category : str
        The entity's own name where the concept has no categories (MAxBench, Section 4.3).
    forms : tuple of str
        Every surface form that counts as a mention, the name first: plurals, synonyms. Case makes no difference.
    contexts : tuple of Context
    questions : tuple of str
        The clues as questions; may be empty.
    """

    name: str
    category: str
    forms: tuple[str, ...]
    contexts: tuple[Context, ...]
    questions: tuple[str, ...] = ()


@dataclass(frozen=True)
class ConceptSet:
    """A concept's entities and their contexts.

    Parameters
    ----------
    name : str
    entities : tuple of Entity
        At least two; in the concept's order if it is ordered.
    ordered : bool
        The entities are steps of a scale (years).
    cyclic : bool
        The first entity comes after the last (days of the week); only where ``ordered``.

    Raises
    ------
    ValueError
        Fewer than two entities; a blank name, form or context; no context; an entity or a form that is there twice; a
        form of two entities; a context of two entities, one that ends in white space, or one that mentions its own
        entity (the model would have to copy, not to know); ``cyclic`` without ``ordered``.

    Notes
    -----
    After MAxBench, Section 4.2; the bundled sets are this project's own.
    """

    name: str
    entities: tuple[Entity, ...]
    ordered: bool = False
    cyclic: bool = False

    def __post_init__(self) -> None:
        if not self.name.strip() or "/" in self.name or not self.name.isprintable():
            raise ValueError(
                f"a concept's name must be printable and without '/', it becomes part of readings' names; got "
                f"{self.name!r}: rename it"
            )
        if len(self.entities) < 2:
            raise ValueError(
                f"concept {self.name!r} must have at least 2 entities, got {len(self.entities)}: one value spans "
                "nothing; add entities"
            )
        if self.cyclic and not self.ordered:
            raise ValueError(f"concept {self.name!r} is `cyclic` but not `ordered`: set `ordered`, or unset `cyclic`")
        owner_of_form: dict[str, str] = {}
        owner_of_text: dict[str, str] = {}
        names: set[str] = set()
        for entity in self.entities:
            if entity.name.casefold() in names:
                raise ValueError(f"entity {entity.name!r} is there twice: put its contexts under one, or rename it")
            names.add(entity.name.casefold())
            _check_entity(entity)
            for owners, what, texts in (
                (owner_of_form, "form", [form.casefold() for form in entity.forms]),
                (owner_of_text, "context", [context.text for context in entity.contexts]),
            ):
                for text in texts:
                    if owners.get(text) == entity.name:
                        raise ValueError(f"entity {entity.name!r} has the {what} {text!r} twice: remove one")
                    if text in owners:
                        raise ValueError(
                            f"the {what} {text!r} belongs to both {owners[text]!r} and {entity.name!r}: it could not "
                            "tell one from the other; remove it from one"
                        )
                    owners[text] = entity.name

    @property
    def categories(self) -> tuple[str, ...]:
        """The categories in the order in which they first occur."""
        return tuple(dict.fromkeys(entity.category for entity in self.entities))

    @property
    def texts(self) -> tuple[str, ...]:
        """All contexts, entity by entity; n of them."""
        return tuple(context.text for entity in self.entities for context in entity.contexts)

    @property
    def labels(self) -> tuple[int, ...]:
        """The index in ``entities`` of each text; n numbers."""
        return tuple(i for i, entity in enumerate(self.entities) for _ in entity.contexts)

    @property
    def clues(self) -> tuple[int, ...]:
        """The clue of each text, numbered over the whole set, in [0, number of clues); n numbers."""
        numbers: dict[tuple[int, int], int] = {}
        for i, entity in enumerate(self.entities):
            for context in entity.contexts:
                numbers.setdefault((i, context.clue), len(numbers))
        return tuple(numbers[i, c.clue] for i, entity in enumerate(self.entities) for c in entity.contexts)


def load_concept_sets(names: Sequence[str | Path] = CONCEPTS) -> dict[str, ConceptSet]:
    """Load concepts by name, in the order given.

    Parameters
    ----------
    names : sequence of str or Path
        Bundled: ``"animals"``, ``"countries"``, ``"vehicles"``, ``"plants"`` (six categories of eight entities),
        ``"days"`` (ordered, cyclic), ``"years"`` (ordered), and ``"random"``, unrelated things as a control. Else a
        JSON Lines file, see `monitor.stimuli.concept_file.read_concept_set`.

    Returns
    -------
    dict of str to ConceptSet
        By the concepts' names.

    Raises
    ------
    FileNotFoundError
        Neither a bundled name nor a file.
    ValueError
        A file with a fault, or two concepts of one name.
    """
    from monitor.stimuli.concept_file import read_concept_set

    if isinstance(names, (str, Path)):
        raise ValueError(f"`names` must be a sequence of names or files, got {str(names)!r}: put it in a list")
    if not isinstance(names, Iterable):
        raise ValueError(f"`names` must be a sequence of names or files, got {names!r}: put it in a list")
    names = list(names)
    if not names:
        raise ValueError("`names` must hold at least one name or file, got none")
    for name in names:
        if not isinstance(name, (str, Path)) or not str(name).strip():
            known = ", ".join((*CONCEPTS, CONTROL))
            raise ValueError(f"`names` must hold names ({known}) or files, got {name!r}: name one, or leave it out")
    folder = Path(str(files("monitor.stimuli").joinpath("concept_data")))
    sets: dict[str, ConceptSet] = {}
    for name in names:
        bundled = name in (*CONCEPTS, CONTROL)
        concept = read_concept_set(folder / f"{name}.jsonl" if bundled else name)
        if concept.name in sets:
            raise ValueError(f"`names` has two concepts named {concept.name!r}: leave one out, or rename its file")
        sets[concept.name] = concept
    return sets


def mentions(text: str, forms: Iterable[str]) -> bool:
    """Whether a text has one of the forms as whole words, whatever the case."""
    either = "|".join(re.escape(form) for form in forms)
    return re.search(rf"(?<!\w)(?:{either})(?!\w)", text, re.IGNORECASE) is not None


def _check_entity(entity: Entity) -> None:
    for what, text in (("name", entity.name), ("category", entity.category), *(("form", f) for f in entity.forms)):
        if not text.strip():
            raise ValueError(f"entity {entity.name!r} has a blank {what}, got {text!r}: write it, or remove it")
        if text != text.strip() or not text.isprintable():
            raise ValueError(
                f"entity {entity.name!r} has a {what} with white space around it or characters that cannot be printed, "
                f"{text!r}: it would not be found in a text; remove them"
            )
        if what != "category" and not any(character.isalnum() for character in text):
            raise ValueError(f"entity {entity.name!r} has a {what} without a letter or digit, {text!r}: write a word")
    if entity.forms[:1] != (entity.name,):
        raise ValueError(
            f"entity {entity.name!r} must have its name as the first of its `forms`, got {list(entity.forms)}"
        )
    if not entity.contexts:
        raise ValueError(f"entity {entity.name!r} has no context: write at least one, better ten, or remove the entity")
    for text in [context.text for context in entity.contexts]:
        if not text.strip():
            raise ValueError(f"entity {entity.name!r} has a blank context, got {text!r}: write it, or remove it")
        if text != text.rstrip():
            raise ValueError(
                f"entity {entity.name!r} has a context that ends in white space, {text!r}: the space belongs to the "
                "entity's first token; remove it"
            )
        if mentions(text, entity.forms):
            raise ValueError(
                f"entity {entity.name!r} is mentioned by its own context {text!r}: a model would copy it instead of "
                "knowing it; write the context without it"
            )
