"""The loop of a batch: each entry its minimum, slices to the one that promises most, then each confirmed.

A slice is an ordinary run that goes on with a larger budget; between slices only its folder is kept.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from optimizer import interrupts
from optimizer.batches.folder import BatchFolder
from optimizer.batches.promise import promise
from optimizer.batches.record import BatchRecord, EntryRecord, State
from optimizer.batches.sharing import (
    MINIMUM_TRIALS,
    Standing,
    confirm_seconds,
    minimum_seconds,
    next_slice,
    search_seconds,
)
from optimizer.batches.standing import described, search_is_over, standing
from optimizer.batches.suite import Suite
from optimizer.budget import spent_seconds
from optimizer.command_line import redact
from optimizer.errors import BadInputError, EnvironmentFault, TuneError
from optimizer.options import RunOptions
from optimizer.store.finished import FinishedRun, read_run
from optimizer.store.run_folder import RunFolder
from optimizer.untrusted import one_line

MOST_REASON = 400  # characters


class GoOn(Protocol):
    """Begins the run in ``folder`` or goes on with it: its status. ``options`` have the budget of the whole run; of
    that ``confirm_share`` is for the confirmation, see ``session.tune``. Raises TuneError."""

    def __call__(self, options: RunOptions, folder: RunFolder, confirm_share: float) -> str: ...


@dataclass
class Batch:
    """``record`` is at any time what is in the folder. ``say`` gets a line for each slice."""

    suite: Suite
    folder: BatchFolder
    record: BatchRecord
    go_on: GoOn
    say: Callable[[str], None]
    promise: Callable[[FinishedRun], float] = promise
    clock: Callable[[], float] = time.monotonic
    _standings: dict[int, Standing] = field(init=False, default_factory=dict)

    def run(self) -> BatchRecord:
        """An entry that fails does not end it, an interrupt (KeyboardInterrupt) does. Raises EnvironmentFault where
        the disk refuses the record."""
        try:
            self._keep(status="running")
            self._minimums()
            self._slices()
            self._confirmations()
            self._keep(status="finished")
        except KeyboardInterrupt:
            interrupts.acknowledge()
            self._keep(status="interrupted")
        return self.record

    def _minimums(self) -> None:
        most_seconds = minimum_seconds(self.record.budget_seconds, len(self.record.entries))
        for index, entry in enumerate(self.record.entries):
            if entry.state == "waiting":
                seconds = max(0.0, most_seconds - entry.seconds)
                self.say(f"{entry.label}: its minimum, at most {seconds:.0f} s")
                self._carry_on(index, seconds, most_trials=MINIMUM_TRIALS)

    def _slices(self) -> None:
        while True:
            if self._search_seconds_left() <= 0:
                return
            standings = [self._standing(index) for index in range(len(self.record.entries))]
            chosen = next_slice(standings, self._search_seconds_left())
            if chosen is None:
                return
            expected = standings[chosen.index].promise
            told = f"{chosen.seconds:.0f} s more, another deployment promises {100 * expected:.2g}%"
            self.say(f"{self.record.entries[chosen.index].label}: {told}")
            self._carry_on(chosen.index, chosen.seconds)

    def _search_seconds_left(self) -> float:
        return search_seconds(self.record.budget_seconds) - self.record.spent_seconds

    def _confirmations(self) -> None:
        pending = [index for index, entry in enumerate(self.record.entries) if entry.state == "searched"]
        for done, index in enumerate(pending):
            left_seconds = self.record.budget_seconds - self.record.spent_seconds
            seconds = confirm_seconds(left_seconds, len(pending) - done)
            self.say(f"{self.record.entries[index].label}: measured again on fresh servers, at most {seconds:.0f} s")
            self._carry_on(index, seconds, confirm_share=1.0)
            after = self.record.entries[index]
            if after.state != "failed":
                self.say(f"{after.label}: {after.headline}")

    def _standing(self, index: int) -> Standing:
        """Looked at again once the entry was carried on: what a run promises takes seconds to tell."""
        if index not in self._standings:
            entry = self.record.entries[index]
            run = None if entry.is_done else self._read(entry)
            if run is None:
                self._standings[index] = Standing(entry.seconds, 0.0, 0.0, is_over=True)
            else:
                started = self.clock()
                self._standings[index] = standing(entry, run, self.promise)
                self._put(index, replace(entry, seconds=entry.seconds + self.clock() - started))
        return self._standings[index]

    def _carry_on(
        self, index: int, seconds: float, confirm_share: float = 0.0, most_trials: int | None = None
    ) -> None:
        """One slice. Raises KeyboardInterrupt, what was measured kept."""
        before, given = self.record.entries[index], self.suite.entries[index].options
        folder, run = RunFolder(self.folder.path / before.folder), self._read(before)
        spent = spent_seconds(run.trials) if run else 0.0
        limits = [most for most in (given.max_trials, most_trials) if most is not None]
        options = replace(given, budget_seconds=spent + seconds, max_trials=min(limits, default=None))
        started, status, reason = self.clock(), "failed", ""
        try:
            _make(folder)
            status = self.go_on(options, folder, confirm_share)
        except KeyboardInterrupt:
            interrupts.acknowledge()
            status = "interrupted"
        except TuneError as error:
            reason = str(error).partition("\n")[0] + (f" (the log: {error.log})" if error.log else "")
        except Exception as error:  # the other entries are to have their turn
            self.say(redact(traceback.format_exc()))
            reason = f"a fault of tune itself: {type(error).__name__}: {redact(str(error))}"
        after = self._after(index, status, self.clock() - started, confirmed=confirm_share > 0)
        if status == "failed":
            after = replace(after, state="failed", figure=None, reason=one_line(reason, MOST_REASON))
            self.say(f"{after.label}: failed: {after.reason}")
        self._standings.pop(index, None)
        self._put(index, after)
        if status == "interrupted":
            raise KeyboardInterrupt

    def _after(self, index: int, status: str, seconds: float, *, confirmed: bool) -> EntryRecord:
        before = self.record.entries[index]
        run = self._read(before)
        if run is None:
            return replace(before, seconds=before.seconds + seconds)
        if before.seconds == 0:  # what is fetched and built once is nobody's
            seconds -= run.info.get("times", {}).get("set_up_seconds", 0.0)
        after = described(replace(before, seconds=before.seconds + max(0.0, seconds)), run)
        if status == "interrupted":
            return after
        measured = len(run.trials) + sum(len(trial.measurements) for trial in run.trials)
        stalled = before.state != "waiting" and measured == before.measured
        over = search_is_over(run, self.suite.entries[index].options.max_trials) or stalled
        state: State = ("found" if after.figure else "none") if confirmed else "searched"
        return replace(after, state=state, search_is_over=over, measured=measured)

    def _read(self, entry: EntryRecord) -> FinishedRun | None:
        """None where it has come to nothing yet."""
        with suppress(BadInputError):
            return read_run(self.folder.path / entry.folder)
        return None

    def _put(self, index: int, entry: EntryRecord) -> None:
        self._keep(entries=(*self.record.entries[:index], entry, *self.record.entries[index + 1 :]))

    def _keep(self, **changed: Any) -> None:
        written = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        self.record = replace(self.record, written=written, **changed)
        self.folder.write(self.record)


def _make(folder: RunFolder) -> None:
    try:
        (folder.path / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentFault(f"cannot make {folder.path}: {error.strerror}") from error
