"""``tune watch`` against pages of metrics that grow with time: exit codes, output, and errors of one line."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
import socketserver
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from optimizer.cli import watch
from optimizer.core.candidate import SERVER_PROCESSES
from optimizer.core.errors import BadInputError, EnvironmentFault
from optimizer.watch.fit_check import Judgement
from optimizer.watch.server_metrics import observe_loads, read_server
from optimizer.watch.watch_report import follow_line
from tests.production_loads import loads, recorded_expectation
from tests.run_folders import change_info, write_run
from tests.simulated_clock import SimulatedClock

DATA = Path(__file__).parents[2] / "data"
RECORDED = (DATA / "triton_metrics_end.txt").read_text()
SAMPLE = DATA / "dlrm" / "sample"
INTERVAL_SECONDS, INTERVALS = 0.2, 4
BRIEFLY = ("--interval", f"{1000 * INTERVAL_SECONDS:.0f}ms", "--intervals", f"{INTERVALS}")
RATE = 1000.0


def growing(
    model: str = "dlrm", rate: float = RATE, samples: float = 4, batch: float = 7, pending: int = 0
) -> Callable[[], str]:
    """Return a function that returns the page of a server that serves ``rate`` requests per second.

    It counts the requests of an interval each time that it is read. ``pending`` requests always wait.
    """
    readings = itertools.count()

    def page() -> str:
        requests = rate * INTERVAL_SECONDS * next(readings)
        values = {
            "request_success": requests,
            "count": samples * requests,
            "exec_count": samples * requests / batch,
            "request_duration_us": 3000 * requests,
            "queue_duration_us": 500 * requests,
            "compute_input_duration_us": 0,
            "compute_infer_duration_us": 2000 * requests,
            "compute_output_duration_us": 0,
            "pending_request_count": pending,
        }
        return "".join(f'nv_inference_{name}{{model="{model}",version="1"}} {n}\n' for name, n in values.items())

    return page


@contextlib.contextmanager
def serving(page: Callable[[], str], status: int = 200) -> Iterator[str]:
    """Serve ``page`` below /metrics; yield ``host:port``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = page()
            self.send_response(status if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def main(words: list[str]) -> int:
    """Run ``tune watch`` with a clock on which an interval takes exactly its time, also on a busy machine."""
    return watch.main(words, SimulatedClock())


def test_a_load_that_fits_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(growing()) as address:
        assert main([str(SAMPLE), "--url", address, *BRIEFLY]) == 0
    out = capsys.readouterr().out
    assert out.startswith("dlrm fits ")
    assert "DIFFERS" not in out


def test_another_request_size_ends_with_1_and_the_command_of_a_search(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(growing(samples=64, batch=64)) as address:
        assert main([str(SAMPLE), "--url", f"http://{address}/metrics", *BRIEFLY]) == 1
    out = capsys.readouterr().out
    assert out.startswith("dlrm no longer fits ")
    assert "--request-batch-size 64" in out
    assert "--warm-start " not in out


def test_replicas_are_summed(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(growing()) as first, serving(growing(rate=2 * RATE)) as second:
        assert main([str(SAMPLE), "--url", first, "--url", second, *BRIEFLY, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["verdict"], document["servers"], document["intervals"]) == ("PASS", 2, 4)
    (rate,) = (check for check in document["checks"] if check["name"] == "requests/s per server")
    assert document["requests"] == INTERVALS * 3 * RATE * INTERVAL_SECONDS
    assert rate["measured"] == pytest.approx(document["requests"] / document["seconds"] / 2)


def test_no_requests_end_with_4(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(growing(rate=0)) as address:
        assert main([str(SAMPLE), "--url", address, *BRIEFLY, "--json"]) == 4
    document = json.loads(capsys.readouterr().out)
    assert (document["verdict"], document["requests"], document["intervals"]) == ("UNDECIDED", 0, 4)
    (check,) = document["checks"]
    assert (check["name"], check["status"], check["measured"]) == ("requests/s per server", "fits", 0)


def test_requests_that_wait_while_none_is_served_end_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    """One of two replicas hangs."""
    with serving(growing()) as first, serving(growing(rate=0, pending=5)) as second:
        assert main([str(SAMPLE), "--url", first, "--url", second, *BRIEFLY]) == 1
    out = capsys.readouterr().out
    assert out.startswith("dlrm no longer fits ")
    assert re.search(r"a server served no request for [\d.]+ s, although requests waited", " ".join(out.split()))
    assert "read the log of the server that serves nothing" in " ".join(out.split())


def test_a_restarted_server_loses_an_interval(capsys: pytest.CaptureFixture[str]) -> None:
    pages = [growing(), growing()]
    read = 0

    def page() -> str:
        nonlocal read
        read += 1
        if read == 3:
            pages[1:] = [growing()]
        return pages[read >= 3]()

    with serving(page) as address:
        main([str(SAMPLE), "--url", address, *BRIEFLY, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert (document["intervals"], document["lost_intervals"]) == (3, 1)


def test_the_newest_intervals_are_judged_again_after_each_interval() -> None:
    is_open, metrics = True, growing()

    with serving(lambda: metrics() if is_open else "<html>") as address:
        observations = observe_loads([f"http://{address}/metrics"], "dlrm", 0.01, 3, SimulatedClock())
        assert [len(next(observations).loads) for _ in range(3)] == [3, 3, 3]
        is_open = False
        for remaining in (2, 1):
            observed = next(observations)
            assert (len(observed.loads), observed.lost_intervals) == (remaining, 3 - remaining)
        with pytest.raises(BadInputError, match="has no metrics of Triton"):
            next(observations)


def test_a_followed_server_has_a_line_with_its_rate_and_the_judgement() -> None:
    shown = follow_line(Judgement(recorded_expectation(), loads(200.0), 1), "12:00:00")
    assert re.match(r"12:00:00 200 \(19\d to 20\d\) requests/s per server: dlrm", shown)


def test_the_model_may_have_another_name_there() -> None:
    with serving(growing("ranking")) as address:
        assert main([str(SAMPLE), "--url", address, "--model", "ranking", *BRIEFLY]) == 0


def refused(*words: str, error: type[Exception] = BadInputError) -> str:
    with pytest.raises(error) as caught:
        main([str(SAMPLE), *BRIEFLY, *words])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_server_without_the_model_is_bad_input() -> None:
    with serving(lambda: RECORDED) as address:
        message = refused("--url", address)
    assert "no metrics of the model dlrm (it has: mlp)" in message


def test_the_port_of_grpc_is_bad_input() -> None:
    class Http2(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1024)
            self.request.sendall(b"\0\0\x18\4\0\0\0\0\0\0\4\0@\0\0")  # its settings

    with socketserver.TCPServer(("127.0.0.1", 0), Http2) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        refusal = refused("--url", f"127.0.0.1:{server.server_address[1]}")
    assert "no HTTP server answers there" in refusal
    assert "http://HOST:8002/metrics" in refusal


def test_the_page_of_another_program_is_bad_input() -> None:
    with serving(lambda: "<html>welcome</html>") as address:
        assert "has no metrics of Triton" in refused("--url", address)
        assert "HTTP status 404" in refused("--url", f"http://{address}/v2")


@pytest.mark.parametrize(("mebibytes", "is_read"), [(8, True), (16, False)])
def test_a_long_page_is_read_completely_or_not_at_all(mebibytes: int, is_read: bool) -> None:
    other_lines, page = "#" * (mebibytes << 20), growing()
    with serving(lambda: f"{other_lines}\n{page()}") as address:
        if is_read:
            assert read_server(f"http://{address}/metrics", "dlrm").executions == 0
        else:
            with pytest.raises(EnvironmentFault, match=r"the metrics cannot be read \(larger than 16 MiB\); "):
                read_server(f"http://{address}/metrics", "dlrm")


def test_a_server_that_cannot_be_read_is_a_fault_of_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert EnvironmentFault.exit_code == 3
    unreadable = refused("--url", "127.0.0.1:1", error=EnvironmentFault)
    assert "the metrics cannot be read (Connection refused); " in unreadable
    assert "reading the metrics" not in capsys.readouterr().err, "the error is the only line"
    with serving(lambda: "", status=503) as address:
        assert "HTTP status 503" in refused("--url", address, error=EnvironmentFault)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ((), "give --url"),
        (("--url", "triton"), "such as http://triton:8002/metrics"),
        (("--url", "grpc://triton:8001"), "such as http://triton:8002/metrics"),
        (("--url", "triton:99999"), "such as http://triton:8002/metrics"),
        (("--url", "a:1", "--interval", "10"), "a unit is missing"),
        (("--url", "a:1", "--interval", "1ms"), "write a time from 200ms to 24h"),
        (("--url", "a:1", "--intervals", "1"), "write a whole number from 2 to 1000"),
        (("--url", "a:1", "--model", ""), "--model '': give 1 to"),
    ],
)
def test_wrong_words_are_bad_input(words: tuple[str, ...], part: str) -> None:
    assert part in refused(*words)


def test_a_run_that_was_killed_is_bad_input(tmp_path: Path) -> None:
    run = Path(shutil.copytree(SAMPLE, tmp_path / "run"))
    change_info(run, status="running")
    with pytest.raises(BadInputError, match="the run was killed"):
        main([str(run), "--url", "127.0.0.1:1"])


def two_processes(folder: Path) -> Path:
    """Return a run of two server processes, which together serve 500 requests of 2 samples per second."""
    return write_run(folder, fields={SERVER_PROCESSES: [2]})


def test_the_processes_of_a_replica_are_summed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = two_processes(tmp_path)
    with contextlib.ExitStack() as served:
        pages = [served.enter_context(serving(growing("doubler", 200, 2, 4))) for _ in range(4)]
        urls = [word for page in pages for word in ("--url", page)]
        assert main([str(run), *urls, *BRIEFLY, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["servers"], document["server_processes"]) == (4, 2)
    (rate,) = (check for check in document["checks"] if check["name"] == "requests/s per replica")
    assert document["requests"] == INTERVALS * 4 * 200 * INTERVAL_SECONDS
    assert rate["measured"] == pytest.approx(document["requests"] / document["seconds"] / 2)


def test_each_server_process_needs_a_url(tmp_path: Path) -> None:
    run = two_processes(tmp_path)
    for urls in (["a:8002"], ["a:8002", "a:8012", "b:8002"], ["a:8002", "a:8002"]):
        with pytest.raises(
            BadInputError, match=r"^--url: names [13] servers?, but .* recommends 2 server processes"
        ) as caught:
            main([str(run), *(word for url in urls for word in ("--url", url)), *BRIEFLY])
        assert "such as --url host:8002 --url host:8012, and those of each further replica" in str(caught.value)
        assert "\n" not in str(caught.value)
