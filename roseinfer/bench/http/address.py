"""Where a server is: the URL of --target, and what can be asked there."""

from __future__ import annotations

from typing import Final, NamedTuple, Self
from urllib.parse import urlsplit

from roseinfer.bench.environment import is_loopback, public_url
from roseinfer.bench.http.exchange import Endpoint
from roseinfer.errors import InputError

PATHS: Final = {"completions": "/completions", "chat": "/chat/completions"}
"""Of each --api, below the base of the URL."""

_PORTS: Final = {"http": 80, "https": 443}


class Address(NamedTuple):
    """`base` is the path of the API, as a rule /v1, without a slash at its end."""

    scheme: str
    host: str
    port: int
    base: str

    @classmethod
    def parse(cls, url: str) -> Self:
        """Raises InputError("--target") for a URL that names no server, or more than one place of it."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise InputError("--target", public_url(url), f"is no URL: {error}") from None
        if parts.username is not None or parts.password is not None:
            raise InputError("--target", public_url(url), "holds credentials: give a key by --api-key-env")
        if not host or not host.isprintable() or " " in host or port == 0:
            raise InputError("--target", url, "names no host, or no port that there is")
        if parts.query or parts.fragment:
            raise InputError("--target", public_url(url), "ends in a query, which nobody would read")
        scheme, base = parts.scheme.lower(), parts.path.rstrip("/")
        if not base.isascii() or any(c <= " " or c == "\x7f" for c in base):
            raise InputError("--target", url, "has characters in its path that no URL has")
        for path in PATHS.values():
            if base.endswith(path):
                raise InputError("--target", url, f"goes too far: leave {path} to --api")
        return cls(scheme, host, _PORTS[scheme] if port is None else port, base)

    @property
    def public(self) -> str:
        """The URL as a record may hold it."""
        where = f"[{self.host}]" if ":" in self.host else self.host
        return public_url(f"{self.scheme}://{where}:{self.port}{self.base}")

    @property
    def place(self) -> str:
        """Whose machine it is, in words."""
        return "this machine's server" if is_loopback(self.host) else "a remote server"

    @property
    def root(self) -> str:
        """The path above the API, where servers have /health and /metrics; "" is the root itself."""
        return self.base.removesuffix("/v1")

    def endpoint(self, api: str, api_key: str | None) -> Endpoint:
        return Endpoint(self.scheme, self.host, self.port, self.base + PATHS[api], headers(api_key))


def headers(api_key: str | None) -> tuple[tuple[str, str], ...]:
    return () if api_key is None else (("Authorization", f"Bearer {api_key}"),)
