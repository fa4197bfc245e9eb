"""The token's file counts as it is now; certificates that do not fit each other yet leave those before."""

from pathlib import Path

import pytest
from certificates import Authority

from everstep.core.errors import ConfigError
from everstep.daemon.web.credentials import Credentials
from everstep.daemon.web.section import MetricsSection

TOKEN, OTHER = "0123456789abcdef" * 4, "fedcba9876543210" * 4


def test_a_token_that_cannot_be_read_is_nobodys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    credentials = Credentials(MetricsSection(token_file=str(path)))
    assert credentials.token_holds(TOKEN)
    assert not credentials.token_holds("")
    path.chmod(0o644)
    assert not credentials.token_holds(TOKEN), "others may have read it"
    path.chmod(0o600)
    path.write_text("short")
    assert not credentials.token_holds("short")
    assert not credentials.token_holds(TOKEN)
    path.unlink()
    assert not credentials.token_holds(TOKEN)
    assert not credentials.token_holds("")
    assert [record.message.split()[0] for record in caplog.records] == ["web_credentials_unusable"] * 5
    path.write_text(OTHER)
    path.chmod(0o600)
    assert credentials.token_holds(OTHER)
    assert not credentials.token_holds(TOKEN)


def test_a_token_that_cannot_be_read_at_the_start_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.token_file"):
        Credentials(MetricsSection(token_file=str(tmp_path / "none")))


def test_a_certificate_whose_key_comes_later(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    before, after = authority.sign("before", "IP:127.0.0.1"), authority.sign("after", "IP:127.0.0.1")
    certificate, key = tmp_path / "c.pem", tmp_path / "c.key"
    certificate.write_bytes(Path(before.certificate).read_bytes())
    key.write_bytes(Path(before.key).read_bytes())
    credentials = Credentials(MetricsSection(certificate_file=str(certificate), key_file=str(key)))
    first = credentials.context()
    assert first is not None
    assert credentials.context() is first
    certificate.write_bytes(Path(after.certificate).read_bytes())
    assert credentials.context() is first, "half of a renewal"
    key.unlink()
    assert credentials.context() is first
    key.write_bytes(Path(after.key).read_bytes())
    assert credentials.context() is not first
