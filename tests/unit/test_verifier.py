"""A restored feed's past is compared with the backup's if both say of the same bytes what they were."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from kerasfeed.producer.digest import Digester, Journal
from kerasfeed.producer.verifier import Mismatch, Verifier
from kerasfeed.spec import Component, EncodedElement

pytestmark = pytest.mark.once

ELEMENTS = 5


@contextlib.contextmanager
def verifier(restored: str | None = None, full: bool = False) -> Iterator[Verifier]:
    fd = Journal.create("test", 100)
    try:
        place, before = (None, {}) if restored is None else ((0, ELEMENTS), {0: restored})
        yield Verifier(Digester(b"spec", full), Journal(fd), place, before, full)
    finally:
        os.close(fd)


def digest_after(verifier: Verifier, first: int) -> str:
    for index in range(ELEMENTS):
        data = bytes([first + index]) * 100
        element = EncodedElement((Component((100,), 0, 100),), (memoryview(data),), 100)
        verifier.produced(0, index, element)
    return verifier.digest_before(0, ELEMENTS)


def digest_of(first: int, full: bool = False) -> str:
    with verifier(full=full) as one:
        return digest_after(one, first)


@pytest.mark.parametrize("full", [False, True])
def test_another_past_than_the_backups_is_told(full: bool) -> None:
    with verifier(digest_of(0, full), full) as same:
        digest_after(same, 0)
        same.arrived(0, ELEMENTS)
    with verifier(digest_of(0, full), full) as other:
        digest_after(other, 1)
        with pytest.raises(Mismatch, match="elements 0 to 4 of pass 0"):
            other.arrived(0, ELEMENTS)


@pytest.mark.parametrize("full", [False, True])
def test_digests_of_other_bytes_are_not_compared(full: bool) -> None:
    # "00": of blocks as they were taken once. States of that time load, and say nothing of the elements before them.
    for restored in (digest_of(0, full)[:-2] + "00", digest_of(0, not full), ""):
        with verifier(restored, full) as other:
            digest_after(other, 1)
            other.arrived(0, ELEMENTS)
