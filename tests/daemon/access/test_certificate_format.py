"""When certificates end, as openssl says it; whatever else is refused."""

import ssl
import subprocess
from datetime import datetime
from pathlib import Path

import pytest
from certificates import Authority
from hypothesis import given
from hypothesis import strategies as st

from everstep.daemon.access.certificate_format import expiry_unix_s


def end_by_openssl(path: Path) -> float:
    said = subprocess.run(
        ["openssl", "x509", "-enddate", "-noout", "-in", path], capture_output=True, text=True, check=True
    ).stdout
    return datetime.strptime(f"{said.strip()} +0000", "notAfter=%b %d %H:%M:%S %Y GMT %z").timestamp()


@pytest.mark.parametrize("days", [1, 400, 20_000], ids=["UTCTime", "a year", "GeneralizedTime"])
def test_the_first_certificate_counts(tmp_path: Path, days: int) -> None:
    authority = Authority(tmp_path)
    path = authority.sign("node", "DNS:node7.example.org", days=days).certificate
    chain = b"text before\n" + path.read_bytes() + authority.certificate.read_bytes()
    assert expiry_unix_s(chain) == end_by_openssl(path)
    assert expiry_unix_s(authority.certificate.read_bytes()) == end_by_openssl(authority.certificate)


@given(st.binary(max_size=200))
def test_what_is_no_certificate_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no certificate"):
        expiry_unix_s(data)


def test_a_certificate_cut_anywhere_before_its_end_of_validity_is_refused(tmp_path: Path) -> None:
    der = ssl.PEM_cert_to_DER_cert(Authority(tmp_path).certificate.read_text())
    for length in range(len(der)):
        with pytest.raises(ValueError, match=r"cut off|no certificate"):
            expiry_unix_s(ssl.DER_cert_to_PEM_cert(der[:length]).encode())


@given(st.binary(min_size=1, max_size=300))
def test_bytes_in_a_pem_end_in_a_time_or_a_value_error(der: bytes) -> None:
    try:
        found = expiry_unix_s(ssl.DER_cert_to_PEM_cert(der).encode())
    except ValueError:
        return
    assert isinstance(found, float)
