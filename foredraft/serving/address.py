"""Who can reach an address."""

import ipaddress


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach it: a Unix socket, localhost or a loopback address. Looks up no names."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
