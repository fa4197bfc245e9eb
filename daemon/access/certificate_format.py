"""When a certificate ends, read from its bytes (X.509, RFC 5280 section 4.1). Pure.

Of the structure only what stands before the validity is walked; nothing is verified here, TLS does that.
"""

import binascii
import calendar
import re

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----\s*(?P<body>[A-Za-z0-9+/=\s]+?)-----END CERTIFICATE-----")
_SEQUENCE, _VERSION = 0x30, 0xA0
_YEAR_DIGITS = {0x17: 2, 0x18: 4}
"""Of UTCTime and GeneralizedTime."""
_TIME = re.compile(rb"(?P<year>\d\d(?:\d\d)?)(\d\d)(\d\d)(\d\d)(\d\d)(\d\d)Z")
_LENGTH_BYTES_MAX = 3


def expiry_unix_s(pem: bytes) -> float:
    """Return when the first certificate ends that stands in `pem`: the one that is shown. Unix seconds.

    Raises:
        ValueError: there is none, or it is no certificate.
    """
    found = _PEM.search(pem)
    if found is None:
        raise ValueError("no certificate in PEM")
    try:
        der = binascii.a2b_base64(found["body"])
    except binascii.Error as error:
        raise ValueError(f"no certificate in PEM: {error}") from error
    signed = _inside(_inside(der, 0, _SEQUENCE), 0, _SEQUENCE)
    at = _after(signed, 0) if signed[:1] == bytes([_VERSION]) else 0
    for _ in range(3):  # serial number, algorithm, issuer
        at = _after(signed, at)
    validity = _inside(signed, at, _SEQUENCE)
    return _time(validity, _after(validity, 0))


def _time(data: bytes, at: int) -> float:
    tag, start, stop = _element(data, at)
    year_digits = _YEAR_DIGITS.get(tag)
    found = _TIME.fullmatch(data[start:stop])
    if year_digits is None or found is None or len(found["year"]) != year_digits:
        raise ValueError(f"a time has the tag {tag:#x} and {stop - start} bytes")
    year, *rest = (int(each) for each in found.groups())
    if year_digits == 2:  # 1950 to 2049
        year += 1900 if year >= 50 else 2000
    return float(calendar.timegm((year, *rest)))


def _inside(data: bytes, at: int, wanted: int) -> bytes:
    tag, start, stop = _element(data, at)
    if tag != wanted:
        raise ValueError(f"tag {tag:#x} where {wanted:#x} should be")
    return data[start:stop]


def _after(data: bytes, at: int) -> int:
    return _element(data, at)[2]


def _element(data: bytes, at: int) -> tuple[int, int, int]:
    """Return the tag of what begins at `at`, and where its content begins and ends."""
    if at + 2 > len(data):
        raise ValueError("it is cut off")
    tag, length, start = data[at], data[at + 1], at + 2
    if length & 0x80:
        count = length & 0x7F
        if not 0 < count <= _LENGTH_BYTES_MAX:
            raise ValueError(f"a length of {count} bytes")
        length, start = int.from_bytes(data[start : start + count], "big"), start + count
    if start + length > len(data):
        raise ValueError("it is cut off")
    return tag, start, start + length
