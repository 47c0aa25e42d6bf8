"""What proposes the trials of a run: by which method, in which storage, shared with whom, begun with what."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from optimizer.errors import BadInputError
from optimizer.interfaces import Searcher
from optimizer.machine.fingerprint import Fingerprint
from optimizer.options import RunOptions
from optimizer.problem import Problem
from optimizer.search import make_searcher, searcher_on
from optimizer.search.elsewhere import Elsewhere
from optimizer.store.run_folder import RunFolder
from optimizer.task import Task

if TYPE_CHECKING:
    from optimizer.sharing.shared_study import SharedStudy


def shown_elsewhere(
    options: RunOptions, what: Task, resumed: RunFolder | None
) -> tuple[Elsewhere | None, tuple[str, ...]]:
    """What ``--warm-start`` showed, and what to say of it. A run that is continued goes on without, if need be."""
    if options.warm_start is None:
        return None, ()
    from optimizer.replay.source import fitting, read_source

    compared = [candidate for _, candidate in what.comparisons()]
    try:
        source = read_source(options.warm_start, options.out, what.problem.request_batch_size)
        return fitting(source, what.problem, compared)
    except BadInputError as error:
        if resumed is None:
            raise
        return None, (f"went on without what it began with: {error}",)


@contextlib.contextmanager
def opened(
    options: RunOptions,
    problem: Problem,
    folder: RunFolder,
    here: Fingerprint,
    elsewhere: Elsewhere | None,
    spent_seconds: float,
    say: Callable[[str], None],
) -> Iterator[tuple[Searcher, SharedStudy | None]]:
    """The searcher, and the study where it is shared with other workers. Raises TuneError."""
    if options.join is not None:
        from optimizer.sharing.join import join
        from optimizer.store.patience import Patience
        from optimizer.store.study import Shared

        patience = Patience(time.monotonic() + options.budget_seconds - spent_seconds, say, str(folder.trials))
        with join(options, problem, folder, here, Shared(patience)) as shared:
            yield searcher_on(shared.ledger, options.search, problem, options.seed, elsewhere), shared
        return
    storage, name = options.storage or str(folder.study), folder.study_name
    yield (
        make_searcher(options.search, problem, options.seed, storage, name, fingerprint=here, elsewhere=elsewhere),
        None,
    )
