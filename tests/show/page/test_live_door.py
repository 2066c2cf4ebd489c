"""Who may come in to the live page: names, tokens, methods, paths, and the headers of every answer."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowledger.flow.errors import BadInput
from flowledger.show.page import door
from flowledger.show.page.address import Address, address_of, bind, is_address
from flowledger.show.page.door import Door
from tests.diagnose.alarm_stories import metric, written
from tests.show.page.live_server import Browser, serving

TOKEN = "a-token-of-forty-three-characters-or-so-____"
SECRET = "what stands in the next directory"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run, and a file beside it that is nobody's business."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "secret.txt").write_text(SECRET)
    return written(folder / "small", [(0, metric(step, "grad_norm", 0.5)) for step in range(3)])


@pytest.fixture(scope="module")
def here(run: Path) -> Iterator[Browser]:
    """Served on this machine alone."""
    with serving(run) as browser:
        yield browser


@pytest.fixture(scope="module")
def elsewhere(run: Path) -> Iterator[Browser]:
    """Served as it would be on another address."""
    with serving(run, token=TOKEN) as browser:
        yield browser


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "[::1]", "LocalHost"])
def test_it_answers_to_its_own_names(here: Browser, name: str) -> None:
    assert here.ask("/view/overview", host=f"{name}:{here.port}").status == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:{port}", "127.0.0.1.nip.io:{port}", "10.0.0.1:{port}",
     "[::2]:{port}", "localhost:{port}@evil.example", "", ":{port}", "127.0.0.1:{port}:{port}"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/", "/view/overview", "/events"])
def test_another_name_is_turned_away(here: Browser, path: str, host: str) -> None:
    answer = here.ask(path, host=host.format(port=here.port))
    assert (answer.status, b"small" in answer.body) == (403, False)
    assert f"http://127.0.0.1:{here.port}/".encode() in answer.body  # it says which name is right


def test_without_a_name_or_with_two_nobody_comes_in(here: Browser) -> None:
    for lines in ("", f"Host: 127.0.0.1:{here.port}\r\nHost: evil.example\r\n"):
        with socket.create_connection(("127.0.0.1", here.port), timeout=10) as made:
            made.sendall(f"GET / HTTP/1.1\r\n{lines}Connection: close\r\n\r\n".encode())
            assert made.recv(100).split()[1] in (b"403", b"400")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
def test_nothing_can_be_done_but_look(here: Browser, method: str) -> None:
    answer = here.ask("/", method)
    assert answer.status in (400, 405)
    if answer.status == 405:
        assert answer.headers["allow"] == "GET, HEAD"


def test_head_has_the_headers_and_no_more(here: Browser) -> None:
    for path in ("/", "/view/overview", "/events"):
        answer = here.ask(path, "HEAD")
        assert (answer.status, answer.body) == (200, b"")


@pytest.mark.parametrize(
    "path",
    ["/../secret.txt", "/..%2fsecret.txt", "/view/../../secret.txt", "/view/..%2f..%2fsecret.txt", "/%2e%2e/secret.txt", "//etc/passwd", "/manifest.json",
     "/view/overview/../../manifest.json", "/parts", "/view/%00", "/static/page.css", "/view/overview%0d%0aX:y"],
)  # fmt: skip
def test_no_file_is_served(here: Browser, path: str) -> None:
    answer = here.ask(path)
    assert answer.status == 404
    assert SECRET.encode() not in answer.body and b"grad_norm" not in answer.body and b"root:" not in answer.body


@pytest.mark.parametrize("query", ["rank=-1", "rank=x", "step=1.5", "rank=1%27%20OR%201=1", "step=%F0%9F%98%80"])
def test_a_bad_choice_is_told(here: Browser, query: str) -> None:
    answer = here.ask(f"/view/overview?{query}")
    assert answer.status == 400
    assert "is no number" in answer.json["error"]


def test_every_answer_has_the_headers(here: Browser, elsewhere: Browser) -> None:
    answers = [
        here.ask("/"),
        here.ask("/view/overview"),
        here.ask("/nothing"),
        here.ask("/", "POST"),
        here.ask("/", host="evil.example"),
        elsewhere.ask("/"),
    ]
    assert [answer.status for answer in answers] == [200, 200, 404, 405, 403, 403]
    for answer in answers:
        told = answer.headers
        assert told["x-content-type-options"] == "nosniff"
        assert told["referrer-policy"] == "no-referrer"
        assert told["cross-origin-resource-policy"] == "same-origin"
        assert told["cache-control"] == "no-store"
        assert "frame-ancestors 'none'" in told["content-security-policy"]
        assert "access-control-allow-origin" not in told and "server" not in told


def test_the_pages_policy_is_the_files_and_stands_in_the_header_too(here: Browser) -> None:
    answer = here.ask("/")
    policy = answer.headers["content-security-policy"]
    within = answer.body.decode().partition('Content-Security-Policy" content="')[2].partition('"')[0]
    assert policy == f"{within}; frame-ancestors 'none'"
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert "unsafe" not in policy and "http:" not in policy and "*" not in policy


def test_another_page_may_not_ask(here: Browser) -> None:
    assert here.ask("/view/overview", sec_fetch_site="cross-site", sec_fetch_mode="no-cors").status == 403
    assert here.ask("/events", sec_fetch_site="same-site", sec_fetch_mode="cors").status == 403
    assert here.ask("/view/overview", sec_fetch_site="same-origin", sec_fetch_mode="cors").status == 200
    assert here.ask("/", sec_fetch_site="cross-site", sec_fetch_mode="navigate").status == 200  # a link may lead here


# --------------------------------------------------------------------------------------------------------------- the token


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/view/overview",
        "/events",
        "/?token=",
        f"/?token={TOKEN[:-1]}",
        f"/?token={TOKEN}x",
        "/?token=%C3%A9",
        f"/?Token={TOKEN}",
    ],
)
def test_without_the_token_nobody_comes_in(elsewhere: Browser, path: str) -> None:
    answer = elsewhere.ask(path)
    assert answer.status == 403
    assert "set-cookie" not in answer.headers and TOKEN.encode() not in answer.body


def test_the_token_is_kept_in_a_cookie_that_no_script_can_read(elsewhere: Browser) -> None:
    answer = elsewhere.ask(f"/?token={TOKEN}")
    assert answer.status == 200
    cookie, *attributes = answer.headers["set-cookie"].split("; ")
    assert set(attributes) == {"Path=/", "HttpOnly", "SameSite=Strict"}
    assert cookie == f"flowledger-{elsewhere.port}={TOKEN}"
    assert TOKEN.encode() not in answer.body
    assert elsewhere.ask("/view/overview", cookie=cookie).status == 200
    assert elsewhere.ask("/view/overview", cookie=f"other=1; {cookie}").status == 200
    assert "set-cookie" not in elsewhere.ask("/view/overview", cookie=cookie).headers
    for wrong in (
        f"{cookie}x",
        cookie[:-1],
        f"flowledger-1={TOKEN}",
        "flowledger",
        "=;=;\\",
        f"flowledger-{elsewhere.port}=é",
    ):
        assert elsewhere.ask("/view/overview", cookie=wrong).status == 403


def test_here_no_token_is_asked_for_and_no_cookie_left(here: Browser) -> None:
    assert "set-cookie" not in here.ask("/?token=x").headers


def test_on_another_address_it_has_a_token_of_its_own_and_names_of_the_machine() -> None:
    listening = bind(Address("0.0.0.0"))
    with listening:
        one, other = Door.of(listening), Door.of(listening)
    assert one.token and other.token and one.token != other.token and len(one.token) >= 32
    assert one.url.endswith(f":{one.port}/?token={one.token}") and "0.0.0.0" not in one.url
    for name in (socket.gethostname(), "192.168.7.9", "[fe80::1]", "localhost"):
        assert one.answers_to(f"{name}:{one.port}")
    for name in (f"evil.example:{one.port}", f"{socket.gethostname()}:1", socket.gethostname()):
        assert not one.answers_to(name)


# ------------------------------------------------------------------------------------------------------------ the address


@pytest.mark.parametrize(
    ("word", "address"),
    [("", Address("127.0.0.1", 0)), ("8765", Address("127.0.0.1", 8765)), ("0.0.0.0:80", Address("0.0.0.0", 80)), ("[::1]:9", Address("::1", 9)),
     ("localhost:8765", Address("localhost", 8765))],
)  # fmt: skip
def test_an_address(word: str, address: Address) -> None:
    assert address_of(word) == address
    assert is_address(word) == bool(word)


@pytest.mark.parametrize(
    "word", ["x", "runs/tiny", "8765x", "1:2:3", "-1", ":80", "65536", "host:99999", "/tmp/8080:x"]
)
def test_what_is_none_is_refused(word: str) -> None:
    with pytest.raises(BadInput, match="--serve"):
        address_of(word)


def test_a_port_in_use_is_told_with_the_nearest_free_one() -> None:
    with bind(Address()) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            BadInput, match=rf"port {port} of 127\.0\.0\.1 is in use; the nearest free port is (\d+): --serve \1$"
        ) as refused:
            bind(Address("127.0.0.1", port))
        free = int(str(refused.value).split()[-1])
        assert abs(free - port) < 2000
        bind(Address("127.0.0.1", free)).close()


def test_an_address_of_others_is_refused() -> None:
    with pytest.raises(
        BadInput, match=r"no address 192\.0\.2\.1; use 127\.0\.0\.1"
    ):  # kept for documentation: nobody has it
        bind(Address("192.0.2.1", 8765))


def test_on_all_addresses_it_names_one_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "reached", lambda host: "192.168.7.9")
    listening = bind(Address("0.0.0.0"))
    with listening:
        one = Door.of(listening)
    assert one.urls == tuple(
        f"http://{name}:{one.port}/?token={one.token}" for name in ("192.168.7.9", socket.gethostname())
    )
    assert one.url == one.urls[0] and one.answers_to(f"192.168.7.9:{one.port}")
    monkeypatch.setattr(door, "reached", lambda host: None)  # no network
    assert one.urls == (f"http://{socket.gethostname()}:{one.port}/?token={one.token}",)
    assert (
        Door("127.0.0.1", 80, None).urls == ("http://127.0.0.1:80/",)
        and Door("::1", 80, None).url == "http://[::1]:80/"
    )


@pytest.mark.parametrize(
    ("path", "said"),
    [("/view/memory?step=" + "9" * 5_000, "there is no step 999"), ("/view/memory?rank=9223372036854775808", "there is no rank 9223372036854775808"),
     ("/events?run=&version=" + "1" * 5_000, "there is no version 111"), ("/events?step=" + "9" * 5_000, "there is no step 999")],
)  # fmt: skip
def test_a_number_larger_than_any_is_told(here: Browser, path: str, said: str) -> None:
    answer = here.ask(path)
    assert answer.status == 400
    assert answer.json["error"].startswith(said) and len(answer.json["error"]) < 80


def test_a_step_before_the_first_can_be_asked_for(here: Browser) -> None:
    assert here.ask("/view/memory?step=-5").status == 200
