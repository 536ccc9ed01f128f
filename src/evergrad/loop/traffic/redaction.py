"""What personal data becomes before anything is stored: ``<EMAIL_ADDRESS>``, ``<PHONE_NUMBER>``, …

A redactor is any function from text to text. The one that comes along asks the pattern recognizers of presidio-analyzer: no
language model, so that names and street addresses stay as they are; plug in another where those must go, too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from evergrad.config import nearest
from evergrad.types import InputError

Redact = Callable[[str], str]

MIN_CONFIDENCE = 0.4
"""Of a pattern, by presidio's own scale; below it patterns are such that a number of any kind fits them."""


def find_redactor(name: str) -> Redact:
    """The redactor called ``name``: ``presidio``, or ``package.module:function`` of one's own.

    Raises:
        InputError: there is none, it cannot be loaded, or it does not turn a text into a text.
    """
    redact = presidio() if name == "presidio" else _own(name)
    try:
        found: Any = redact("Write to jane@example.com")
    except Exception as error:
        raise InputError(f"the redactor raises {type(error).__name__}: {error}", where=name) from error
    if not isinstance(found, str):
        raise InputError(f"the redactor gives {type(found).__name__}", where=name, hint="return the text without personal data")
    return redact


def presidio() -> Redact:
    """Replaces what presidio's pattern recognizers find by the name of its kind.

    Raises:
        InputError: presidio-analyzer is not installed.
    """
    try:
        from presidio_analyzer import predefined_recognizers as known
        from tldextract import TLDExtract
    except ModuleNotFoundError as error:
        hint = "pip install 'evergrad[privacy]', or name a function of your own: --record package.module:function"
        raise InputError(f"the redactor 'presidio' needs the package '{error.name}'", hint=hint) from error

    # As it comes, the recognizer fetches the list of domain endings when it meets its first address; the package has a copy.
    split_domain = TLDExtract(suffix_list_urls=())

    class Email(known.EmailRecognizer):  # type: ignore[misc, name-defined, unused-ignore]
        def validate_result(self, pattern_text: str) -> bool:
            return bool(split_domain(pattern_text).fqdn)

    recognizers: list[Any] = [
        Email(),
        known.CreditCardRecognizer(),
        known.CryptoRecognizer(),
        known.IbanRecognizer(),
        known.IpRecognizer(),
        known.MacAddressRecognizer(),
        known.PhoneRecognizer(),
        known.UsSsnRecognizer(),
    ]

    def redact(text: str) -> str:
        found = [each for recognizer in recognizers for each in recognizer.analyze(text, recognizer.supported_entities, None)]
        return _replace(text, [(each.start, each.end, each.entity_type) for each in found if each.score >= MIN_CONFIDENCE])

    return redact


def _replace(text: str, found: list[tuple[int, int, str]]) -> str:
    """``text`` with each span replaced by its kind; of spans that overlap, all is replaced, by the kind of the longest.

    >>> _replace("call 555 now", [(5, 8, "PHONE"), (6, 8, "NUMBER")])
    'call <PHONE> now'
    """
    pieces, end, start = list[str](), 0, 0
    spans = sorted(found)
    while spans:
        start, stop, kind = spans.pop(0)
        longest = stop - start
        while spans and spans[0][0] < stop:
            low, high, other = spans.pop(0)
            if high - low > longest:
                longest, kind = high - low, other
            stop = max(stop, high)
        pieces += [text[end:start], f"<{kind}>"]
        end = stop
    return "".join([*pieces, text[end:]])


def _own(name: str) -> Redact:
    module_name, separator, attribute = name.partition(":")
    if not separator:
        raise InputError(f"no redactor '{name}'", hint=f"{nearest(name, ['presidio'])}, or name package.module:function")
    try:
        redact = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        hint = "name a function that can be imported, as package.module:function"
        raise InputError(f"the redactor cannot be loaded: {error}", where=name, hint=hint) from error
    if not callable(redact):
        raise InputError("the redactor is no function", where=name, hint="give a function from text to text")
    return redact  # type: ignore[no-any-return]
