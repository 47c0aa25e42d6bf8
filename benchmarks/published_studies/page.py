"""The page of a study: its subject, the machine, the tables and the commands."""

from __future__ import annotations

from collections.abc import Mapping

from kept import StepRecord, StepResults, all_cells
from published import published
from side_by_side import tables
from studies import Study


def markdown(study: Study, records: Mapping[int, StepRecord]) -> str:
    """Return the text of STUDY.md from the records of its steps."""
    ordered = [record for _, record in sorted(records.items())]
    results = [record for record in ordered if isinstance(record, StepResults)]
    missing = [record for record in ordered if isinstance(record, str)]
    notes = dict.fromkeys([note for one in results for note in one.notes] + [*study.remarks, *missing])
    loads = [one.load_average for one in results if one.load_average is not None]
    lines = [
        f"# {study.title}",
        "",
        f"Written by `python benchmarks/published_studies/run.py {study.name}`.",
        "",
        f"- Published study: {study.there}.",
        f"- Source: [{study.source}]({study.url}).",
        f"- Published result: {study.point}.",
        f"- This study: {study.setup}.",
        f"- Machine: {', '.join(dict.fromkeys(one.hardware for one in results)) or 'none'}; "
        f"{', '.join(dict.fromkeys(one.began[:10] for one in results))}; load averages when the steps began: "
        f"{', '.join(f'{load:g}' for load in loads) or 'not known'}.",
        *(f"- Note: {note}." for note in notes),
        "",
        tables(all_cells(ordered), published(study.name), study.ratios),
        "",
        "## Commands",
        "",
        "```sh",
        *dict.fromkeys(one.command for one in results),
        "```",
        "",
    ]
    return "\n".join(lines)
