"""Tests of CPU lists, the topology from sysfs, quotas, and the CPUs of server and load generator."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimizer.machine.conditions import machine_conditions
from optimizer.machine.cpus import (
    CpuTopology,
    cpu_quota,
    divide_among_servers,
    memory_limit_bytes,
    place_server_and_client,
    read_topology,
    split_server_and_client,
)
from optimizer.options.values import MAX_CPU_COUNT, format_cpus, parse_cpus, usable_cpus


def write_files(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def machine(*nodes: tuple[str, ...]) -> CpuTopology:
    """Return a topology of nodes, each of which is a list of cores."""
    cores = [[parse_cpus(core) for core in node] for node in nodes]
    return CpuTopology(
        tuple(core for node in cores for core in node), tuple(frozenset().union(*node) for node in cores)
    )


def single_cpu_cores(first: int, last: int) -> tuple[str, ...]:
    """Return cores of one CPU each."""
    return tuple(map(str, range(first, last + 1)))


# -- lists ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", {0}),
        ("0-3,8", {0, 1, 2, 3, 8}),
        (" 4 , 2-3 ", {2, 3, 4}),
        ("0-6:2,1", {0, 1, 2, 4, 6}),
        ("1,1,0-1", {0, 1}),
        ("8191", {8191}),
    ],
)
def test_cpu_lists_are_read(text: str, expected: set[int]) -> None:
    assert parse_cpus(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "write CPU numbers and ranges, such as 0-3 or 0-3,8"),
        ("all", "write CPU numbers"),
        ("0,", "write CPU numbers"),
        ("-1", "write CPU numbers"),
        ("0..3", "write CPU numbers"),
        ("١", "write CPU numbers"),
        ("3-0", "3-0 contains no CPU; write the lower number first, such as 0-3"),
        ("0-3:0", "0-3:0 contains no CPU"),
        ("0-8192", "Linux has no CPU 8192; the last can be 8191"),
        ("999999999", "Linux has no CPU 999999999"),
        ("9" * 10_000, "write CPU numbers"),
        ("0-5", "CPU 4-5 cannot be used here; the usable CPUs are 0-3"),
    ],
)
def test_an_invalid_list_is_reported_on_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        parse_cpus(text, among=frozenset(range(4)))
    assert "\n" not in str(caught.value)


@given(st.frozensets(st.integers(0, MAX_CPU_COUNT - 1), min_size=1, max_size=50))
def test_a_formatted_list_is_read_back(chosen: frozenset[int]) -> None:
    assert parse_cpus(format_cpus(chosen)) == chosen


@given(st.text(alphabet="0123456789-,: x", max_size=30))
def test_any_text_is_a_list_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert parse_cpus(text)


def test_runs_are_shown_as_ranges() -> None:
    assert format_cpus([8, 3, 1, 0, 2]) == "0-3,8"


# -- sysfs and control groups -----------------------------------------------------------------------------------


def test_the_topology_has_all_usable_cpus_of_this_machine() -> None:
    usable = usable_cpus()
    topology = read_topology(usable)
    assert usable == os.sched_getaffinity(0)
    for parts in (topology.cores, topology.nodes):
        assert sorted(cpu for part in parts for cpu in part) == sorted(usable)


def test_hyperthreads_and_nodes_are_read_from_sysfs(tmp_path: Path) -> None:
    write_files(
        tmp_path / "sys/devices/system",
        {f"cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
        | {"node/node0/cpulist": "0-1,4-5", "node/node1/cpulist": "2-3,6-7", "node/node2/cpulist": ""},
    )
    assert read_topology(frozenset(range(8)), tmp_path) == CpuTopology(
        cores=tuple(frozenset({core, core + 4}) for core in range(4)),
        nodes=(frozenset({0, 1, 4, 5}), frozenset({2, 3, 6, 7})),
    )
    # CPUs that cannot be used are left out
    assert read_topology(frozenset({0, 4, 7}), tmp_path) == CpuTopology(
        cores=(frozenset({0, 4}), frozenset({7})), nodes=(frozenset({0, 4}), frozenset({7}))
    )


def test_without_sysfs_each_cpu_is_a_core_and_all_are_one_node(tmp_path: Path) -> None:
    topology = read_topology(frozenset({1, 0}), tmp_path)
    assert topology == CpuTopology((frozenset({0}), frozenset({1})), (frozenset({0, 1}),))
    assert topology.cpus == {0, 1}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        (
            {
                "proc/self/cgroup": "0::/pod/box",
                "sys/fs/cgroup/pod/cpu.max": "200000 100000",
                "sys/fs/cgroup/pod/box/cpu.max": "400000 100000",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "3:memory:/a\n2:cpu,cpuacct:/docker/1\n0::/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu/docker/1/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/docker/1/cpu.cfs_period_us": "100000",
            },
            4.0,
        ),
    ],
    ids=["no control groups", "no limit", "version 2", "the tightest of those above", "version 1"],
)
def test_the_cpu_quota_is_the_tightest_one(tmp_path: Path, files: dict[str, str], expected: float | None) -> None:
    assert cpu_quota(write_files(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "max"}, None),
        (
            {
                "proc/self/cgroup": "0::/pod/box",
                "sys/fs/cgroup/pod/memory.max": "4294967296",
                "sys/fs/cgroup/pod/box/memory.max": "8589934592",
            },
            4 << 30,
        ),
        (
            {
                "proc/self/cgroup": "3:memory:/docker/1\n2:cpu:/",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
                "sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes": "1073741824",
            },
            1 << 30,
        ),
    ],
    ids=["no control groups", "no limit", "version 2", "version 1"],
)
def test_the_memory_limit_is_the_tightest_one(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    assert memory_limit_bytes(write_files(tmp_path, files)) == expected


# -- server and client ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine_topology", "server", "client"),
    [
        (machine(single_cpu_cores(0, 3)), "0-2", "3"),
        (machine(single_cpu_cores(0, 7)), "0-5", "6-7"),
        (machine(single_cpu_cores(0, 63)), "0-59", "60-63"),
        # a core is never split: 6 CPUs on 3 cores
        (machine(("0,3", "1,4", "2,5")), "0-1,3-4", "2,5"),
        (machine(("0,4", "1,5", "2,6", "3,7")), "0-2,4-6", "3,7"),
        # whole cores, even with 8 threads
        (machine(("0-7", "8-15", "16-23", "24-31")), "0-23", "24-31"),
        # all on one node
        (machine(single_cpu_cores(0, 7), single_cpu_cores(8, 15)), "0-11", "12-15"),
        # the load generator gets the whole small node, so that the server keeps the other one
        (machine(single_cpu_cores(0, 1), single_cpu_cores(2, 7)), "2-7", "0-1"),
        # no node is large enough
        (machine(("0",), ("1",), ("2",), ("3",), ("4",), ("5",), ("6",), ("7",)), "0-5", "6-7"),
        # CPUs that this process may not use are left out
        (machine(("2", "3", "6", "9", "10")), "2-3,6,9", "10"),
    ],
)
def test_server_and_load_generator_get_separate_cores(
    machine_topology: CpuTopology, server: str, client: str
) -> None:
    placement = split_server_and_client(machine_topology)
    assert (format_cpus(placement.server), format_cpus(placement.client)) == (server, client)
    assert placement.server | placement.client == machine_topology.cpus
    assert not placement.server & placement.client
    assert all(core <= placement.server or core <= placement.client for core in machine_topology.cores)


@pytest.mark.parametrize(
    ("machine_topology", "limit", "note"),
    [
        (machine(("0",)), None, "1 CPU: server and load generator share it"),
        (machine(single_cpu_cores(0, 1)), None, "2 CPUs: server and load generator share them"),
        (machine(("0,2", "1,3")), None, "4 CPUs on 2 cores: server and load generator share them"),
        (machine(single_cpu_cores(0, 15)), 2.5, "a quota of 2.5 CPUs: server and load generator share it"),
    ],
)
def test_too_few_cpus_are_shared_with_a_note(machine_topology: CpuTopology, limit: float | None, note: str) -> None:
    placement = split_server_and_client(machine_topology, limit)
    assert placement.server == placement.client == machine_topology.cpus
    assert str(placement.note) == note


def test_a_quota_of_the_whole_machine_is_none() -> None:
    assert split_server_and_client(machine(single_cpu_cores(0, 7)), 8.0) == split_server_and_client(
        machine(single_cpu_cores(0, 7))
    )


EIGHT_CPUS = machine(single_cpu_cores(0, 7))


@pytest.mark.parametrize(
    ("server", "client", "expected"),
    [
        (None, None, ("0-5", "6-7", "the server runs on CPUs 0-5, the load generator on CPUs 6-7")),
        ("0-3", "4", ("0-3", "4", "the server runs on CPUs 0-3, the load generator on CPU 4")),
        ("0-4", None, ("0-4", "5-7", "the server runs on CPUs 0-4, the load generator on CPUs 5-7")),
        (None, "0", ("1-7", "0", "the server runs on CPUs 1-7, the load generator on CPU 0")),
        ("0-7", None, ("0-7", "0-7", "server and load generator share CPUs 0-7")),
        (None, "0-7", ("0-7", "0-7", "server and load generator share CPUs 0-7")),
        ("0-4", "4-7", ("0-4", "4-7", "server and load generator share CPU 4")),
    ],
)
def test_server_and_client_get_the_cpus_of_the_options(
    server: str | None, client: str | None, expected: tuple[str, str, str]
) -> None:
    chosen = [None if text is None else parse_cpus(text) for text in (server, client)]
    placement = place_server_and_client(EIGHT_CPUS, server=chosen[0], client=chosen[1])
    assert (format_cpus(placement.server), format_cpus(placement.client), str(placement.note)) == expected


# -- machine conditions -----------------------------------------------------------------------------------------


def test_the_conditions_of_a_machine_are_read_from_its_files(tmp_path: Path) -> None:
    first_cpu = min(usable_cpus())
    cpu_folder = f"sys/devices/system/cpu/cpu{first_cpu}"
    write_files(
        tmp_path,
        {
            "proc/loadavg": "0.50 1.25 2.00 3/215 4242",
            "proc/cpuinfo": "processor : 0\ncpu MHz\t\t: 2500.000\nflags\t\t: fpu hypervisor sse",
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/cpu.max": "150000 100000",
            f"{cpu_folder}/cpufreq/scaling_governor": "powersave",
            f"{cpu_folder}/cpufreq/scaling_cur_freq": "1800123",
            f"{cpu_folder}/cpufreq/cpuinfo_max_freq": "3500000",
            f"{cpu_folder}/thermal_throttle/core_throttle_count": "7",
            f"{cpu_folder}/thermal_throttle/package_throttle_count": "9",
        },
    )
    assert machine_conditions(tmp_path) == {
        "load_average": [0.5, 1.25, 2.0],
        "cpus": format_cpus(usable_cpus()),
        "cpu_quota": 1.5,
        "cpu_governor": "powersave",
        "cpu_mhz": 1800,
        "cpu_max_mhz": 3500,
        "core_throttle_count": 7,
        "package_throttle_count": 9,
        "virtual_machine": True,
    }


def test_conditions_without_files_are_unknown(tmp_path: Path) -> None:
    conditions = machine_conditions(tmp_path)
    assert conditions.pop("cpus") == format_cpus(usable_cpus())
    assert set(conditions.values()) == {None}


def test_the_load_average_of_this_machine_is_read() -> None:
    conditions = machine_conditions()
    assert isinstance(conditions["load_average"], list)
    assert len(conditions["load_average"]) == 3
    assert isinstance(conditions["virtual_machine"], bool)


@pytest.mark.parametrize(
    ("nodes", "parts", "expected"),
    [
        ([single_cpu_cores(0, 3)], 2, ["0-1", "2-3"]),
        ([single_cpu_cores(0, 2)], 2, ["0", "1-2"]),
        ([("0,4", "1,5"), ("2,6", "3,7")], 2, ["0-1,4-5", "2-3,6-7"]),
        ([("0", "2"), ("1", "3")], 2, ["0,2", "1,3"]),
        ([("0", "2"), ("1",)], 2, ["0,2", "1"]),
        ([single_cpu_cores(0, 5), single_cpu_cores(6, 8)], 3, ["0-2", "3-5", "6-8"]),
        (
            [single_cpu_cores(0, 1), single_cpu_cores(2, 3), single_cpu_cores(4, 5), single_cpu_cores(6, 7)],
            2,
            ["0-3", "4-7"],
        ),
        ([("0,1", "2,3")], 3, ["0", "1", "2-3"]),
        ([("0,1",), ("2,3",)], 3, ["0", "1", "2-3"]),
        ([single_cpu_cores(0, 1)], 3, ["0-1", "0-1", "0-1"]),
        ([single_cpu_cores(0, 1)], 1, ["0-1"]),
    ],
    ids=[
        "cores",
        "rest",
        "siblings",
        "nodes",
        "unequal nodes",
        "more than nodes",
        "fewer than nodes",
        "fewer cores",
        "fewer cores on nodes",
        "fewer CPUs",
        "one",
    ],
)
def test_servers_divide_the_cpus(nodes: list[tuple[str, ...]], parts: int, expected: list[str]) -> None:
    """They get whole cores, of one node unless there are more nodes than servers."""
    assert [format_cpus(part) for part in divide_among_servers(machine(*nodes), parts)] == expected


@given(st.integers(1, 40), st.integers(1, 64))
def test_servers_get_all_cpus_and_share_them_only_if_there_are_too_few(count: int, parts: int) -> None:
    shares = divide_among_servers(machine(single_cpu_cores(0, count - 1)), parts)
    assert len(shares) == parts
    assert frozenset().union(*shares) == frozenset(range(count))
    assert sum(map(len, shares)) == (count if parts <= count else parts * count)
