"""Where a feed stands and what it takes to get back there: a small value, and its bytes in a backup.

A rank makes a `FeedState` from its feed's position; `BackupAndRestore` keeps it beside the weights; a feeder that is
given one checks that it fits and goes on at `element`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import struct
import types
from collections.abc import Mapping
from typing import Any

from kerasfeed.errors import StateError

VERSION = 1
# All that the contract names, whether or not this release can feed them: a state outlives the release that wrote it.
POLICIES = ("round_robin", "split", "broadcast", "dynamic")
REMAINDERS = ("drop", "pad", "keep")
WAYS = ("replay", "snapshot", "window")

_MAX_WHOLE = 2**63 - 1
_MAX_SEED = 2**31 - 1
_MAX_SPEC = 1024
_HEX = re.compile(r"([0-9a-f]{2}){0,64}")

# The line breaks give away a transfer in text mode. What `_HEAD` packs has this place in all versions, so that a state
# of a newer one is told from a damaged one: magic, length of the whole, SHA-256 of what follows it; then the body.
_MAGIC = b"KFSTATE\r\n"
_HEAD = struct.Struct(">9sQ32s")
_BODY = struct.Struct(">IQ")

_FITTING = {
    "feed": "Give the feeder name={state!r}, or the state of its own name",
    "policy": "Give policy={state!r}, or start without the backup",
    "remainder": "Give remainder={state!r}, or start without the backup",
    "steps_per_epoch": "Give steps_per_epoch={state!r}, or start without the backup",
    "seed": "Leave seed out, or give seed={state!r}",
    "element_spec": "The dataset's elements changed since: give the same dataset_fn, or start without the backup",
    "fingerprint": "The pipeline changed since: give the same dataset_fn, or start without the backup",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedState:
    """The position of a feed, and how to get back to it. Another number of ranks may go on from it.

    Example:
        >>> state = FeedState.from_bytes(path.read_bytes())
        >>> state.epoch, state.step
        (3, 500)

    Attributes:
        feed: The feed's name.
        pass_: The pass over the dataset, from 0.
        element: The first element of that pass that was not trained. In a stream that runs on over passes
            (`steps_per_epoch`) it may lie beyond the end of the pass, and is then counted on.
        elements: Elements in a whole pass; negative if that is not known, or there is no end.
        epoch: The epoch of the first step not trained, as the feed counts.
        step: That step within its epoch.
        size: The number of ranks that trained.
        policy: Who gets which element.
        remainder: What happens to the elements that fill no step.
        steps_per_epoch: The length of an epoch, or `None` if an epoch is one pass.
        seed: What TensorFlow is seeded with in the producer.
        element_spec: The dataset's `element_spec` as text; a long one is kept as `sha256:` and its digest.
        fingerprint: Hex digest of the pipeline's graph, or "" if it can't be had.
        digest: Hex digest of what the pass yielded before `element`, or "" if it is not known.
        way: How to get back: "replay", "snapshot" or "window".
        parts: Serialised iterators and elements by name; none for "replay".
        version: The format that this state was read from or will be written in.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is out of range.
    """

    feed: str
    pass_: int
    element: int
    elements: int
    epoch: int
    step: int
    size: int
    policy: str
    remainder: str
    steps_per_epoch: int | None
    seed: int
    element_spec: str
    fingerprint: str
    digest: str
    way: str
    parts: Mapping[str, bytes] = dataclasses.field(default_factory=dict, hash=False)
    version: int = VERSION

    def __post_init__(self) -> None:
        for name in ("feed", "element_spec", "fingerprint", "digest"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"FeedState: {name} must be a str. Received: {getattr(self, name)!r}")
        if not self.feed:
            raise ValueError(f"FeedState: feed must have at least one character. Received: {self.feed!r}")
        for name in ("pass_", "element", "epoch", "step"):
            self._whole(name, low=0)
        self._whole("elements", low=-2)
        self._whole("size", low=1)
        self._whole("seed", low=0, high=_MAX_SEED)
        if self.steps_per_epoch is not None:
            self._whole("steps_per_epoch", low=1)
        self._choice("policy", POLICIES)
        self._choice("remainder", REMAINDERS)
        self._choice("way", WAYS)
        for name in ("fingerprint", "digest"):
            if not _HEX.fullmatch(getattr(self, name)):
                raise ValueError(
                    f"FeedState: {name} must be hex digits, two for a byte, at most 128, or ''. "
                    f"Received: {getattr(self, name)!r}"
                )
        object.__setattr__(self, "element_spec", _short_spec(self.element_spec))
        self._check_parts()
        self._whole("version", low=1)
        if self.version != VERSION:
            raise ValueError(f"FeedState: version must be {VERSION}. Received: {self.version}")

    def _choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if not isinstance(value, str):
            raise TypeError(f"FeedState: {name} must be a str. Received: {value!r}")
        if value not in choices:
            raise ValueError(f"FeedState: {name} must be one of {', '.join(map(repr, choices))}. Received: {value!r}")

    def _whole(self, name: str, low: int, high: int = _MAX_WHOLE) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool):
            optional = " or None" if name == "steps_per_epoch" else ""
            raise TypeError(f"FeedState: {name} must be an int{optional}. Received: {value!r}")
        if not low <= value <= high:
            bounds = f"at least {low}" if value < low else f"at most {high}"
            raise ValueError(f"FeedState: {name} must be {bounds}. Received: {value}")

    def _check_parts(self) -> None:
        if not isinstance(self.parts, Mapping):
            raise TypeError(f"FeedState: parts must map names to bytes. Received: a {type(self.parts).__name__}")
        for name, part in self.parts.items():
            if not isinstance(name, str) or not isinstance(part, bytes):
                raise TypeError(
                    f"FeedState: parts must map names to bytes. Received: {name!r} with a {type(part).__name__}"
                )
        if self.way == "replay" and self.parts:
            raise ValueError(f"FeedState: way='replay' has no parts. Received: {', '.join(map(repr, self.parts))}")
        # The caller's dictionary may change, this value may not; sorted, equal states have equal bytes.
        object.__setattr__(self, "parts", dict(sorted(self.parts.items())))

    def __repr__(self) -> str:
        shown = {field.name: repr(getattr(self, field.name)) for field in dataclasses.fields(self)}
        for name in ("element_spec", "fingerprint", "digest"):
            text = getattr(self, name)
            shown[name] = repr(text if len(text) <= 40 else f"{text[:36]}...")
        shown["parts"] = "{" + ", ".join(f"{name!r}: {len(part)} bytes" for name, part in self.parts.items()) + "}"
        return f"FeedState({', '.join(f'{name}={text}' for name, text in shown.items())})"

    @property
    def mark(self) -> str:
        """A name for this state and no other: hex digits."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """Returns this state as bytes; `FeedState.from_bytes` is the inverse."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del fields["version"]
        fields["pass"] = fields.pop("pass_")
        fields["parts"] = [[name, len(part)] for name, part in self.parts.items()]
        text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        body = b"".join([_BODY.pack(self.version, len(text)), text, *self.parts.values()])
        return _HEAD.pack(_MAGIC, _HEAD.size + len(body), hashlib.sha256(body).digest()) + body

    @classmethod
    def from_bytes(cls, data: bytes) -> FeedState:
        """Returns the state that `to_bytes` of this release, or of an earlier one, wrote.

        Args:
            data: All of the bytes, and no more.

        Raises:
            StateError: They are damaged, no feed state, or of a newer version.
        """
        data = bytes(data)
        version, text, rest = _split(data)
        try:
            fields = json.loads(text)
            # Unknown names are additions of a later release, which this version can do without.
            known = {field.name: fields["pass" if field.name == "pass_" else field.name] for field in _stored_fields()}
            sizes = dict(fields["parts"])
            if min(sizes.values(), default=0) < 0 or sum(sizes.values()) != len(rest):
                raise ValueError(f"its parts are said to have {sizes} bytes. Received: {len(rest)} bytes in all")
            known["parts"] = {}
            for name, size in sizes.items():
                known["parts"][name], rest = rest[:size], rest[size:]
            return cls(**known, version=version)
        except KeyError as error:
            raise StateError(f"feed state: the field {error} is missing") from error
        except (TypeError, ValueError, RecursionError) as error:
            raise StateError(f"feed state: not as this release writes it: {error}") from error

    def check(
        self,
        *,
        feed: str,
        policy: str,
        remainder: str,
        element_spec: str,
        fingerprint: str,
        seed: int | None = None,
        steps_per_epoch: int | types.EllipsisType | None = ...,
    ) -> None:
        """Checks that a feed can go on from this state. The number of ranks may differ.

        Args:
            feed: The feed's name.
            policy: Its policy.
            remainder: Its remainder.
            element_spec: The text of its dataset's `element_spec`.
            fingerprint: The fingerprint of its pipeline; "" is not compared.
            seed: The seed that the user gave; `None` takes that of the state.
            steps_per_epoch: Its `steps_per_epoch`; not compared if left out.

        Raises:
            StateError: Something differs. The message has both values of all that does, and what to do about it.
        """
        received: dict[str, Any] = {"feed": feed, "policy": policy, "remainder": remainder}
        if steps_per_epoch is not ...:
            received["steps_per_epoch"] = steps_per_epoch
        if seed is not None:
            received["seed"] = seed
        if _spec_digest(element_spec) != _spec_digest(self.element_spec):
            received["element_spec"] = _short_spec(element_spec)
        if fingerprint and self.fingerprint:
            received["fingerprint"] = fingerprint
        lines = []
        for name, value in received.items():
            own = getattr(self, name)
            if value != own:
                advice = _FITTING[name].format(state=own)
                lines.append(f"{name}: the state has {own!r}, the feed has {value!r}. {advice}")
        if lines:
            raise StateError("\n  ".join([f"feed {feed!r} can't go on from this state:", *lines]))


def _stored_fields() -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(FeedState) if field.name != "version"]


def _short_spec(text: str) -> str:
    # As JSON writes it: the bound is for the bytes of a state, and an odd character takes six of them.
    return text if len(json.dumps(text)) - 2 <= _MAX_SPEC else _spec_digest(text)


def _spec_digest(text: str) -> str:
    if text.startswith("sha256:"):
        return text
    return f"sha256:{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()}"


def _split(data: bytes) -> tuple[int, bytes, bytes]:
    """Returns the version, the JSON and the parts of a state that is whole."""
    if len(data) < _HEAD.size:
        raise StateError(f"feed state: {len(data)} bytes are too few, it begins with {_HEAD.size}: it was cut off")
    magic, length, digest = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise StateError(f"feed state: must begin with {_MAGIC!r}. Received: {magic!r}: not a feed state, or damaged")
    if length != len(data):
        what = "it was cut off" if len(data) < length else "something was added"
        raise StateError(f"feed state: must have {length} bytes. Received: {len(data)}: {what}, or damaged")
    body = data[_HEAD.size :]
    if hashlib.sha256(body).digest() != digest:
        raise StateError(
            f"feed state: its SHA-256 must be {digest.hex()}. Received: {hashlib.sha256(body).hexdigest()}: damaged"
        )
    if len(body) < _BODY.size:
        raise StateError(f"feed state: its body must have at least {_BODY.size} bytes. Received: {len(body)}")
    version, size = _BODY.unpack_from(body)
    if version != VERSION:
        raise StateError(
            f"feed state: this release of kerasfeed reads version {VERSION}. Received: version {version}. "
            "Update kerasfeed to the release that wrote it"
        )
    text, rest = body[_BODY.size : _BODY.size + size], body[_BODY.size + size :]
    if len(text) != size:
        raise StateError(f"feed state: its JSON must have {size} bytes. Received: {len(text)}")
    return version, text, rest
