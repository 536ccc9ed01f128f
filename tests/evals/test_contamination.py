"""What is measured on is told from what is near it, and a template is nobody's own text."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from random import Random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from evergrad.evals import Overlaps
from evergrad.evals.contamination import NEAR, _shingles, _words

WORDS = [f"w{number}" for number in range(400)]


def passage(rng: Random, length: int = 40) -> list[str]:
    return [rng.choice(WORDS) for _ in range(length)]


@given(st.integers(0, 2**32), st.integers(0, 12))
@example(16198, 0)  # a shingle of two of the texts: a template of six
@settings(max_examples=60, deadline=None)
def test_bands_find_what_comparing_with_each_would_find(seed: int, changes: int) -> None:
    """Against brute force, with texts at every distance; thirteen words in a row are broken up, so that they decide nothing."""
    rng = Random(seed)
    references = {str(number): passage(rng) for number in range(6)}
    changed = list(references["3"])
    for place in rng.sample(range(0, 40, 3), changes):
        changed[place] = "other"
    for place in (5, 17, 29):
        changed[place] = f"x{changed[place]}"
    text = " ".join(changed)
    shingles = {name: _shingles(_words(" ".join(words))) for name, words in references.items()}
    template = {each for each, count in Counter(chain.from_iterable(shingles.values())).items() if count > 1}
    own = _shingles(_words(text)) - template
    similar = {name: len(own & their - template) / len(own | their - template) for name, their in shingles.items()}
    nearest = max(similar, key=lambda name: similar[name])
    found = Overlaps({name: " ".join(words) for name, words in references.items()}).find(text)
    if similar[nearest] >= NEAR + 0.02:
        assert found is not None
        assert (found.reference, found.kind) == (nearest, "near")
    elif similar[nearest] < NEAR - 0.02:
        assert found is None


def test_thirteen_words_in_a_row_are_enough_and_twelve_are_not() -> None:
    rng = Random(3)
    gate = passage(rng)
    overlaps = Overlaps({"gate": " ".join(gate)})
    for length, kind in ((13, "13-gram"), (12, None)):
        found = overlaps.find(" ".join([*passage(rng, 60), *gate[5 : 5 + length], *passage(rng, 60)]))
        assert (found.kind if found else None) == kind


def test_only_what_a_text_has_beyond_its_template_counts() -> None:
    asked = {
        f"gate/{number}": f"Please look up what became of order {number}, which I placed some weeks ago."
        for number in range(500, 600)
    }
    overlaps = Overlaps(asked)
    assert overlaps.find("Please look up what became of order 499, which I placed some weeks ago.") is None
    same = overlaps.find("please look up what became of order 512 which I placed some weeks ago")
    assert same is not None
    assert (same.reference, same.kind) == ("gate/512", "same")
    alone = Overlaps({"gate/500": asked["gate/500"]})
    assert alone.find(asked["gate/501"]) is not None, "of one text nobody knows which part is its template"


def test_nothing_to_compare_is_no_overlap() -> None:
    assert Overlaps({}).find("anything") is None
    assert Overlaps({"a": "some text"}).find("") is None
