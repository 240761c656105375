from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Position(_message.Message):
    __slots__ = ("epoch", "step")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("first_epoch", "origin_pass", "origin_element", "steps_per_epoch", "first_step")
    FIRST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_PASS_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_ELEMENT_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    first_epoch: int
    origin_pass: int
    origin_element: int
    steps_per_epoch: int
    first_step: int
    def __init__(self, first_epoch: _Optional[int] = ..., origin_pass: _Optional[int] = ..., origin_element: _Optional[int] = ..., steps_per_epoch: _Optional[int] = ..., first_step: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "feed", "rank", "nonce")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    FEED_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    feed: str
    rank: int
    nonce: bytes
    def __init__(self, protocol: _Optional[int] = ..., feed: _Optional[str] = ..., rank: _Optional[int] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class Proof(_message.Message):
    __slots__ = ("proof", "options", "segment", "acknowledged")
    PROOF_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    proof: bytes
    options: str
    segment: Segment
    acknowledged: Position
    def __init__(self, proof: _Optional[bytes] = ..., options: _Optional[str] = ..., segment: _Optional[_Union[Segment, _Mapping]] = ..., acknowledged: _Optional[_Union[Position, _Mapping]] = ...) -> None: ...

class Read(_message.Message):
    __slots__ = ("reader", "position", "through_epochs", "credit_steps", "credit_bytes", "left", "direct", "last_epoch")
    READER_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    THROUGH_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    CREDIT_STEPS_FIELD_NUMBER: _ClassVar[int]
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    LAST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    reader: int
    position: Position
    through_epochs: bool
    credit_steps: int
    credit_bytes: int
    left: Position
    direct: bool
    last_epoch: int
    def __init__(self, reader: _Optional[int] = ..., position: _Optional[_Union[Position, _Mapping]] = ..., through_epochs: bool = ..., credit_steps: _Optional[int] = ..., credit_bytes: _Optional[int] = ..., left: _Optional[_Union[Position, _Mapping]] = ..., direct: bool = ..., last_epoch: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("reader", "pulled", "acknowledged", "trained", "waiting")
    class TrainedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    READER_FIELD_NUMBER: _ClassVar[int]
    PULLED_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    reader: int
    pulled: Position
    acknowledged: Position
    trained: _containers.ScalarMap[int, int]
    waiting: bool
    def __init__(self, reader: _Optional[int] = ..., pulled: _Optional[_Union[Position, _Mapping]] = ..., acknowledged: _Optional[_Union[Position, _Mapping]] = ..., trained: _Optional[_Mapping[int, int]] = ..., waiting: bool = ...) -> None: ...

class Bind(_message.Message):
    __slots__ = ("binding", "position", "steps_per_epoch")
    BINDING_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    binding: int
    position: Position
    steps_per_epoch: int
    def __init__(self, binding: _Optional[int] = ..., position: _Optional[_Union[Position, _Mapping]] = ..., steps_per_epoch: _Optional[int] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: str
    def __init__(self, error: _Optional[str] = ...) -> None: ...

class AskStatus(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AskState(_message.Message):
    __slots__ = ("position", "again_after")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    AGAIN_AFTER_FIELD_NUMBER: _ClassVar[int]
    position: Position
    again_after: int
    def __init__(self, position: _Optional[_Union[Position, _Mapping]] = ..., again_after: _Optional[int] = ...) -> None: ...

class RankMessage(_message.Message):
    __slots__ = ("hello", "proof", "read", "progress", "bind", "leave", "ask_status", "ask_state")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    BIND_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    ASK_STATUS_FIELD_NUMBER: _ClassVar[int]
    ASK_STATE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    proof: Proof
    read: Read
    progress: Progress
    bind: Bind
    leave: Leave
    ask_status: AskStatus
    ask_state: AskState
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., proof: _Optional[_Union[Proof, _Mapping]] = ..., read: _Optional[_Union[Read, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., bind: _Optional[_Union[Bind, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., ask_status: _Optional[_Union[AskStatus, _Mapping]] = ..., ask_state: _Optional[_Union[AskState, _Mapping]] = ...) -> None: ...

class Challenge(_message.Message):
    __slots__ = ("nonce", "proof")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    proof: bytes
    def __init__(self, nonce: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("spec", "cardinality", "seed", "segment", "elements", "fingerprint", "foreseen", "data")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    CARDINALITY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    FORESEEN_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    spec: bytes
    cardinality: int
    seed: int
    segment: Segment
    elements: int
    fingerprint: str
    foreseen: str
    data: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, spec: _Optional[bytes] = ..., cardinality: _Optional[int] = ..., seed: _Optional[int] = ..., segment: _Optional[_Union[Segment, _Mapping]] = ..., elements: _Optional[int] = ..., fingerprint: _Optional[str] = ..., foreseen: _Optional[str] = ..., data: _Optional[_Iterable[str]] = ...) -> None: ...

class State(_message.Message):
    __slots__ = ("position", "element", "digest", "way", "parts", "offset", "data")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PASS_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WAY_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    position: Position
    element: int
    digest: str
    way: str
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    offset: int
    data: bytes
    def __init__(self, position: _Optional[_Union[Position, _Mapping]] = ..., element: _Optional[int] = ..., digest: _Optional[str] = ..., way: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., **kwargs) -> None: ...

class Part(_message.Message):
    __slots__ = ("name", "size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class Component(_message.Message):
    __slots__ = ("shape", "offset", "length")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    length: int
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("reader", "position", "size", "components", "offset", "data")
    READER_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    reader: int
    position: Position
    size: int
    components: _containers.RepeatedCompositeFieldContainer[Component]
    offset: int
    data: bytes
    def __init__(self, reader: _Optional[int] = ..., position: _Optional[_Union[Position, _Mapping]] = ..., size: _Optional[int] = ..., components: _Optional[_Iterable[_Union[Component, _Mapping]]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("reader", "epoch", "steps")
    READER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    reader: int
    epoch: int
    steps: int
    def __init__(self, reader: _Optional[int] = ..., epoch: _Optional[int] = ..., steps: _Optional[int] = ...) -> None: ...

class Bound(_message.Message):
    __slots__ = ("binding", "segment", "position")
    BINDING_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    binding: int
    segment: Segment
    position: Position
    def __init__(self, binding: _Optional[int] = ..., segment: _Optional[_Union[Segment, _Mapping]] = ..., position: _Optional[_Union[Position, _Mapping]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("kind", "message")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PRODUCER: _ClassVar[Failure.Kind]
        RANKS: _ClassVar[Failure.Kind]
        REFUSED: _ClassVar[Failure.Kind]
        MISMATCH: _ClassVar[Failure.Kind]
    PRODUCER: Failure.Kind
    RANKS: Failure.Kind
    REFUSED: Failure.Kind
    MISMATCH: Failure.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    kind: Failure.Kind
    message: str
    def __init__(self, kind: _Optional[_Union[Failure.Kind, str]] = ..., message: _Optional[str] = ...) -> None: ...

class RankStatistics(_message.Message):
    __slots__ = ("rank", "trained")
    RANK_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    trained: int
    def __init__(self, rank: _Optional[int] = ..., trained: _Optional[int] = ...) -> None: ...

class EpochStatistics(_message.Message):
    __slots__ = ("epoch", "elements", "steps", "dropped", "complete", "ranks")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    elements: int
    steps: int
    dropped: int
    complete: bool
    ranks: _containers.RepeatedCompositeFieldContainer[RankStatistics]
    def __init__(self, epoch: _Optional[int] = ..., elements: _Optional[int] = ..., steps: _Optional[int] = ..., dropped: _Optional[int] = ..., complete: bool = ..., ranks: _Optional[_Iterable[_Union[RankStatistics, _Mapping]]] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("waiting_for", "epochs")
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    waiting_for: str
    epochs: _containers.RepeatedCompositeFieldContainer[EpochStatistics]
    def __init__(self, waiting_for: _Optional[str] = ..., epochs: _Optional[_Iterable[_Union[EpochStatistics, _Mapping]]] = ...) -> None: ...

class ProducerMessage(_message.Message):
    __slots__ = ("challenge", "welcome", "chunk", "end", "bound", "failure", "status", "state")
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    challenge: Challenge
    welcome: Welcome
    chunk: Chunk
    end: End
    bound: Bound
    failure: Failure
    status: Status
    state: State
    def __init__(self, challenge: _Optional[_Union[Challenge, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ..., bound: _Optional[_Union[Bound, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., status: _Optional[_Union[Status, _Mapping]] = ..., state: _Optional[_Union[State, _Mapping]] = ...) -> None: ...
