"""The server of the page: access, answers, metrics (read by Prometheus' own parser), and its end."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lightning_diloco.errors import ConfigError
from lightning_diloco.live.metrics import exposition
from lightning_diloco.live.server import PageServer, page
from lightning_diloco.live.watch import Watch
from tests.live.told import learner, status


@pytest.fixture
def watch() -> Watch:
    return Watch("folder")


@pytest.fixture
def server(watch: Watch, tmp_path: Path) -> Iterator[PageServer]:
    with PageServer(watch, "127.0.0.1:0", identity_dir=tmp_path) as made:
        yield made


def get(server: PageServer, path: str, **headers: str) -> tuple[http.client.HTTPResponse, str]:
    where = urlsplit(server.url)
    if where.scheme == "https":
        trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection("127.0.0.1", where.port, context=trusting, timeout=10)
    else:
        connection = http.client.HTTPConnection("127.0.0.1", where.port, timeout=10)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text


def test_the_page_is_complete_and_loads_no_external_resources(server: PageServer) -> None:
    answer, text = get(server, "/")
    assert (answer.status, text.encode()) == (200, page())
    assert "/* style */" not in text
    assert "/* script */" not in text
    assert all(word not in text for word in ("http://", "https://", "@import", "url("))
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]


def test_the_state_is_json_also_with_nan_and_infinity(server: PageServer, watch: Watch) -> None:
    watch.saw(status(10, learner("l0", 10, loss=float("nan")), goodput=float("inf")))
    state = json.loads(get(server, "/state.json")[1], parse_constant=pytest.fail)
    assert state["status"]["goodput"] is None
    assert state["status"]["learners"][0]["metrics"]["loss"] is None


def test_a_request_with_a_foreign_host_name_is_refused(server: PageServer) -> None:
    assert get(server, "/state.json", Host="evil.example:80")[0].status == 403
    assert get(server, "/state.json", Host="localhost:80")[0].status == 200


def test_other_paths_are_not_found(server: PageServer) -> None:
    answer, text = get(server, "/../etc/passwd")
    assert (answer.status, text) == (404, "there are /, /state.json and /metrics\n")


def test_other_addresses_than_loopback_need_tls_and_a_token(watch: Watch, tmp_path: Path) -> None:
    with PageServer(watch, "0.0.0.0:0", identity_dir=tmp_path) as server:
        assert server.url.startswith("https://0.0.0.0:")
        assert [get(server, path)[0].status for path in ("/", "/state.json", "/metrics?token=x")] == [403] * 3
        moved, _ = get(server, f"/?token={server.token}")
        cookie = moved.headers["Set-Cookie"]
        assert (moved.status, moved.headers["Location"]) == (303, "/")
        assert "HttpOnly; Secure; SameSite=Strict" in cookie
        assert get(server, "/", Cookie=cookie.partition(";")[0])[0].status == 200
        assert get(server, "/metrics", Authorization=f"Bearer {server.token}")[0].status == 200
        assert get(server, "/metrics", Authorization=f"Bearer {server.token}x")[0].status == 403


def test_an_address_in_use_is_refused_with_advice(server: PageServer, watch: Watch, tmp_path: Path) -> None:
    taken = server.url.removeprefix("http://").rstrip("/")
    with pytest.raises(ConfigError, match=r"cannot be served there \(Address already in use\).*127\.0\.0\.1:0"):
        PageServer(watch, taken, identity_dir=tmp_path)


def test_an_open_page_receives_the_final_state(watch: Watch, tmp_path: Path) -> None:
    with PageServer(watch, "127.0.0.1:0", identity_dir=tmp_path, linger_s=10.0) as server:
        get(server, "/state.json")
        watch.ended({"status": "finished"})
        later: list[str] = []
        timer = threading.Timer(0.2, lambda: later.append(get(server, "/state.json")[1]))
        timer.start()
    timer.join()
    assert json.loads(later[0])["summary"] == {"status": "finished"}


def test_metrics_are_valid_for_prometheus(server: PageServer, watch: Watch) -> None:
    watch.saw(
        status(100, learner("l0", 100, loss=3.5, eval_loss=3.25), learner("l1", 90, phase="lapsed"), goodput=None)
    )
    answer, text = get(server, "/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["diloco_up",] == 1
    assert samples["diloco_fleet_tokens_total",] == 409_600
    assert samples["diloco_learners", "lapsed"] == 1
    assert samples["diloco_learner_loss", "l0"] == 3.5
    assert samples["diloco_learner_anchor_loss", "l0"] == 3.25
    assert ("diloco_learner_loss", "l1") not in samples
    assert samples["diloco_ledger_token_fragments", "discarded_lapsed"] == 7
    assert samples["diloco_fragment_version", "1"] == 5
    assert ("diloco_goodput_ratio",) not in samples


def test_without_an_answer_the_only_metric_is_that_the_syncer_is_down() -> None:
    lines = [line for line in exposition(None).decode().splitlines() if not line.startswith("#")]
    assert lines == ["diloco_up 0.0"]
