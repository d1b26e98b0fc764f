"""The address of a run, with the token that is needed to join.

    diloco://host:port/run#token,sha256
    diloco://host:port,standby:port/run#token,sha256      the run has a standby

1. The join string is a secret, because it is sufficient to join. It is written to files of mode 0600 and never logged.
2. `str`, `repr` and `redacted()` hide the token. Only `join_string()` shows it. No error message contains it.
3. Syncer and standby have the same token and certificate.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from lightning_diloco.errors import ConfigError

SCHEME = "diloco"
_FORM = "diloco://host:port/run#token,sha256"
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TOKEN = re.compile(r"[A-Za-z0-9_-]+")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_HOST = re.compile(r"[A-Za-z0-9._:%-]+")


@dataclass(frozen=True, slots=True)
class JoinAddress:
    """The address and secrets that a learner needs to join a run.

    Args:
        host: name or IP address; IPv6 without brackets.
        port: 1..65535.
        run: run id, 1 to 64 letters, digits, '.', '_' or '-'.
        token: letters, digits, '_' and '-'; see `new_token`.
        fingerprint: SHA-256 of the syncer's certificate (DER), 64 hex digits.
        standby: `host:port` of the syncer's standby; None: there is none, or it is not known.

    Raises:
        ConfigError: some fields are invalid; the message lists all problems.
    """

    host: str
    port: int
    run: str
    token: str = field(repr=False)
    fingerprint: str
    standby: str | None = None

    def __post_init__(self) -> None:
        problems = []
        if not _HOST.fullmatch(self.host):
            problems.append(f"host {self.host!r}: must be a name or an IP address; use the form {_FORM}")
        if not 1 <= self.port <= 65535:
            problems.append(f"port {self.port}: must be 1..65535; use the form {_FORM}")
        if not _RUN.fullmatch(self.run):
            problems.append(
                f"run {self.run!r}: must be 1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or "
                f"digit; use the form {_FORM}"
            )
        if not _TOKEN.fullmatch(self.token):
            problems.append(
                f"token of {len(self.token)} characters (not shown): must be letters, digits, '_' and '-', at least "
                "one; copy the whole join string, in quotes"
            )
        if not _FINGERPRINT.fullmatch(self.fingerprint):
            problems.append(
                f"certificate hash {self.fingerprint!r}: must be 64 lower-case hex digits (SHA-256); copy the whole "
                "join string, in quotes"
            )
        if self.standby is not None:
            try:
                split_host_port(self.standby)
            except ConfigError as error:
                problems.append(f"standby: {error}")
        if problems:
            raise ConfigError(problems)

    @classmethod
    def parse(cls, text: str) -> JoinAddress:
        """Parse a join string.

        Raises:
            ConfigError: the text does not have the form `diloco://host:port/run#token,sha256`; the message never
                contains the token.
        """
        shown, _, secret = text.strip().partition("#")
        if not shown:
            raise ConfigError(
                "the join string (DILOCO_JOIN, or join=) is empty. It is the content of RUN_DIR/join, which the syncer "
                "writes as soon as it can be joined: wait for this file, and check its path. To train alone, leave "
                "DILOCO_JOIN unset"
            )
        scheme, _, rest = shown.partition("://")
        places, _, run = rest.partition("/")
        first, _, standby = places.partition(",")
        try:
            place = urlsplit(f"//{first}")
            host, port = place.hostname, place.port
        except ValueError as error:
            raise ConfigError(f"join string {shown!r}: {error}; must be {_FORM}; copy it from RUN_DIR/join") from None
        token, _, fingerprint = secret.partition(",")
        if scheme != SCHEME or not host or port is None or not token or not fingerprint:
            raise ConfigError(f"join string {shown!r}: must be {_FORM}; copy all of it from RUN_DIR/join, in quotes")
        return cls(host, port, run, token, fingerprint.lower(), standby or None)

    @property
    def host_port(self) -> str:
        """`host:port`, with brackets around an IPv6 address."""
        return join_host_port(self.host, self.port)

    @property
    def _places(self) -> str:
        return self.host_port if self.standby is None else f"{self.host_port},{self.standby}"

    def swapped(self) -> JoinAddress:
        """Return the address with syncer and standby exchanged; it must have a standby."""
        assert self.standby is not None
        host, port = split_host_port(self.standby)
        return replace(self, host=host, port=port, standby=self.host_port)

    def join_string(self) -> str:
        """Return the join string, with the token."""
        return f"{SCHEME}://{self._places}/{self.run}#{self.token},{self.fingerprint}"

    def redacted(self) -> str:
        """Return the join string without the token."""
        return f"{SCHEME}://{self._places}/{self.run}#***,{self.fingerprint}"

    def __str__(self) -> str:
        return self.redacted()


def address_from(text: str) -> JoinAddress:
    """Parse a join string, or read the join file if the text is a path.

    Raises:
        ConfigError: see `JoinAddress.parse` and `read_join_file`.
    """
    return read_join_file(text) if text and "://" not in text else JoinAddress.parse(text)


def redact(text: str) -> str:
    """Remove the token from a text that starts with a join string."""
    if not text.strip().startswith(f"{SCHEME}://"):
        return text
    try:
        return JoinAddress.parse(text).redacted()
    except ConfigError:
        return f"{text.partition('#')[0]}#***"


def placed(address: JoinAddress, place: str) -> JoinAddress:
    """Return the address of a shard or a standby, which has the token and the certificate of the syncer.

    Args:
        address: address of the syncer.
        place: `host:port`; without a host, it is the syncer's.
    """
    host, port = split_host_port(place if place.partition(":")[0] else address.host_port.rpartition(":")[0] + place)
    return replace(address, host=host, port=port, standby=None)


def new_token() -> str:
    """Return a new token of 256 random bits."""
    return secrets.token_urlsafe(32)


def is_loopback(host: str) -> bool:
    """Return whether traffic to a host stays on this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def join_host_port(host: str, port: int) -> str:
    """Join host and port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(text: str) -> tuple[str, int]:
    """Split `host:port`; port 0 means any free port.

    Raises:
        ConfigError: the text is not of this form.
    """
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or not port.isdecimal() or int(port) > 65535 or (":" in host and not bracketed):
        raise ConfigError(f"address {text!r}: must be host:port or [IPv6]:port, port 0..65535; e.g. 127.0.0.1:0")
    return host.strip("[]"), int(port)


def write_join_file(path: str | os.PathLike[str], address: JoinAddress) -> None:
    """Write the join string atomically, readable only by its owner."""
    write_private(Path(path), (address.join_string() + "\n").encode())


def read_join_file(path: str | os.PathLike[str]) -> JoinAddress:
    """Read a join file.

    Raises:
        ConfigError: the file cannot be read, or does not hold a join string.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        folder = Path(path).parent
        raise ConfigError(
            f"join file {str(path)!r}: not there; is the run started? {folder} may also be no run directory"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"join file {str(path)!r}: {error}; must be a readable file; is the run started?") from error
    return JoinAddress.parse(text)


def write_private(path: Path, data: bytes) -> None:
    """Replace a file atomically and durably, with mode 0600 from the start."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
