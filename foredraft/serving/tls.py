"""TLS from PEM files that may be replaced at any time: certificates are renewed while servers run."""

import hashlib
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

logger = logging.getLogger(__name__)


class TlsError(Exception):
    """The files cannot be used; the message names the option and says why, and holds nothing of a file."""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """A server's certificate chain and key, and the authorities one of which must have signed every client's."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials that look at the files again for every new connection; raises TlsError.

        New files that cannot be used, such as a certificate whose key has not been written yet, are logged, and the
        last good ones stay in use.
        """
        contents = self._read()
        self._check()
        refused: tuple[bytes, ...] | None = None

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal contents, refused
            found: tuple[bytes, ...] | None = None
            try:
                found = self._read()
                if found in (contents, refused):
                    return None
                self._check()
            except TlsError as error:
                if refused is None or found != refused:
                    logger.error("the TLS files in use so far stay: %s", error)
                refused = found or ()
                return None
            contents, refused = found, None
            logger.info("read the renewed TLS files")
            return _configuration(contents)

        fetcher: Any = renewed  # Its type does not know that None means no change.
        return grpc.dynamic_ssl_server_credentials(
            _configuration(contents), fetcher, require_client_authentication=self.client_ca is not None
        )

    def _read(self) -> tuple[bytes, ...]:
        named = {"tls_cert": self.cert, "tls_key": self.key, "tls_client_ca": self.client_ca}
        return tuple(_content(option, path) for option, path in named.items() if path is not None)

    def _check(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        _check_pair(context, "tls_cert", self.cert, "tls_key", self.key)
        if self.client_ca is not None:
            _check_authorities(context, "tls_client_ca", self.client_ca)


@dataclass(frozen=True, slots=True)
class ClientTls:
    """The authorities that a server's certificate must come from, and the client's own certificate and key, if any."""

    ca: Path
    cert: Path | None = None
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Credentials with what the files hold now; raises TlsError. A channel keeps them until it is made anew."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _check_authorities(context, "tls_ca", self.ca)
        chain = key = None
        if self.cert is not None and self.key is not None:
            _check_pair(context, "tls_client_cert", self.cert, "tls_client_key", self.key)
            chain, key = _content("tls_client_cert", self.cert), _content("tls_client_key", self.key)
        return grpc.ssl_channel_credentials(_content("tls_ca", self.ca), key, chain)

    def fingerprint(self) -> bytes:
        """A hash of what the files hold now: another one than when a channel was made calls for a new channel.

        Raises TlsError if a file cannot be read.
        """
        named = {"tls_ca": self.ca, "tls_client_cert": self.cert, "tls_client_key": self.key}
        hashes = [hashlib.sha256(_content(option, path)).digest() for option, path in named.items() if path is not None]
        return hashlib.sha256(b"".join(hashes)).digest()


def _configuration(contents: tuple[bytes, ...]) -> grpc.ServerCertificateConfiguration:
    cert, key, *client_ca = contents
    return grpc.ssl_server_certificate_configuration([(key, cert)], client_ca[0] if client_ca else None)


def _content(option: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(f"{option}: cannot read {path}: {error.strerror}") from error


def _check_pair(context: ssl.SSLContext, cert_option: str, cert: Path, key_option: str, key: Path) -> None:
    """Raises TlsError unless these are a certificate chain and its key: gRPC would only refuse every handshake."""
    _content(cert_option, cert)
    _content(key_option, key)
    try:
        # With a password at hand, OpenSSL does not ask for one at the terminal.
        context.load_cert_chain(cert, key, password="")
    except (ssl.SSLError, OSError, ValueError) as error:
        raise TlsError(
            f"{cert_option} {cert} and {key_option} {key} must be a PEM certificate chain and its unencrypted PEM key: "
            f"{_reason(error)}"
        ) from error


def _check_authorities(context: ssl.SSLContext, option: str, path: Path) -> None:
    _content(option, path)
    try:
        context.load_verify_locations(path)
    except (ssl.SSLError, OSError) as error:
        raise TlsError(f"{option}: {path} must hold PEM certificates of authorities: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else None
    return reason.replace("_", " ").lower() if reason else "they cannot be read as such"
