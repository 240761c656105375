"""The token is proven by challenge and response: a proof fits one role, feed, rank and conversation only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerasfeed import auth

CONVERSATION = {
    "token": b"a token that is long enough",
    "role": "rank",
    "feed": "train",
    "rank": 1,
    "rank_nonce": b"r" * auth.NONCE_BYTES,
    "producer_nonce": b"p" * auth.NONCE_BYTES,
}
OTHER = {
    "token": b"a token that is long enougH",
    "role": "producer",
    "feed": "val",
    "rank": 2,
    "rank_nonce": b"r" * (auth.NONCE_BYTES - 1) + b"R",
    "producer_nonce": b"p" * (auth.NONCE_BYTES - 1) + b"P",
}


def test_the_same_conversation_has_the_same_proof():
    assert auth.proven(auth.prove(**CONVERSATION), auth.prove(**CONVERSATION))


@pytest.mark.parametrize("field", CONVERSATION)
def test_a_proof_depends_on_every_field(field):
    assert not auth.proven(auth.prove(**CONVERSATION), auth.prove(**{**CONVERSATION, field: OTHER[field]}))


def test_nonces_can_not_change_places():
    swapped = {**CONVERSATION, "rank_nonce": b"p" * auth.NONCE_BYTES, "producer_nonce": b"r" * auth.NONCE_BYTES}
    assert not auth.proven(auth.prove(**CONVERSATION), auth.prove(**swapped))


conversations = st.tuples(
    st.sampled_from(["rank", "producer"]),
    st.text("ab1", max_size=3),
    st.integers(0, 12),
    st.binary(max_size=2),
    st.binary(max_size=2),
)


@given(a=conversations, b=conversations)
def test_no_two_conversations_share_a_proof(a, b):
    """Also not where a byte moves from one field to its neighbour."""
    token = CONVERSATION["token"]
    assert auth.proven(auth.prove(token, *a), auth.prove(token, *b)) == (a == b)


def test_a_proof_does_not_hold_the_token():
    proof = auth.prove(**CONVERSATION)
    assert len(proof) == 32
    assert CONVERSATION["token"] not in proof


def test_an_empty_or_cut_proof_is_not_proven():
    proof = auth.prove(**CONVERSATION)
    assert not auth.proven(proof, b"")
    assert not auth.proven(proof, proof[:-1])


def test_tokens_and_nonces_are_fresh_each_time():
    assert len({auth.new_token() for _ in range(50)}) == 50
    assert len({auth.new_nonce() for _ in range(50)}) == 50
    assert len(auth.new_token()) == auth.TOKEN_BYTES
    assert len(auth.new_nonce()) == auth.NONCE_BYTES


def test_without_the_variable_there_is_no_token(monkeypatch):
    monkeypatch.delenv(auth.TOKEN_VARIABLE, raising=False)
    assert auth.token_from_environment() is None


def test_the_token_of_the_environment_is_used(monkeypatch):
    monkeypatch.setenv(auth.TOKEN_VARIABLE, "0123456789abcdef")
    assert auth.token_from_environment() == b"0123456789abcdef"


@pytest.mark.parametrize("value", ["", "short", "0123456789abcde"])
def test_a_short_token_is_refused_without_being_shown(monkeypatch, value):
    monkeypatch.setenv(auth.TOKEN_VARIABLE, value)
    with pytest.raises(
        ValueError, match=f"KERASFEED_TOKEN must have at least 16 characters. Received: {len(value)}."
    ) as raised:
        auth.token_from_environment()
    assert not value or value not in str(raised.value)


# ---- On the data socket ----

NONCES = (b"r" * auth.NONCE_BYTES, b"p" * auth.NONCE_BYTES)


def test_what_is_said_on_the_data_socket_is_said_nowhere_else():
    token, feed, rank = CONVERSATION["token"], "train", 1
    said = [auth.prove(token, role, feed, rank, *NONCES) for role in ("rank", "producer")]
    # Neither side's words serve the other one, or the other socket.
    assert len({*said, *auth.data_proofs(token, feed, rank, NONCES)}) == 4


@pytest.mark.parametrize("field", ["token", "feed", "rank", "rank_nonce", "producer_nonce"])
def test_both_proofs_of_the_data_socket_depend_on_every_field(field):
    def proofs(token, feed, rank, rank_nonce, producer_nonce, role):
        return auth.data_proofs(token, feed, rank, (rank_nonce, producer_nonce))

    others = proofs(**{**CONVERSATION, field: OTHER[field]})
    assert not set(others) & set(proofs(**CONVERSATION))


def test_both_sides_come_to_the_same_proofs():
    assert auth.data_proofs(b"t", "f", 0, NONCES) == auth.data_proofs(b"t", "f", 0, NONCES)
