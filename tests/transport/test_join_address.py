"""The join string, and the file that holds it."""

from __future__ import annotations

import pytest

from lightning_diloco.errors import ConfigError
from lightning_diloco.transport.address import (
    JoinAddress,
    is_loopback,
    join_host_port,
    new_token,
    read_join_file,
    split_host_port,
    write_join_file,
)

HASH = "0123456789abcdef" * 4


@pytest.mark.parametrize("host", ["10.0.0.1", "syncer.example.org", "::1", "fe80::1%eth0", "2001:db8::7"])
def test_parsing_a_join_string_gives_the_same_address(host):
    address = JoinAddress(host, 4100, "run-1.a_b", new_token(), HASH)
    assert JoinAddress.parse(address.join_string()) == address
    assert JoinAddress.parse(f" {address.join_string()}\n") == address


def test_the_join_string_has_the_documented_form():
    assert JoinAddress("::1", 7, "r", "tok", HASH).join_string() == f"diloco://[::1]:7/r#tok,{HASH}"


@pytest.mark.parametrize("standby", ["10.0.0.2:4101", "[::1]:7"])
def test_a_join_string_with_a_standby_can_be_parsed_and_swapped(standby):
    address = JoinAddress("10.0.0.1", 4100, "r", "tok", HASH, standby)
    assert address.join_string() == f"diloco://10.0.0.1:4100,{standby}/r#tok,{HASH}"
    assert JoinAddress.parse(address.join_string()) == address
    other = address.swapped()
    assert (other.host_port, other.standby, other.token) == (standby, "10.0.0.1:4100", "tok")
    assert other.swapped() == address


def test_the_token_is_in_no_text_but_the_join_string():
    address = JoinAddress("h", 7, "r", "sesame", HASH)
    for text in (repr(address), str(address), f"{address}", address.redacted(), address.host_port):
        assert "sesame" not in text
    assert "sesame" in address.join_string()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sesame",
        f"http://h:7/r#sesame,{HASH}",
        f"diloco://h/r#sesame,{HASH}",
        "diloco://h:7/r",
        "diloco://h:7/r#",
        "diloco://h:7/r#sesame",
        "diloco://h:7/r#sesame,",
        f"diloco://h:7#sesame,{HASH}",
        f"diloco://h:7/a/b#sesame,{HASH}",
        f"diloco://h:0/r#sesame,{HASH}",
        f"diloco://h:99999/r#sesame,{HASH}",
        f"diloco://h:x/r#sesame,{HASH}",
        "diloco://h:7/r#sesame,123",
        f"diloco://h:7/r#ses ame,{HASH}",
        f"diloco://[::1:7/r#sesame,{HASH}",
        f"diloco://h:7,other/r#sesame,{HASH}",
        f"diloco://h:7,other:99999/r#sesame,{HASH}",
        f"diloco://,other:7/r#sesame,{HASH}",
    ],
)
def test_a_bad_string_is_refused_without_showing_a_token(text):
    with pytest.raises(ConfigError) as caught:
        JoinAddress.parse(text)
    if "#" in text:
        assert "sesame" not in str(caught.value)


@pytest.mark.parametrize("text", ["", " \n"])
def test_the_error_for_an_empty_string_explains_the_join_file(text):
    with pytest.raises(ConfigError, match=r"is empty.*content of RUN_DIR/join.*wait for this file"):
        JoinAddress.parse(text)


def test_all_problems_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        JoinAddress("a b", 0, "", "", "x")
    assert len(caught.value.problems) == 5


def test_tokens_differ_and_are_long():
    assert len({new_token() for _ in range(100)}) == 100
    assert len(new_token()) >= 43


def test_a_join_file_is_private_and_replaced_atomically(tmp_path):
    path = tmp_path / "join"
    path.write_text("old")
    path.chmod(0o644)
    address = JoinAddress("127.0.0.1", 7, "r", "sesame", HASH)
    write_join_file(path, address)
    assert read_join_file(path) == address
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["join"]


def test_a_missing_join_file_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="join file"):
        read_join_file(tmp_path / "join")


@pytest.mark.parametrize(("text", "parts"), [("h:7", ("h", 7)), ("[::1]:0", ("::1", 0)), ("0.0.0.0:1", ("0.0.0.0", 1))])
def test_host_and_port_are_split_and_joined(text, parts):
    assert split_host_port(text) == parts
    assert join_host_port(*parts) == text


@pytest.mark.parametrize("text", ["", "h", ":7", "h:", "h:x", "h:-1", "h:65536", "::1:7"])
def test_a_bad_host_and_port_is_refused(text):
    with pytest.raises(ConfigError, match="host:port"):
        split_host_port(text)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_addresses_are_recognized(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "localhost.example.org", ""])
def test_other_addresses_are_not_loopback(host):
    assert not is_loopback(host)
