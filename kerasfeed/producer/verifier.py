"""Holds a pipeline to what it yielded before: each element that is produced again must have the digest that it had.

The pump shows it what it produces, and what it skips on the way back; the journal remembers, beyond the producer's
death.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kerasfeed.producer import digest as digests

if TYPE_CHECKING:
    # It needs TensorFlow, which this module does not.
    from kerasfeed.spec import EncodedElement


class Mismatch(Exception):
    """The pipeline can't be replayed: the message says which element showed it."""


class Verifier:
    """Compares what is produced again with what was produced.

    Args:
        spec: The dataset's element spec, as `spec.encode_spec` wrote it.
        journal: What was produced so far.
        restored: Where a restored feed sets out, and the digest of what came before it: (pass, element, digest).
        full: Whether digests are of all bytes of large elements, too.
        warn: Called with the message instead of raising `Mismatch`, if given; once, for the first element.
    """

    def __init__(
        self,
        spec: bytes,
        journal: digests.Journal,
        restored: tuple[int, int, str] | None = None,
        full: bool = False,
        warn: Callable[[str], None] | None = None,
    ):
        self._digester = digests.Digester(spec, full)
        # Digests of the two kinds can't be compared.
        self._kind = "01" if full else "00"
        self._journal = journal
        self._restored = restored
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
        if self._restored is None or (pass_, element) != self._restored[:2]:
            return
        was, now = self._restored[2], self.digest_before(pass_, element)
        self._restored = None
        # What is not known, for want of room or because the backup does not say, can't be compared.
        if was and now and was != now and was.endswith(self._kind):
            self._tell(digests.chain_mismatch(pass_, element, was, now))

    def digest_before(self, pass_: int, element: int) -> str:
        """Returns the digest of all elements of a pass before this one; empty if some are not known."""
        chain = self._journal.chain(pass_, element)
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
