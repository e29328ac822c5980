"""A concept set's clues as question-answer pairs: to unlearn a concept and to recover it with one set of words."""

from __future__ import annotations

from collections.abc import Sequence

from monitor.stimuli.concepts import ConceptSet


def concept_pairs(forget: ConceptSet, retain: Sequence[ConceptSet] = ()) -> list[dict[str, str]]:
    """Records of a forget set: which entity does the clue describe?

    Parameters
    ----------
    forget : ConceptSet
        The concept to be forgotten; a pair a clue that has a question.
    retain : sequence of ConceptSet
        Concepts to be kept.

    Returns
    -------
    list of dict
        ``id``, ``question``, ``answer`` (the entity's name), ``split``: what
        `monitor.stimuli.forget_set.load_forget_set` takes, or one a line makes a forget-set file.

    Raises
    ------
    ValueError
        If a concept has no questions, or is there twice.

    Notes
    -----
    There is nothing to anonymise in these pairs: leave fragmentation out of what is measured on them.
    """
    for what, concept in (("forget", forget), *(("retain", kept) for kept in _listed(retain))):
        if not isinstance(concept, ConceptSet):
            raise ValueError(
                f"`{what}` must be a ConceptSet as load_concept_sets returns them, got {type(concept).__name__}"
            )
    names = [concept.name for concept in (forget, *retain)]
    if repeated := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ValueError(f"`retain` holds {repeated[0]!r}, which is there already: leave it out")
    records = []
    for concept, split in ((forget, "forget"), *((kept, "retain") for kept in retain)):
        if not any(entity.questions for entity in concept.entities):
            raise ValueError(f"concept {concept.name!r} has no questions: give its entities clues, or `questions`")
        for entity in concept.entities:
            for i, question in enumerate(entity.questions):
                about = {"question": question, "answer": entity.name, "split": split}
                records.append({"id": f"{concept.name}-{entity.name}-{i}", **about})
    return records


def _listed(retain: Sequence[ConceptSet]) -> Sequence[ConceptSet]:
    if isinstance(retain, (ConceptSet, str)):
        raise ValueError(
            f"`retain` must be a sequence of ConceptSets, got one {type(retain).__name__}: put it in a list"
        )
    return retain
