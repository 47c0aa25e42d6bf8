"""A batch as JUnit XML, as CI servers read it: an entry is a test case.

One that failed by a fault is an error, one without a configuration that meets its bounds or that regressed is a
failure, one that was not done is skipped. Elements and attributes are those of the Jenkins schema (junit-10).
"""

from __future__ import annotations

from xml.etree.ElementTree import Element, SubElement, indent, tostring

from optimizer.batches.record import BatchRecord, EntryRecord
from optimizer.untrusted import one_line


def junit(batch: BatchRecord) -> bytes:
    counts = {
        "tests": len(batch.entries),
        "failures": sum(_is_failure(entry) for entry in batch.entries),
        "errors": sum(entry.state == "failed" for entry in batch.entries),
    }
    told = {name: str(count) for name, count in counts.items()}
    seconds = f"{batch.spent_seconds:.3f}"
    root = Element("testsuites", {"name": batch.suite, "time": seconds, **told})
    skipped = {"skipped": str(sum(not entry.is_done for entry in batch.entries)), "timestamp": batch.started[:19]}
    suite = SubElement(root, "testsuite", {"name": batch.suite, "time": seconds, **told, **skipped})
    for entry in batch.entries:
        _add(suite, batch.suite, entry)
    indent(root)
    return bytes(tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _is_failure(entry: EntryRecord) -> bool:
    return entry.state == "none" or entry.regressed


def _add(suite: Element, name: str, entry: EntryRecord) -> None:
    attributes = {"classname": name, "name": one_line(entry.label), "time": f"{entry.seconds:.3f}"}
    case = SubElement(suite, "testcase", attributes)
    if entry.state == "failed":
        SubElement(case, "error", {"type": "fault", "message": one_line(entry.reason)})
    elif entry.state == "none":
        SubElement(case, "failure", {"type": "none", "message": one_line(entry.headline)})
    elif entry.regressed and entry.change is not None:
        SubElement(case, "failure", {"type": "regression", "message": one_line(entry.change.told)})
    elif not entry.is_done:
        SubElement(case, "skipped", {"message": "the batch was interrupted before it"})
    told = [
        entry.headline,
        entry.verdict,
        entry.configuration,
        entry.change.told if entry.change else "",
        entry.folder,
    ]
    SubElement(case, "system-out").text = "\n".join(one_line(line) for line in told if line)
