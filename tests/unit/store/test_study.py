"""Storages of studies, and the messages for those that cannot be opened."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.samplers import RandomSampler

from objectives.metrics import METRICS
from objectives.sla import Sla
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.errors import BadInputError
from optimizer.core.load_shapes import RequestTimes
from optimizer.core.request_sizes import SizeDistribution, parse_priorities
from optimizer.machine.hardware import Fingerprint
from optimizer.options.addresses import redact
from optimizer.store.optuna_study import check_study, make_storage, open_study

FINGERPRINT = Fingerprint("a CPU", 8, (), "embedded", "2.51.0", (), "")
PROBLEM = Problem("m", SearchSpace((4, 8)), 1, 64, sla=Sla.from_bounds({"p95": 20.0}))


def reopened(storage: str | None, problem: Problem = PROBLEM, name: str = "s") -> optuna.Study:
    return open_study(storage, name, problem, RandomSampler(seed=0))


@pytest.fixture(params=["journal", "sqlite"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return a path in a folder that does not exist yet, or a database URL."""
    return str(tmp_path / "run" / "study.journal") if request.param == "journal" else f"sqlite:///{tmp_path}/s.db"


def test_a_study_is_continued(storage: str) -> None:
    reopened(storage).add_trial(optuna.create_trial(value=1.0))
    assert [trial.value for trial in reopened(storage).trials] == [1.0]
    assert reopened(storage, name="other").trials == []


def test_a_check_refuses_another_problem_and_changes_no_study(storage: str) -> None:
    def check(problem: Problem, name: str = "s") -> None:
        check_study(storage, name, problem, RandomSampler(seed=0), FINGERPRINT)

    check(PROBLEM)
    optuna.create_study(storage=make_storage(storage), study_name="s")
    check(PROBLEM)
    check(PROBLEM, "other")
    stored = make_storage(storage)
    assert [study.study_name for study in stored.get_all_studies()] == ["s"]
    assert optuna.load_study(study_name="s", storage=stored).user_attrs == {}
    reopened(storage)
    with pytest.raises(BadInputError, match=r"study 's' differs in model \(m there, n here\);"):
        check(replace(PROBLEM, model="n"))
    assert set(reopened(storage).user_attrs) == {"problem"}, "the fingerprint is not that of a measurement"


def test_a_check_creates_no_journal(tmp_path: Path) -> None:
    journal = tmp_path / "study.journal"
    check_study(str(journal), "s", PROBLEM, RandomSampler(seed=0), FINGERPRINT)
    assert not journal.exists()


def test_a_study_can_be_kept_in_memory() -> None:
    assert reopened(None).trials == []


def test_directions_are_those_of_the_objectives() -> None:
    problem = replace(PROBLEM, objectives=(METRICS["throughput"], METRICS["memory"], METRICS["latency-p95"]))
    assert [d.name for d in reopened(None, problem).directions] == ["MAXIMIZE", "MINIMIZE", "MINIMIZE"]


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (
            {"space": SearchSpace((4, 8, 16))},
            r"parameters \(max_batch_size\); use the options that it was started with, or another",
        ),
        ({"request_batch_size": 2}, r"request_batch_size \(1 there, 2 here\);"),
        ({"objectives": (METRICS["latency-p95"],)}, r"objectives \(throughput there, latency-p95 here\);"),
        ({"sla": Sla()}, r"constraints \(p95 <= 20 ms there, none here\);"),
        ({"model": "n"}, r"model \(m there, n here\);"),
    ],
)
def test_a_study_of_another_problem_is_refused(tmp_path: Path, change: dict[str, object], difference: str) -> None:
    storage = str(tmp_path / "study.journal")
    reopened(storage)
    with pytest.raises(BadInputError, match=f"study 's' differs in {difference}"):
        reopened(storage, replace(PROBLEM, **change))  # type: ignore[arg-type]


def test_workers_with_other_conditions_are_refused(storage: str) -> None:
    def join(**conditions: str) -> optuna.Study:
        return open_study(storage, "s", PROBLEM, RandomSampler(seed=0), conditions=conditions)

    join(sha256="abc", requests="")
    join(sha256="abc", requests="")
    with pytest.raises(BadInputError, match=r"study 's' differs in sha256 \(abc there, def here\);"):
        join(sha256="def", requests="")
    with pytest.raises(BadInputError, match=r"study 's' differs in requests \(none there, shapes a:8 here\);"):
        join(sha256="abc", requests="shapes a:8")


@pytest.mark.parametrize(
    ("setting", "difference"),
    [
        ({"request_times": RequestTimes("poisson")}, r"request_times \(poisson there, none here\);"),
        ({"priorities": parse_priorities("1*20|2*80")}, r"priorities \(.+ there, none here\);"),
        ({"request_mix": SizeDistribution(((1, 8, 1.0),))}, r"request_mix \(.+ there, none here\);"),
    ],
)
def test_a_study_with_a_setting_that_the_problem_lacks_is_refused(
    tmp_path: Path, setting: dict[str, object], difference: str
) -> None:
    storage = str(tmp_path / "study.journal")
    problem = replace(PROBLEM, **setting)  # type: ignore[arg-type]
    reopened(storage, problem)
    reopened(storage, problem)
    with pytest.raises(BadInputError, match=f"study 's' differs in {difference}"):
        reopened(storage)


def test_half_a_line_left_by_a_killed_process_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "study.journal"
    reopened(str(path)).add_trial(optuna.create_trial(value=1.0))
    with path.open("a") as file:
        file.write('{"op_code":4,"worker')
    reopened(str(path)).add_trial(optuna.create_trial(value=2.0))
    assert [trial.value for trial in reopened(str(path)).trials] == [1.0, 2.0]


def test_a_lock_left_by_a_killed_process_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reopened("study.journal")
    tmp_path.joinpath("study.journal.lock").symlink_to(tmp_path / "study.journal")
    reopened("study.journal").add_trial(optuna.create_trial(value=1.0))
    assert len(reopened("study.journal").trials) == 1


@pytest.mark.parametrize(
    "content", ["garbage\n", "lines\nof a user", '{"op_code": 99, "worker_id": "x"}\nnull\n'], ids=repr
)
def test_a_file_that_is_no_journal_is_refused_and_not_changed(tmp_path: Path, content: str) -> None:
    path = tmp_path / "study.journal"
    path.write_text(content)
    with pytest.raises(BadInputError, match=r"study.journal: is not an intact study"):
        reopened(str(path))
    assert path.read_text() == content


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r": the study cannot be opened: .*Is a directory; check that file"):
        reopened(str(tmp_path))


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        ("oracel://me:secret@host/db", r"^oracel://me:\*\*\*@host/db: unknown kind of database"),
        ("sqlite:////nowhere/at/all.db", "^sqlite:////nowhere/at/all.db: the study cannot be opened: unable to open"),
        ("postgresql://me:secret@127.0.0.1:1/db", r"^postgresql://me:\*\*\*@127.0.0.1:1/db: "),
        ("postgresql+psycopg2://me:se@cret@host/db", r"^postgresql\+psycopg2://me:\*\*\*@host/db: "),
        ("postgresql://me:secret@host:nonumber/db", r"^postgresql://me:\*\*\*@host:nonumber/db: "),
        ("mysql://me:secret@127.0.0.1:1/db?password=secret", r"^mysql://me:\*\*\*@127.0.0.1:1/db\?password=\*\*\*: "),
    ],
)
def test_an_unavailable_database_is_reported_on_one_line_without_the_password(storage: str, message: str) -> None:
    with pytest.raises(BadInputError, match=message) as error:
        reopened(storage)
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)
    assert "cret" not in str(error.value)


@pytest.mark.parametrize(
    ("driver", "storage", "fix"),
    [
        ("psycopg", "postgres://me:secret@host/db", r"pip install 'tritune\[postgresql\]'"),
        ("pymysql", "mysql://host/db", "pip install pymysql"),
        ("nodriver", "sqlite+nodriver:///x.db", None),
    ],
)
def test_a_missing_driver_is_named_with_its_fix(
    monkeypatch: pytest.MonkeyPatch, driver: str, storage: str, fix: str | None
) -> None:
    for module in (driver, "psycopg2", "MySQLdb"):
        monkeypatch.setitem(sys.modules, module, None)
    message = f"its database driver is not installed; {fix}" if fix else "unknown kind of database"
    with pytest.raises(BadInputError, match=message):
        reopened(storage)


def test_passwords_are_removed_from_every_part_of_a_message() -> None:
    assert redact("mysql://u:p@ss:w/rd@h/db?Password=p2&x=1") == "mysql://u:***@h/db?Password=***&x=1"
    assert redact("postgresql://user@h/db") == "postgresql://user@h/db"
    assert redact("runs/study.journal") == "runs/study.journal"


def test_optuna_is_imported_only_when_a_search_is_made() -> None:
    modules = "optimizer.search, optimizer.config.search_space, optimizer.config.model_config"
    code = f"import sys, {modules}\nsys.exit('optuna' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_study_in_a_journal_needs_no_database_library(tmp_path: Path) -> None:
    program = f"""
import sys
from tests.conftest import known_problem
from optimizer.search import make_searcher
from optimizer.core.trial import Trial
searcher = make_searcher("random", known_problem(), 0, {str(tmp_path / "study.journal")!r}, "s")
searcher.observe(Trial(0, searcher.suggest(), status="failed", reason="no"))
sys.exit("sqlalchemy" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
