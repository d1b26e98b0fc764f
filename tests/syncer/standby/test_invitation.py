"""RUN_DIR/standby, the invitation with which a standby is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_diloco.errors import ConfigError
from lightning_diloco.syncer.standby.invitation import Invitation
from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.identity import ServerIdentity

ADDRESS = JoinAddress("10.0.0.1", 4100, "run", "sesame", "0123456789abcdef" * 4)


def test_an_invitation_is_parsed_from_its_text_and_from_its_file(tmp_path: Path) -> None:
    invitation = Invitation.of(ADDRESS, ServerIdentity.create())
    invitation.write(tmp_path)
    assert (tmp_path / "standby").stat().st_mode & 0o777 == 0o600
    assert Invitation.parse(invitation.text()) == invitation
    assert Invitation.parse(str(tmp_path / "standby")) == invitation


def test_the_key_belongs_to_the_certificate_and_to_the_run() -> None:
    identity = ServerIdentity.create()
    assert Invitation.of(ADDRESS, identity).key == Invitation.of(ADDRESS, identity).key
    assert Invitation.of(ADDRESS, identity).key != Invitation.of(ADDRESS, ServerIdentity.create()).key
    other = JoinAddress("10.0.0.1", 4100, "other", "sesame", ADDRESS.fingerprint)
    assert Invitation.of(ADDRESS, identity).key != Invitation.of(other, identity).key


@pytest.mark.parametrize("text", [ADDRESS.join_string(), "missing-file", "diloco://h:7/r#sesame,key"])
def test_an_invalid_invitation_is_refused_without_showing_secrets(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Invitation.parse(text)
    assert "standby" in str(caught.value)
    assert "sesame" not in str(caught.value)


def test_secrets_are_not_in_the_repr() -> None:
    invitation = Invitation.of(ADDRESS, ServerIdentity.create())
    assert invitation.key not in repr(invitation)
    assert "sesame" not in repr(invitation)
