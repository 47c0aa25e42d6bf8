"""Which process of this machine serves an address."""

from __future__ import annotations

import ipaddress

import psutil


def listener_pid(address: str) -> int | None:
    """The process that listens at ``host:port`` of this machine's loopback; None where it is elsewhere, or is not
    ours to see."""
    host, _, port = address.rpartition(":")
    if not is_loopback(host.strip("[]")):
        return None
    try:
        listening = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return None
    return next((one.pid for one in listening if one.laddr and one.laddr.port == int(port)), None)


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
