"""What must hold of a forget set's pairs, and the anonymised variants that they do not bring themselves."""

from __future__ import annotations

import re
from collections import Counter
from numbers import Integral
from string import ascii_uppercase

from monitor.stimuli.anonymise import anonymise, find_entities
from monitor.stimuli.pairs_file import KEYS, SPLITS, PairsFile, Row, closest, nfc


def check_pairs(file: PairsFile, variants: int) -> None:
    """Check every pair, make missing variants (at most `variants`), check those; problems go into `file`."""
    for row in file.rows:
        _check_fields(file, row)
    _check_duplicates(file)
    _fill_variants(file, variants)
    for row in file.rows:
        if row.sound:
            _check_variants(file, row)
    _check_use_of_table(file)
    order = {name: i for i, name in enumerate(file.sources)}
    file.problems.sort(key=lambda problem: (order.get(problem.file, len(order)), problem.line))


def _check_fields(file: PairsFile, row: Row) -> None:
    values = row.values
    for key in values.pop("unknown", []):
        hint = closest(key, KEYS) or "; with `columns` given other keys are left out"
        file.report_row(row, key, f"unknown key, expected {', '.join(KEYS)}{hint}")
    chosen = values.get("choices") is None or _choose(file, row)
    for key in ("question", "answer") if chosen else ("question",):
        if key not in values:
            file.report_row(row, key, f"missing: give the {key}")
        elif not isinstance(values[key], str):
            file.report_row(row, key, f"expected text, got {type(values[key]).__name__} {values[key]!r:.40}")
        elif not _encodable(values[key]):
            file.report_row(row, key, "holds half of a surrogate pair, which is no text; write the character itself")
        elif not any(character.isprintable() and not character.isspace() for character in values[key]):
            file.report_row(row, key, f"empty: give the {key}, or remove the pair")
        else:
            values[key] = nfc(values[key].strip())
    if "split" not in values:
        file.report_row(row, "split", f"missing: give one of {', '.join(SPLITS)}")
    elif values["split"] not in SPLITS:
        hint = closest(values["split"], SPLITS)
        file.report_row(row, "split", f"expected one of {', '.join(SPLITS)}, got {values['split']!r}{hint}")
    if type(values.get("id")) is int:
        values["id"] = str(values["id"])
    if "id" in values and (not isinstance(values["id"], str) or not values["id"].strip()):
        file.report_row(row, "id", f"expected text, not empty, got {values['id']!r:.40}")
    if row.sound and _gives_away(values["question"], values["answer"]):
        file.report_row(row, "answer", f"{values['answer']!r} is given away in the question", "warning")


def _choose(file: PairsFile, row: Row) -> bool:
    """Put the chosen text in the answer's place, where that is a number from 0, a letter from A, or the text itself.

    Returns whether that was possible; if not, it is reported.
    """
    choices, answer = row.values["choices"], row.values.get("answer")
    if not isinstance(choices, list) or not choices or not all(map(_is_text, choices)):
        file.report_row(row, "choices", f"expected a list of texts, none of them empty, got {choices!r:.60}")
        return False
    letters = ascii_uppercase[: len(choices)]
    if isinstance(answer, Integral) and not isinstance(answer, bool):
        if 0 <= answer < len(choices):
            row.values["answer"] = choices[int(answer)]
            return True
    elif answer in choices:
        # Of choices that are letters themselves, in another order, an answer "A" could be either.
        if not _is_letter(answer, letters) or choices[letters.index(answer)] == answer:
            return True
        file.report_row(row, "answer", f"{answer!r} is one of the choices and the letter of another: give its number")
        return False
    elif _is_letter(answer, letters):
        row.values["answer"] = choices[letters.index(answer)]
        return True
    wanted = f"a number from 0 to {len(choices) - 1}, a letter from A to {letters[-1]}, or one of the choices"
    file.report_row(row, "answer", f"expected {wanted}, got {answer!r:.40}")
    return False


def _is_letter(answer: object, letters: str) -> bool:
    return isinstance(answer, str) and len(answer) == 1 and answer in letters


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _check_duplicates(file: PairsFile) -> None:
    ids: dict[str, Row] = {}
    questions: dict[tuple[str, ...], Row] = {}
    for row in file.rows:
        if not row.sound:
            continue
        values = row.values
        if "id" in values:
            first = ids.setdefault(values["id"], row)
            if first is not row:
                file.report_row(row, "id", f"duplicate: {values['id']!r} is the id of {first.where(row)} too")
        first = questions.setdefault(_asked(values), row)
        if first is row:
            continue
        if first.values["split"] != values["split"]:
            message = f"duplicate: {first.where(row)} asks it too, for the split {first.values['split']}"
            file.report_row(row, "question", message)
        else:
            same = _words(first.values["answer"]) == _words(values["answer"])
            message = f"duplicate: {first.where(row)} " + ("is the same pair" if same else "asks it too")
            file.report_row(row, "question", f"{message}; it counts twice", "warning")
    if file.rows and not file.unread and not any(row.values.get("split") == "forget" for row in file.rows):
        file.report("no pair to forget: give some the split forget", field="split")


def _fill_variants(file: PairsFile, variants: int) -> None:
    """Variants as given, else from the table; the same number K for all."""
    for row in file.rows:
        if row.sound and row.values.get("anonymized") not in (None, []):
            row.variants = _given_variants(file, row)
    counts = Counter(len(row.variants) for row in file.rows if row.variants)
    usual = counts.most_common(1)[0][0] if counts else variants
    for row in file.rows:
        if row.variants and len(row.variants) != usual:
            file.report_row(row, "anonymized", f"{len(row.variants)} variant(s), most pairs have {usual}: give as many")
    wanted = min(variants, usual)
    for row in file.rows:
        if row.sound and file.table and not row.variants:
            named = _entities_of(file, row)
            # An entity with too few substitutes has been reported; what can be made is checked all the same.
            count = min([wanted, *(len(file.table[entity]) for entity in named)]) if named else 0
            texts = row.values["question"], row.values["answer"]
            row.variants = [tuple(anonymise(text, file.table, k) for text in texts) for k in range(count)]
        row.variants = row.variants[:wanted]


def _given_variants(file: PairsFile, row: Row) -> list[tuple[str, str]]:
    given = _as_list(row.values["anonymized"])
    answers = _as_list(row.values.get("anonymized_answer", []))
    if answers and (len(answers) != len(given) or not all(map(_is_text, answers))):
        message = f"expected {len(given)} text(s), one a variant, got {answers!r:.60}"
        file.report_row(row, "anonymized_answer", message)
        return []
    variants = []
    for k, variant in enumerate(given):
        if _is_text(variant):
            variant = {"question": variant, "answer": answers[k] if answers else _anonymised_answer(file, row, k)}
        if (
            not isinstance(variant, dict)
            or set(variant) != {"question", "answer"}
            or not all(map(_is_text, variant.values()))
        ):
            message = f"expected a question and an answer, both texts, not empty, got {variant!r:.60}"
            file.report_row(row, f"anonymized[{k}]", message)
            return []
        variants.append((nfc(variant["question"].strip()), nfc(variant["answer"].strip())))
    return variants


def _anonymised_answer(file: PairsFile, row: Row, k: int) -> str:
    answer, table = row.values["answer"], file.table or {}
    if any(k >= len(table[entity]) for _, _, entity in find_entities(answer, table)):
        return answer
    return anonymise(answer, table, k)


def _check_variants(file: PairsFile, row: Row) -> None:
    pair = (row.values["question"], row.values["answer"])
    given = row.values.get("anonymized") not in (None, [])
    for k, variant in enumerate(row.variants):
        if variant == pair and given:
            message = "the same as the pair, which then does not count for fragmentation"
            file.report_row(row, f"anonymized[{k}]", message, "warning")
            return
        named = [entity for text in variant for _, _, entity in find_entities(text, file.table or ())]
        if named:
            # Of made variants too: a substitute can complete an entity with the word that follows it.
            file.report_row(row, f"anonymized[{k}]", f"the variant still names the entity {named[0]!r}")
        if variant in row.variants[:k]:
            first = row.variants.index(variant)
            file.report_row(row, f"anonymized[{k}]", f"the same as anonymized[{first}]", "warning")


def _check_use_of_table(file: PairsFile) -> None:
    if file.table is None:
        return
    used: set[str] = set()
    for row in file.rows:
        named = _entities_of(file, row)
        used |= named
        if row.sound and not named and not row.variants and row.values["split"] != "retain":
            message = "names no entity of the table, so nothing of it can be anonymised: add its entity"
            file.report_row(row, "question", message, "warning")
    for entity in file.table:
        if entity not in used:
            file.report_entity(entity, "no pair names the entity: remove it", "warning")


def _entities_of(file: PairsFile, row: Row) -> set[str]:
    texts = [row.values.get(key) for key in ("question", "answer")]
    return {entity for text in filter(_is_text, texts) for _, _, entity in find_entities(text, file.table or ())}


def _as_list(value: object) -> list:
    return value if isinstance(value, list) else [value]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _words(text: str) -> str:
    """Case-folded words only: what makes two texts the same question."""
    return " ".join(re.findall(r"\w+", text.casefold())) or text


def _asked(values: dict) -> tuple[str, ...]:
    """What makes two questions the same: "which of these" is another question with other choices."""
    return (_words(values["question"]), *sorted(map(_words, values.get("choices") or [])))


def _gives_away(question: str, answer: str) -> bool:
    return f" {_words(answer)} " in f" {_words(question)} "
