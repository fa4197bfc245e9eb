from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Dataset(_message.Message):
    __slots__ = ("uid", "content", "fingerprint", "sample_count")
    UID_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    uid: int
    content: str
    fingerprint: str
    sample_count: int
    def __init__(self, uid: _Optional[int] = ..., content: _Optional[str] = ..., fingerprint: _Optional[str] = ..., sample_count: _Optional[int] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("number", "digest", "data")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    number: int
    digest: int
    data: bytes
    def __init__(self, number: _Optional[int] = ..., digest: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("dataset", "samples", "size_bytes_max", "members_digest")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    dataset: Dataset
    samples: _containers.RepeatedScalarFieldContainer[int]
    size_bytes_max: int
    members_digest: int
    def __init__(self, dataset: _Optional[_Union[Dataset, _Mapping]] = ..., samples: _Optional[_Iterable[int]] = ..., size_bytes_max: _Optional[int] = ..., members_digest: _Optional[int] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("samples", "left_out")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    left_out: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., left_out: _Optional[_Iterable[int]] = ...) -> None: ...

class OfferRequest(_message.Message):
    __slots__ = ("dataset", "samples", "members_digest")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    dataset: Dataset
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    members_digest: int
    def __init__(self, dataset: _Optional[_Union[Dataset, _Mapping]] = ..., samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., members_digest: _Optional[int] = ...) -> None: ...

class OfferResponse(_message.Message):
    __slots__ = ("held_count", "room_bytes")
    HELD_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROOM_BYTES_FIELD_NUMBER: _ClassVar[int]
    held_count: int
    room_bytes: int
    def __init__(self, held_count: _Optional[int] = ..., room_bytes: _Optional[int] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProbeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
