"""Writes ``corpus.txt``: a text made up by a small grammar, so that nobody owns it.

``python make_corpus.py`` writes the same bytes everywhere: it uses a generator of its own, since
the sequences of Python's ``random`` are not promised for every method.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CORPUS_BYTES = 48_000

PLACES = ("harbour", "valley", "mill", "observatory", "orchard", "workshop", "bridge", "archive")
PEOPLE = ("the keeper", "a surveyor", "the baker", "an old pilot", "the clerk", "a glassblower")
THINGS = ("lantern", "ledger", "compass", "kettle", "ladder", "map", "bell", "telescope", "loom")
QUALITIES = ("quiet", "crooked", "patient", "copper", "borrowed", "half-made", "heavy", "pale")
WEATHERS = ("rain came in", "the fog lifted", "snow lay deep", "a dry wind blew", "it was still")
DEEDS = (
    "mended the {q} {t}",
    "counted every {t} in the {p}",
    "carried a {q} {t} to the {p}",
    "hid the {t} behind the {p}",
    "traded a {t} for a {q} {t2}",
    "dreamt of a {q} {t}",
)
LINKS = ("and then", "but later", "while", "because", "so", "until")
SAYINGS = (
    "Nothing that is {q} stays lost.",
    "Ask the {t}, not the {p}.",
    "Every {p} keeps one {q} {t}.",
    "What the {t} forgets, the {t2} remembers.",
)


class Dice:
    """A linear congruential generator: the whole of it fits into one line."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def pick(self, options: tuple[str, ...]) -> str:
        """One of ``options``."""
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % 2**64
        return options[(self._state >> 33) % len(options)]

    def fill(self, pattern: str) -> str:
        """``pattern`` with its gaps filled."""
        return pattern.format(
            q=self.pick(QUALITIES),
            t=self.pick(THINGS),
            t2=self.pick(THINGS),
            p=self.pick(PLACES),
        )


def paragraphs(seed: int) -> Iterator[str]:
    """Paragraphs without end."""
    dice = Dice(seed)
    while True:
        opening = f"In the {dice.pick(PLACES)} {dice.pick(WEATHERS)}."
        clauses = [f"{dice.pick(PEOPLE)} {dice.fill(dice.pick(DEEDS))}" for _ in range(4)]
        told = f"{clauses[0]} {dice.pick(LINKS)} {clauses[1]}. "
        told += f"{clauses[2]} {dice.pick(LINKS)} {clauses[3]}."
        told = ". ".join(part[0].upper() + part[1:] for part in told.split(". "))
        yield f"{opening} {told} {dice.fill(dice.pick(SAYINGS))}\n"


def corpus(size: int = CORPUS_BYTES) -> str:
    """The text, of at least ``size`` characters, ending with a whole paragraph."""
    text = ""
    for paragraph in paragraphs(seed=20):
        text += paragraph
        if len(text) >= size:
            break
    return text


if __name__ == "__main__":
    Path(__file__).with_name("corpus.txt").write_text(corpus(), encoding="ascii")
