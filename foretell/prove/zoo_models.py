"""Modules of the zoo by tag, as `foretell zoo`, `foretell zoo query` and `foretell.zoo` ask for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from foretell.errors import FileFormatError, UnknownName, UserError, near_names

if TYPE_CHECKING:
    from foretell.zoo.catalogue import Card

TASK_HELP = "Only models of this task: seg, lm, cls, ... or in words: segmentation."
DOMAIN_HELP = "Only models that work on this (text, image, points, ...) or are of this science (physics, biology, ...)."
MOTIF_HELP = "Only models that compute this: scatter, sort, frozen, ... or a longer part of what `foretell zoo` says."
LEVEL_HELP = "Only models of this level: scientific, application or system."
PAPER_HELP = "Only models of this paper: a part of its name, title or authors."
_MANY = 20


def catalogue() -> tuple[Card, ...]:
    """All modules with their measured rows."""
    from foretell.zoo import catalogue as zoo

    try:
        return zoo.cards()
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{zoo.MEASURED} cannot be read: {error}", "delete it: the next check writes another") from error


def found(name: str | None = None, **wanted: str | None) -> tuple[Card, ...]:
    """The modules that were asked for, at least one; an error says what was asked, what there is and what is nearest."""
    from foretell.zoo import catalogue as zoo

    cards = catalogue()
    asked = {tag: text for tag, text in wanted.items() if text is not None}
    if name is not None and not zoo.select(cards, name):
        known = {card.module for card in cards} | {entry.name for card in cards for entry in card.entries}
        raise UnknownName("model", name, sorted(known), "see `foretell zoo`")
    for tag, text in asked.items():
        if not zoo.select(cards, **{tag: text}):
            raise _unknown(tag, text, zoo.terms(cards, tag))
    matches = zoo.select(cards, name, **asked)
    if not matches:
        raise _nothing(cards, name, asked)
    return matches


def _unknown(tag: str, text: str, known: tuple[str, ...]) -> UserError:
    """No model has this: what there is, all of it where it is little."""
    from foretell.zoo.tags import TASKS

    near = near_names(text, [*known, *(TASKS.values() if tag == "task" else ())])
    near = list(dict.fromkeys([one for one in known if text.casefold().startswith(one) and tag == "task"] + near))
    there = f"there are {', '.join(known)}" if len(known) <= _MANY else f"there are {len(known)}, see `foretell zoo`"
    hint = f"did you mean {', '.join(near)}? " if near else ""
    return UserError(f"no model of the zoo has {tag} '{text}'", f"{hint}{there}")


def _nothing(cards: tuple[Card, ...], name: str | None, asked: Mapping[str, str]) -> UserError:
    """Each was there, not all together: what the first comes with."""
    from foretell.zoo import catalogue as zoo

    words = [*([f"name '{name}'"] if name else []), *(f"{tag} '{text}'" for tag, text in asked.items())]
    first: dict[str, Any] = {} if name else {next(iter(asked)): next(iter(asked.values()))}
    other = next(tag for tag in reversed([*asked]) if tag not in first)
    there = zoo.terms(zoo.select(cards, name, **first), other) if other != "level" else _levels(zoo.select(cards, name, **first))
    more = f", and {len(there) - _MANY} more" if len(there) > _MANY else ""
    return UserError(
        f"no model of the zoo has {' and '.join(words)}", f"with {words[0]} there is {other} {', '.join(there[:_MANY])}{more}"
    )


def _levels(cards: tuple[Card, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(card.level for card in cards))
