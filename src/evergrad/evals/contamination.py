"""Whether a text that is to be trained on is, or nearly is, among the texts that measure.

Three looks, each catching what the one before lets through::

    same        the same words in the same order, whatever their case, spaces and punctuation
    13-gram     thirteen words in a row in common (Brown et al., 2020, appendix C)
    near        Jaccard similarity of the five-character shingles of at least 0.8: candidates by MinHash in bands
                (Broder, 1997), then counted exactly

What more than a tenth of the reference texts have in common is their template ("Please refund order …"): it says nothing of a
single one, and is left out of the second and third look. Synonyms and translations pass all three.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Gram = TypeVar("Gram", bound=Hashable)

NGRAM_WORDS = 13
SHINGLE_CHARS = 5
NEAR = 0.8
TEMPLATE_SHARE = 0.1
"""Of the reference texts; what more of them have in common is their template."""
_BANDS, _ROWS = 32, 4
"""A pair of similarity s shares a band with chance 1 − (1 − s⁴)³²: 0.4 → 0.56, 0.8 → 1 − 5e-8."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """A reference text that a text overlaps with, and how."""

    reference: str
    """Its id."""
    kind: Literal["same", "13-gram", "near"]
    similarity: float
    """Of the shingles outside of the template; 1.0 for the first two kinds."""


class Overlaps:
    """Looks texts up among reference texts.

    Args:
        references: Id to text.

    >>> overlaps = Overlaps({"gate/1": "Please refund order F50."})
    >>> overlaps.find("please refund: order F50")
    Overlap(reference='gate/1', kind='same', similarity=1.0)
    >>> overlaps.find("Where is my parcel?") is None
    True
    """

    def __init__(self, references: Mapping[str, str]) -> None:
        import numpy as np

        words = {name: _words(text) for name, text in references.items()}
        shingles = {name: _shingles(each) for name, each in words.items()}
        most = max(1, int(TEMPLATE_SHARE * len(references)))
        self._template = _commoner_than(shingles.values(), most)
        grams = {name: _ngrams(each) for name, each in words.items()}
        common_grams = _commoner_than(grams.values(), most)
        self._same = {each: name for name, each in words.items()}
        self._grams = {gram: name for name, found in grams.items() for gram in found - common_grams}
        self._own = {name: each - self._template for name, each in shingles.items()}
        draws = np.random.default_rng(0)
        self._factors = draws.integers(0, 2**63, size=(_BANDS * _ROWS, 1), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        self._bands: dict[tuple[int, bytes], list[str]] = defaultdict(list)
        for name, own in self._own.items():
            for band in self._bands_of(own):
                self._bands[band].append(name)

    def find(self, text: str) -> Overlap | None:
        """The reference text that ``text`` is nearest to, where that is too near."""
        words = _words(text)
        if words in self._same:
            return Overlap(self._same[words], "same", 1.0)
        for gram in _ngrams(words):
            if gram in self._grams:
                return Overlap(self._grams[gram], "13-gram", 1.0)
        own = _shingles(words) - self._template
        candidates = dict.fromkeys(name for band in self._bands_of(own) for name in self._bands.get(band, ()))
        similar = {name: len(own & self._own[name]) / len(own | self._own[name]) for name in candidates}
        nearest = max(similar, key=lambda name: similar[name], default=None)
        if nearest is None or similar[nearest] < NEAR:
            return None
        return Overlap(nearest, "near", similar[nearest])

    def _bands_of(self, shingles: frozenset[str]) -> list[tuple[int, bytes]]:
        """The bands of a set's MinHash signature; none for an empty set."""
        if not shingles:
            return []
        import numpy as np
        import xxhash

        hashes = np.array(
            [xxhash.xxh3_64_intdigest(each.encode("utf-8", "surrogatepass")) for each in shingles], dtype=np.uint64
        )
        # Multiplication by an odd number permutes the 64-bit numbers; the high bits of the product are what is random in it.
        signature: NDArray[np.uint64] = (self._factors * hashes[None, :]).min(axis=1)
        return [(band, signature[band * _ROWS : (band + 1) * _ROWS].tobytes()) for band in range(_BANDS)]


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", text.casefold()))


def _ngrams(words: tuple[str, ...]) -> frozenset[tuple[str, ...]]:
    return frozenset(words[start : start + NGRAM_WORDS] for start in range(len(words) - NGRAM_WORDS + 1))


def _shingles(words: tuple[str, ...]) -> frozenset[str]:
    """Of the words with one space around each, so that a short word is in a shingle with its neighbours."""
    text = f" {' '.join(words)} "
    return frozenset(text[start : start + SHINGLE_CHARS] for start in range(max(1, len(text) - SHINGLE_CHARS + 1)))


def _commoner_than(sets: Iterable[frozenset[Gram]], most: int) -> frozenset[Gram]:
    counts = Counter(chain.from_iterable(sets))
    return frozenset(each for each, count in counts.items() if count > most)
