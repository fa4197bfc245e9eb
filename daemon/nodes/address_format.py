"""Addresses of nodes: `host:port`, an IPv6 host in brackets. Pure."""

PORT_MAX = 65535
HOST_CHARS_MAX = 253


def parse_address(text: str) -> tuple[str, int]:
    """Return host (without brackets) and port.

    Raises:
        ValueError: it is no address.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r}: an IPv6 host stands in brackets")
    is_printable = host.isascii() and host.isprintable() and not set(host) & set(" /,@\"'\\")
    if not (colon and host and is_printable and len(host) <= HOST_CHARS_MAX):
        raise ValueError(f"{text!r} is not host:port")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= PORT_MAX):
        raise ValueError(f"{text!r} has no port from 0 to {PORT_MAX}")
    return host, int(port)


def address_text(host: str, port: int) -> str:
    """Return the address of a host (without brackets) and a port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
