"""The data that a standby needs to follow a primary: the join string, and a key that learners do not have.

    RUN_DIR/standby        diloco://host:port/run#token,sha256,key

1. The key follows from the private key of the run's certificate. A standby gets a copy of this certificate, so both
   syncers have the same key, and learners trust both.
2. The file is a secret, as RUN_DIR/join is. Its holder can copy the whole run.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from pathlib import Path

from lightning_diloco.errors import ConfigError
from lightning_diloco.transport.address import JoinAddress, read_join_file, write_private
from lightning_diloco.transport.identity import ServerIdentity

FILE = "standby"
_FORM = "diloco://host:port/run#token,sha256,key"


@dataclass(frozen=True, slots=True)
class Invitation:
    """The address of a primary, and the key of its standby."""

    address: JoinAddress
    key: str = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> Invitation:
        """Parse the content of RUN_DIR/standby, or read it if the text is a path.

        Raises:
            ConfigError: the text does not have the form `diloco://host:port/run#token,sha256,key`; the message
                contains neither token nor key.
        """
        if "://" not in text:
            try:
                text = Path(text).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{text!r}: {error}; must be {_FORM}, or a file with it: RUN_DIR/standby") from error
        rest, _, key = text.strip().rpartition(",")
        if "," not in rest.partition("#")[2]:
            shown = text.partition("#")[0]
            raise ConfigError(
                f"{shown!r} has no key of a standby; must be {_FORM}; copy all of it from RUN_DIR/standby of the "
                "primary, not RUN_DIR/join"
            )
        return cls(JoinAddress.parse(rest), key)

    @classmethod
    def of(cls, address: JoinAddress, identity: ServerIdentity) -> Invitation:
        """Return the invitation to a run."""
        return cls(address, hmac.new(identity.key, b"standby of " + address.run.encode(), "sha256").hexdigest())

    def check(self, run_dir: Path) -> None:
        """Check that this directory holds no other run.

        Raises:
            ConfigError: it does, and a standby would replace its files.
        """
        join, folder = run_dir / "join", run_dir / "syncer"
        run = read_join_file(join).run if join.exists() else self.address.run
        is_certified = (folder / "identity.pem").exists()
        if run != self.address.run or (
            is_certified and ServerIdentity.load_or_create(folder).fingerprint != self.address.fingerprint
        ):
            raise ConfigError(
                f"--run-dir {run_dir} holds another run than {self.address.run} of the primary at "
                f"{self.address.host_port}; a standby would replace its files; choose an empty directory"
            )

    def write(self, run_dir: Path) -> None:
        """Write RUN_DIR/standby, readable only by its owner."""
        write_private(run_dir / FILE, self.text().encode() + b"\n")

    def text(self) -> str:
        """Return the content of RUN_DIR/standby, with its secrets."""
        return f"{self.address.join_string()},{self.key}"
