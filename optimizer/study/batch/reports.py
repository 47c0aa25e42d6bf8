"""The results of a batch as a web page, as Markdown, as JUnit XML and on the terminal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from urllib.parse import quote
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from rich.console import Console
from rich.text import Text

from objectives.intervals import ConfidenceInterval
from objectives.metrics import METRICS
from optimizer.confirmation.choice import RATIO_TO_ITSELF
from optimizer.core.files import write_atomically
from optimizer.core.safe_text import is_file, is_folder, one_line, show_path
from optimizer.core.trial import LoadPoint
from optimizer.results import formatting, summary
from optimizer.results.report.writer import markdown_text, template_environment
from optimizer.results.terminal_output import plain_table, print_table, print_unbroken, wrap
from optimizer.store.run_folder import BATCH_FILE, RunFolder
from optimizer.study.batch.changes import change_percent
from optimizer.study.batch.record import BatchFolder, BatchRecord, EntryRecord, Estimate

STATE_NAMES = {"none": "found none", "failed": "failed", "waiting": "not begun", "searched": "not confirmed"}
CHANGE_NAMES = {
    "new": "new",
    "noise": "within noise",
    "undecided": "undecided",
    "incomparable": "not comparable",
    "met": "now met",
    "missed": "was met",
    "same": "the same",
    "failed": "–",
}


def title(batch: BatchRecord) -> str:
    """Return the result of the batch in one line."""
    return f"{batch.suite}: {batch.result}"


def totals(batch: BatchRecord) -> str:
    """Return the number of trials, the time, and the batch it is compared with, in one line."""
    spent = f"{formatting.clock(batch.spent_seconds)} of {formatting.clock(batch.budget_seconds)} spent"
    trials = formatting.count(sum(entry.trials for entry in batch.entries), "configuration")
    previous = Path(batch.previous)
    previous_name = previous.parent.name if previous.name == BATCH_FILE else previous.name
    against = f"compared with {previous_name}" if batch.previous else "no earlier batch to compare with"
    return f"{trials} tried, {spent}, {against}"


def value_words(entry: EntryRecord) -> str:
    """Return the recommended value, such as ``13,315 infer/s``; empty if there is none."""
    estimate = entry.recommended
    return formatting.quantity(METRICS[estimate.metric], estimate.value) if estimate else ""


def estimate_words(estimate: Estimate | None) -> str:
    """Return a value with its confidence interval, such as ``13,300 ± 300 infer/s``; empty without one."""
    if estimate is None:
        return ""
    metric = METRICS[estimate.metric]
    if estimate.low is None or estimate.high is None or metric.unit == "bytes":
        return formatting.quantity(metric, estimate.value)
    return formatting.estimate(estimate.value, ConfidenceInterval(estimate.low, estimate.high), metric.unit)


def bounded_words(entry: EntryRecord) -> str:
    """Return the bounded values of the recommendation, such as ``p95 17.3 ± 0.4 ms``; empty without one."""
    return ", ".join(f"{formatting.goal_label(one.metric)} {estimate_words(one)}" for one in entry.bounded)


def load_words(entry: EntryRecord) -> str:
    """Return the load of the recommendation: ``concurrency 24`` or ``3,000 req/s``; empty without one."""
    load = LoadPoint(1, entry.concurrency or 0, entry.request_rate or 0.0)
    return formatting.named_load(load) if load.concurrency or load.request_rate else ""


def interval_words(entry: EntryRecord) -> str:
    """Return its confidence interval, such as ``13,158 to 13,729``; empty if there is none."""
    estimate = entry.recommended
    if estimate is None or estimate.low is None or estimate.high is None:
        return ""
    return f"{formatting.number(estimate.low)} to {formatting.number(estimate.high)}"


def gain_words(entry: EntryRecord) -> str:
    """Return the gain over the baseline with its interval; empty without a recommendation."""
    if entry.recommended is None:
        return ""
    is_same = entry.gain is not None and entry.gain.ratio == RATIO_TO_ITSELF
    return "same" if is_same else formatting.gain(entry.gain)


def missing_gain_words(entry: EntryRecord) -> str:
    """Return that the usual states of the run are why there is no gain; empty if they are not."""
    missed = entry.missed_in_usual_states
    return f"gain {formatting.gain(None, missed, 'the current configuration')}" if missed else ""


def state_words(entry: EntryRecord) -> str:
    """Return the verdict, or why there is none."""
    return entry.verdict if entry.state == "found" or entry.is_undecided else STATE_NAMES[entry.state]


def change_words(entry: EntryRecord) -> str:
    """Return the change since the earlier batch, such as ``lost 5.8 %``; empty without an earlier batch."""
    change = entry.change
    if change is None:
        return ""
    if change.kind in ("lost", "gained"):
        return f"{change.kind} {change_percent(change.share or 0.0)}"
    return CHANGE_NAMES[change.kind]


TEMPLATE = "index.html.j2"


def write_batch(folder: BatchFolder, batch: BatchRecord) -> None:
    """Write batch.json, index.html, index.md and junit.xml. Raises EnvironmentFault if the disk refuses them."""
    folder.write(batch)
    write_atomically(folder.index, html(folder, batch, folder.path))
    write_atomically(folder.markdown, markdown(batch))
    write_atomically(folder.junit, junit(batch))


def html(folder: BatchFolder, batch: BatchRecord, page_folder: Path) -> str:
    """Return the page of a batch; ``page_folder`` is where it is written, from which its links start."""
    templates = template_environment(Path(__file__).parent, html=True)
    links = quote(os.path.relpath(folder.path, page_folder))
    return templates.get_template(TEMPLATE).render(
        title=title(batch),
        style=_page_style(batch),
        totals=totals(batch),
        batch=batch,
        has_changes=_has_changes(batch),
        rows=[_row(folder, entry) for entry in batch.entries],
        runs="" if links == "." else f"{links}/",
        hardware=sorted({entry.conditions["hardware"] for entry in batch.entries if "hardware" in entry.conditions}),
    )


def _has_changes(batch: BatchRecord) -> bool:
    """Return whether the batch was compared with an earlier one."""
    return any(entry.change is not None for entry in batch.entries)


def _test_command(folder: BatchFolder, entry: EntryRecord) -> str:
    """Return the command that continues the test of an UNDECIDED entry, or makes a separate one if it is complete.

    It also continues the test of an entry that passed with clearly less throughput than the search measured. It is
    empty if nothing is recommended, or only the baseline was measured.
    """
    if entry.recommended is None or not (entry.is_undecided or entry.throughput_notes) or entry.trials == 1:
        return ""
    run = folder.path / entry.folder
    if entry.remaining_tests.is_complete:
        return summary.fresh_command(run) if entry.is_undecided else ""
    return summary.verify_command(run, entry.remaining_tests)


def _page_style(batch: BatchRecord) -> str:
    """Return the CSS class of the title: ``bad``, ``undecided`` if nothing is worse, or empty."""
    if any((entry.state != "found" and not entry.is_undecided) or entry.regressed for entry in batch.entries):
        return "bad"
    return "undecided" if any(entry.is_undecided for entry in batch.entries) else ""


def _row(folder: BatchFolder, entry: EntryRecord) -> dict[str, object]:
    """Return the row of an entry in the page, by the names that its template uses."""
    change = entry.change
    is_bad = entry.has_missed or entry.state == "failed" or entry.regressed
    style = "bad" if is_bad else "undecided" if entry.is_undecided else ""
    return {
        "model": entry.model,
        "bound": entry.bounds,
        "target": entry.target,
        "measured": bounded_words(entry),
        "load": load_words(entry),
        "report": f"{entry.folder}/report.html" if is_file(RunFolder(folder.path / entry.folder).report) else "",
        "earlier": entry.earlier_folder if is_folder(folder.path / entry.earlier_folder) else "",
        "value": value_words(entry),
        "interval": interval_words(entry),
        "speedup": gain_words(entry),
        "state": state_words(entry),
        "style": style,
        "change": change_words(entry),
        "description": change.description if change is not None and change.kind != "new" else "",
        "configuration": entry.configuration if entry.recommended else entry.reason or entry.headline,
        "notes": [note for note in (missing_gain_words(entry), *entry.throughput_notes) if note],
        "cause": entry.headline if entry.is_undecided and entry.recommended else "",
        "command": _test_command(folder, entry),
    }


def markdown(batch: BatchRecord) -> str:
    """Return the table and the remarks in GitHub's Markdown, for a pull request or the summary of a job."""
    columns = _columns(batch)
    cells = [_cells(entry, columns) for entry in batch.entries]
    rows = [[column.lstrip(">") for column in columns], ["---"] * len(columns), *cells]
    table = [f"| {' | '.join(map(markdown_text, row))} |" for row in rows]
    remarks = [f"{entry.label}: {line}" for entry in batch.entries for line in _remarks(entry)]
    lines = [f"- {markdown_text(line)}" for line in (*remarks, *_gone_lines(batch))]
    heading = (f"## {markdown_text(title(batch))}", "", markdown_text(totals(batch)), "")
    return "\n".join([*heading, *table, "", *lines]).rstrip() + "\n"


# the columns of the table in text form; > marks one of numbers
COLUMNS: Mapping[str, Callable[[EntryRecord], str]] = {
    "model": lambda entry: " ".join(filter(None, (entry.model, entry.target))),
    "bound": lambda entry: entry.bounds,
    ">best": lambda entry: estimate_words(entry.recommended),
    "measured": bounded_words,
    "load": load_words,
    "gain": gain_words,
    "verdict": state_words,
    "before": change_words,
}
WIDE_COLUMNS = ("measured", "load")  # the table of the terminal, which has 80 columns, does not have them


def _columns(batch: BatchRecord) -> list[str]:
    """Return the headers of the table in text form."""
    return [name for name in COLUMNS if name != "before" or _has_changes(batch)]


def _cells(entry: EntryRecord, columns: Iterable[str]) -> list[str]:
    return [one_line(COLUMNS[name](entry)) for name in columns]


def junit(batch: BatchRecord) -> bytes:
    """Return the batch as JUnit XML.

    A missed SLA or a regression is a failure, a failed run an error. An UNDECIDED run is skipped.
    """
    counts = {
        "tests": len(batch.entries),
        "failures": sum(entry.has_missed or entry.regressed for entry in batch.entries),
        "errors": sum(entry.state == "failed" for entry in batch.entries),
    }
    totals_text = {name: str(count) for name, count in counts.items()}
    seconds = f"{batch.spent_seconds:.3f}"
    root = Element("testsuites", {"name": batch.suite, "time": seconds, **totals_text})
    skipped = {"skipped": str(sum(map(_is_skipped, batch.entries))), "timestamp": batch.started[:19]}
    suite = SubElement(root, "testsuite", {"name": batch.suite, "time": seconds, **totals_text, **skipped})
    for entry in batch.entries:
        _add_case(suite, batch.suite, entry)
    indent(root)
    return bytes(tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _add_case(suite: Element, name: str, entry: EntryRecord) -> None:
    """Add ``entry`` as a test case of the batch ``name`` to ``suite``."""
    attributes = {"classname": name, "name": one_line(entry.label), "time": f"{entry.seconds:.3f}"}
    case = SubElement(suite, "testcase", attributes)
    if entry.state == "failed":
        SubElement(case, "error", {"type": "fault", "message": one_line(entry.reason)})
    elif entry.has_missed:
        SubElement(case, "failure", {"type": "none", "message": one_line(entry.headline)})
    elif entry.regressed and entry.change is not None:
        SubElement(case, "failure", {"type": "regression", "message": one_line(entry.change.description)})
    elif _is_skipped(entry):
        unfinished = "the batch was interrupted before this run had ended"
        SubElement(case, "skipped", {"message": one_line(entry.headline) if entry.is_done else unfinished})
    change = entry.change.description if entry.change else ""
    missing_gain = missing_gain_words(entry)
    notes = entry.throughput_notes
    lines = (entry.headline, entry.verdict, missing_gain, *notes, entry.configuration, change, entry.folder)
    SubElement(case, "system-out").text = "\n".join(one_line(line) for line in lines if line)


def _is_skipped(entry: EntryRecord) -> bool:
    return not entry.is_done or (entry.is_undecided and not entry.regressed)


STATE_STYLES = {"found": "", "none": "red", "failed": "red"}


def print_batch(console: Console, batch: BatchRecord, folder: BatchFolder) -> None:
    """Print the results of ``batch`` and the path of its page."""
    _print_line(console, title(batch), "bold")
    _print_line(console, totals(batch))
    _print_line(console)
    columns = [name for name in _columns(batch) if name not in WIDE_COLUMNS]
    table = plain_table(*columns)
    table.columns[1].no_wrap = True
    for entry in batch.entries:
        style = "red" if entry.regressed else "yellow" if entry.is_undecided else STATE_STYLES.get(entry.state, "dim")
        shown = _cells(entry, columns)
        shown[1] = shown[1].replace(" and ", "\nand ")
        table.add_row(*(Text(cell, style, overflow="fold") for cell in shown))
    print_table(console, table)
    remarks = [(entry, line) for entry in batch.entries for line in _remarks(entry)]
    if remarks or batch.gone:
        _print_line(console)
    for entry, line in remarks:
        style = "red" if entry.regressed else "" if entry.is_undecided else STATE_STYLES.get(entry.state, "red")
        _print_line(console, f"{entry.label}: {line}", style)
    for line in _gone_lines(batch):
        _print_line(console, line)
    _print_line(console)
    for entry in batch.entries:
        if command := _test_command(folder, entry):
            print_unbroken(console, f"next    {command}")
    print_unbroken(console, f"index   {show_path(folder.index)}")


def _remarks(entry: EntryRecord) -> list[str]:
    """Return the lines below the table on an entry without a PASS, without a gain, or with a change."""
    headline = entry.headline if entry.has_missed or entry.is_undecided else ""
    remarks = [entry.reason, headline, missing_gain_words(entry), *entry.throughput_notes]
    if entry.change is not None and entry.change.kind not in ("new", "noise", "same"):
        remarks.append(entry.change.description)
    return [remark for remark in remarks if remark]


def _gone_lines(batch: BatchRecord) -> list[str]:
    return [f"{label}: in the earlier batch, and no longer in the suite" for label in batch.gone]


def _print_line(console: Console, text: str = "", style: str = "") -> None:
    """Print ``text`` without markup: names of models and files may contain brackets."""
    for line in wrap(one_line(text), console.width) or [""]:
        print_unbroken(console, line, style)
