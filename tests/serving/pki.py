"""Certificates for tests, from an authority of their own."""

from pathlib import Path

import trustme

from foredraft.serving.tls import ClientTls, ServerTls

HOSTS = ("localhost", "127.0.0.1")


class Authority:
    """Signs certificates and writes them as files to a directory."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.certificate = directory / "ca.pem"
        self._ca = trustme.CA()
        self._ca.cert_pem.write_to_path(str(self.certificate))

    def issue(self, name: str, *hosts: str) -> tuple[Path, Path]:
        """A certificate for these hosts and its key; an earlier one of that name is replaced."""
        cert, key = self.directory / f"{name}.pem", self.directory / f"{name}.key"
        issued = self._ca.issue_cert(*(hosts or HOSTS))
        cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        key.write_bytes(issued.private_key_pem.bytes())
        return cert, key

    def server(self, *hosts: str, mutual: bool = False) -> ServerTls:
        """TLS of a server with a new certificate; if `mutual`, clients need one of this authority too."""
        return ServerTls(*self.issue("server", *hosts), self.certificate if mutual else None)

    def client(self, signed_by: "Authority | None" = None) -> ClientTls:
        """TLS of a client that trusts this authority, with a certificate of another one if that is given."""
        if signed_by is None:
            return ClientTls(self.certificate)
        return ClientTls(self.certificate, *signed_by.issue("client"))
