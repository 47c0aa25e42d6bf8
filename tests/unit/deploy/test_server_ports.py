"""The ports of ``tune serve``: Triton's own where they are free, those that are given, and none twice."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

import pytest

from optimizer.core.errors import BadInputError
from optimizer.deploy.target_settings import LOOPBACK, ServerPorts, choose_ports, free_port


def in_use(*ports: int) -> Callable[[int], str]:
    """Return the problems of a machine on which these ports are in use."""
    return lambda port: "in use" if port in ports else ""


def test_the_usual_ports_are_those_of_triton_and_10_higher_for_the_next_process() -> None:
    assert choose_ports(2, {}, in_use()) == (ServerPorts(8000, 8001, 8002), ServerPorts(8010, 8011, 8012))


def test_a_usual_port_that_is_in_use_is_replaced_by_a_free_one() -> None:
    first, second = choose_ports(2, {}, in_use(8001, 8012))
    assert (first.http, first.metrics, second.http, second.grpc) == (8000, 8002, 8010, 8011)
    chosen = {*vars(first).values(), *vars(second).values()}
    assert len(chosen) == 6
    assert not chosen & {8001, 8012}


def test_given_ports_are_used() -> None:
    assert choose_ports(2, {"grpc": 9000}, in_use()) == (ServerPorts(8000, 9000, 8002), ServerPorts(8010, 9010, 8012))


@pytest.mark.parametrize("given_ports", [{"grpc": 8000}, {"metrics": 8000}, {"metrics": 8001}, {"http": 8012}])
def test_a_usual_port_that_is_given_for_another_purpose_is_replaced(given_ports: Mapping[str, int]) -> None:
    servers = choose_ports(2, given_ports, in_use())
    for name, port in given_ports.items():
        assert [getattr(ports, name) for ports in servers] == [port, port + 10]
    assert len({port for ports in servers for port in vars(ports).values()}) == 6


def test_a_given_port_that_is_in_use_is_refused() -> None:
    with socket.socket() as other:
        other.bind((LOOPBACK, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            BadInputError, match=rf"^--grpc-port {port}: port {port} cannot be used \(Address already"
        ):
            choose_ports(1, {"grpc": port})


def test_a_given_port_whose_connections_have_just_ended_is_used() -> None:
    """The side that closes a connection first keeps it for a minute."""
    port = free_port()
    with socket.socket() as server, socket.socket() as client:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((LOOPBACK, port))
        server.listen()
        client.connect((LOOPBACK, port))
        accepted, _ = server.accept()
        accepted.close()
    assert choose_ports(1, {"metrics": port})[0].metrics == port


@pytest.mark.parametrize(
    ("given_ports", "message"),
    [
        ({"http": 9000, "grpc": 9000}, "--grpc-port 9000: port 9000 cannot be used (it is given twice)"),
        (
            {"grpc": 65530},
            "--grpc-port 65530: port 65540 of server process 2 cannot be used (the largest port is 655",
        ),
    ],
)
def test_ports_that_cannot_be_used_are_refused(given_ports: dict[str, int], message: str) -> None:
    with pytest.raises(BadInputError) as refused:
        choose_ports(2, given_ports)
    assert str(refused.value).startswith(message)
