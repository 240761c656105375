"""Holds a pipeline to what it yielded before: each element that is produced again must have the digest that it had.

The pump shows it what it produces, and what it skips on the way back; the journal remembers, beyond the producer's
death.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kerasfeed.producer import digest as digests

if TYPE_CHECKING:
    # It needs TensorFlow, which this module does not.
    from kerasfeed.native import digest as native_digests
    from kerasfeed.spec import EncodedElement

    Digester = digests.Digester | native_digests.Digester
    Journal = digests.Journal | native_digests.Journal


class Tolerance(enum.IntEnum):
    """What becomes of an element that is another one than it was (`Tolerance` of `native/core/pump.h`)."""

    NONE = 0
    TELL = 1
    ALL = 2


class Mismatch(Exception):
    """The pipeline can't be replayed: the message says which element showed it."""


class Verifier:
    """Compares what is produced again with what was produced.

    Args:
        digester: Makes the digests of the dataset's elements, in Python or C++.
        journal: What was produced so far.
        restored: (pass, element) where a restored feed sets out.
        before: Digests of the elements before that, by the first of them.
        full: Whether digests are of all bytes of large elements, too.
        warn: Called with the message instead of raising `Mismatch`, if given; once, for the first element.
    """

    def __init__(
        self,
        digester: Digester,
        journal: Journal,
        restored: tuple[int, int] | None = None,
        before: Mapping[int, str] = types.MappingProxyType({}),
        full: bool = False,
        warn: Callable[[str], None] | None = None,
    ):
        self._digester = digester
        # Digests of different kinds can't be compared. "00" was of other blocks: states of that time may still come.
        self._kind = "01" if full else "02"
        self._journal = journal
        self._restored = restored
        self._before = before
        self._warn = warn
        self._warned = False

    def produced(self, pass_: int, index: int, element: EncodedElement) -> None:
        """This element came.

        Raises:
            Mismatch: It was another one before.
        """
        end = self._journal.elements(pass_)
        if end is not None and index >= end:
            self._tell(digests.end_mismatch(pass_, end, index + 1))
        now = self._digester.digest(element)
        was = self._journal.note(pass_, index, now)
        if was is not None and was != now:
            self._tell(digests.element_mismatch(pass_, index, was, now))

    @property
    def tolerance(self) -> Tolerance:
        """What becomes of an element that is another one than it was."""
        if self._warn is None:
            return Tolerance.NONE
        return Tolerance.ALL if self._warned else Tolerance.TELL

    def found(self, pass_: int, index: int, was: int | None, now: int) -> None:
        """What the native pump has found: this element was another one before, or (`was` is `None`) there was none.

        Raises:
            Mismatch: Says so.
        """
        if was is None:
            end = self._journal.elements(pass_)
            self._tell(digests.end_mismatch(pass_, index if end is None else end, index + 1))
        else:
            self._tell(digests.element_mismatch(pass_, index, was, now))

    def ended(self, pass_: int, elements: int) -> None:
        """The pass had so many elements.

        Raises:
            Mismatch: It had another number before.
        """
        was = self._journal.note_end(pass_, elements)
        if was is not None and was != elements:
            self._tell(digests.end_mismatch(pass_, was, elements))

    def arrived(self, pass_: int, element: int) -> None:
        """The pipeline stands at this element.

        Raises:
            Mismatch: A restored feed starts here, and what came before is not what came before the backup.
        """
        if (pass_, element) != self._restored:
            return
        self._restored = None
        for first, was in self._before.items():
            now = self.digest_before(pass_, element, first)
            # What is not known, for want of room or because the backup does not say, can't be compared.
            if was and now and was != now and was.endswith(self._kind):
                self._tell(digests.chain_mismatch(pass_, first, element, was, now))

    def digest_before(self, pass_: int, element: int, first: int = 0) -> str:
        """Returns the digest of a pass's elements from `first` to this one; empty if some are not known."""
        chain = self._journal.chain(pass_, element, first)
        return chain + self._kind if chain else ""

    def forget_before(self, pass_: int) -> None:
        """Passes before this one will not be produced again."""
        self._journal.forget_before(pass_)

    def _tell(self, message: str) -> None:
        if self._warn is None:
            raise Mismatch(message)
        if not self._warned:
            self._warned = True
            self._warn(message)
