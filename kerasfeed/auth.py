"""Challenge and response, both ways: rank and producer prove that they know the job's token, and never send it."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets

TOKEN_VARIABLE = "KERASFEED_TOKEN"
TOKEN_BYTES = 32
NONCE_BYTES = 32
_MIN_TOKEN_CHARACTERS = 16


def token_from_environment() -> bytes | None:
    """Returns the token that `KERASFEED_TOKEN` holds, or `None` if it is not set.

    Raises:
        ValueError: It is too short to be a secret.
    """
    value = os.environ.get(TOKEN_VARIABLE)
    if value is None:
        return None
    if len(value) < _MIN_TOKEN_CHARACTERS:
        raise ValueError(
            f"{TOKEN_VARIABLE} must have at least {_MIN_TOKEN_CHARACTERS} characters. Received: {len(value)}. "
            "Make one with: python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return value.encode()


def new_token() -> bytes:
    """Returns a fresh random token."""
    return secrets.token_bytes(TOKEN_BYTES)


def new_nonce() -> bytes:
    """Returns a number used once: what the other side has to answer for."""
    return secrets.token_bytes(NONCE_BYTES)


def prove(token: bytes, role: str, feed: str, rank: int, rank_nonce: bytes, producer_nonce: bytes) -> bytes:
    """Returns the proof that `role` knows the token, for this one conversation.

    Roles are "rank" and "producer", and on the data socket that belongs to the conversation "rank data" and "producer
    data".

    HMAC-SHA256 (RFC 2104) over role, feed, rank and both nonces, so that a proof serves neither the other role nor
    another conversation.
    """
    fields = (role.encode(), feed.encode(), str(rank).encode(), rank_nonce, producer_nonce)
    message = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    return hmac.new(token, message, hashlib.sha256).digest()


def data_proofs(token: bytes, feed: str, rank: int, nonces: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    """Returns what a rank and the producer say on the data socket of the conversation with these nonces."""
    rank_nonce, producer_nonce = nonces
    rank_proof = prove(token, "rank data", feed, rank, rank_nonce, producer_nonce)
    return rank_proof, prove(token, "producer data", feed, rank, rank_nonce, producer_nonce)


def job_mark(token: bytes) -> str:
    """Returns a name for the job that tells jobs with different tokens apart, and nothing about the token."""
    return hmac.new(token, b"job", hashlib.sha256).hexdigest()[:16]


def proven(expected: bytes, received: bytes) -> bool:
    """Whether two proofs are the same, compared in constant time."""
    return hmac.compare_digest(expected, received)
