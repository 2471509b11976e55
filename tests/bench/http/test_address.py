"""The URL of --target."""

from __future__ import annotations

import pytest

from roseinfer.bench.http.address import Address
from roseinfer.errors import InputError


@pytest.mark.parametrize(
    ("url", "address", "root"),
    [
        ("http://127.0.0.1:8000/v1", ("http", "127.0.0.1", 8000, "/v1"), ""),
        ("http://localhost:8000/v1/", ("http", "localhost", 8000, "/v1"), ""),
        ("https://api.example.org/v1", ("https", "api.example.org", 443, "/v1"), ""),
        ("HTTP://host", ("http", "host", 80, ""), ""),
        ("http://[::1]:1/proxy/v1", ("http", "::1", 1, "/proxy/v1"), "/proxy"),
    ],
)
def test_a_url_is_where_the_api_is(url: str, address: tuple[object, ...], root: str) -> None:
    found = Address.parse(url)
    assert (tuple(found), found.root) == (address, root)


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http:///v1",
        "http://host:0/v1",
        "http://host:99999/v1",
        "http://[oops/v1",
        "http://host/v1?key=1",
        "http://host/v1/chat/completions",
        "http://host/v1/completions/",
        "http://ho st/v1",
        "http://host/v 1",
    ],
)
def test_what_names_no_server_is_refused(url: str) -> None:
    with pytest.raises(InputError) as caught:
        Address.parse(url)
    assert caught.value.name == "--target"


def test_credentials_are_refused_and_not_repeated() -> None:
    with pytest.raises(InputError) as caught:
        Address.parse("https://alice:secret@example.org/v1")
    assert "secret" not in str(caught.value)
    assert "--api-key-env" in str(caught.value)


@pytest.mark.parametrize(
    ("url", "public"),
    [
        ("https://gpu7.example.org:8443/v1", "https://remote/v1"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
    ],
)
def test_a_record_names_no_other_machine(url: str, public: str) -> None:
    assert Address.parse(url).public == public


def test_a_key_travels_in_a_header() -> None:
    endpoint = Address.parse("http://host/v1").endpoint("chat", "key")
    assert endpoint.path == "/v1/chat/completions"
    assert endpoint.headers == (("Authorization", "Bearer key"),)
