"""RUN_DIR/standby, the invitation with which a standby is started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_diloco.errors import ConfigError
from lightning_diloco.syncer.process import SyncerOptions, _first_primary
from lightning_diloco.syncer.standby.follower import become_standby, primary_of
from lightning_diloco.syncer.standby.invitation import Invitation
from lightning_diloco.transport.address import JoinAddress, write_join_file, write_private
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


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def begun(run_dir: Path, address: JoinAddress) -> Invitation:
    """Make a directory with a run, as far as its start reads it."""
    identity = ServerIdentity.load_or_create(run_dir / "syncer")
    address = replace(address, fingerprint=identity.fingerprint)
    write_join_file(run_dir / "join", address)
    (run_dir / "syncer" / "log").mkdir()
    return Invitation.of(address, identity)


def options(run_dir: Path, standby_of: Invitation | None = None, **more: bool) -> SyncerOptions:
    return SyncerOptions(run_dir=run_dir, listen="127.0.0.1:0", standby_of=standby_of, **more)


@pytest.mark.parametrize("loses_join", [False, True])
def test_a_directory_with_another_run_is_refused_and_stays_as_it_is(tmp_path: Path, loses_join: bool) -> None:
    primary, run_dir = begun(tmp_path / "primary", ADDRESS), tmp_path / "mine"
    begun(run_dir, replace(ADDRESS, run="other"))
    if loses_join:
        (run_dir / "join").unlink()
    before = files_of(run_dir)
    with pytest.raises(ConfigError, match=f"{run_dir} holds another run than run of the primary at 10.0.0.1:4100"):
        _first_primary(options(run_dir, primary))
    assert files_of(run_dir) == before


def test_the_directory_of_a_standby_is_refused_for_another_run(tmp_path: Path) -> None:
    primary, other = begun(tmp_path / "primary", ADDRESS), begun(tmp_path / "other", replace(ADDRESS, run="other"))
    run_dir = tmp_path / "standby"
    (run_dir / "syncer").mkdir(parents=True)
    write_private(run_dir / "syncer" / "identity.pem", (tmp_path / "primary" / "syncer" / "identity.pem").read_bytes())
    become_standby(run_dir, primary)
    assert _first_primary(options(run_dir, primary)) == primary
    with pytest.raises(ConfigError, match="holds another run"):
        _first_primary(options(run_dir, other))
    assert primary_of(run_dir) == primary


def test_a_standby_needs_a_directory_of_its_own(tmp_path: Path) -> None:
    primary = begun(tmp_path, ADDRESS)
    with pytest.raises(ConfigError, match=r"is the directory of the primary at 10\.0\.0\.1:4100"):
        _first_primary(options(tmp_path, primary))


def test_only_a_run_can_be_taken_over(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        _first_primary(options(tmp_path, takes_over=True))
    begun(tmp_path, ADDRESS)
    assert _first_primary(options(tmp_path, takes_over=True)) is None
