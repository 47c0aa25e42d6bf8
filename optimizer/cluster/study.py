"""A study whose trials run on a cluster: what the session asks in place of this machine's stack."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from optimizer.cluster.confirming import Confirming
from optimizer.cluster.connect import connected
from optimizer.cluster.driver import Driver
from optimizer.cluster.keeper import Keeper
from optimizer.cluster.parcel import pack
from optimizer.cluster.pool import Pool
from optimizer.cluster.share import Share, read_nodes, share_of
from optimizer.cluster.worker import About
from optimizer.cluster.workers import Workers
from optimizer.course import Course
from optimizer.deploy.seen_gpus import SeenGpus
from optimizer.errors import BadInputError, EnvironmentFault
from optimizer.machine.cpus import Placement
from optimizer.machine.fingerprint import Fingerprint
from optimizer.open_loop.arrivals import arrivals
from optimizer.options import RunOptions
from optimizer.stack import Stack
from optimizer.stopwatch import Stopwatch
from optimizer.study import Found, Study
from optimizer.task import Task
from optimizer.trial import SERVER_CPUS

ON_GPU = "KIND_GPU"


@dataclass(frozen=True)
class ClusterStudy:
    """``stack`` is that of a node that is like all others: it prepares the task, and deploys nothing here."""

    stack: Stack
    share: Share
    workers: Workers

    def furnish(self, what: Task) -> Fingerprint:
        """Send the model to the nodes; what measurements there depend on. Raises TuneError."""
        if SERVER_CPUS in what.problem.space.fields:
            raise BadInputError(
                f"space: {SERVER_CPUS}: a trial on a cluster gets CPUs of its node that are free: leave it out"
            )
        kinds = {group.kind for config in what.source.models.values() for group in config.instance_group}
        if not self.share.gpus and any(_name(kind) == ON_GPU for kind in kinds):
            raise EnvironmentFault(
                f"{what.source.name}: its instances are {ON_GPU}, and trials have no GPU: "
                + (
                    "leave --cluster-cpus out"
                    if self.stack.options.cluster_cpus
                    else "no node of the cluster has one"
                )
            )
        if self.share.gpus and not what.on_gpu:
            self.stack.say(f"{what.source.name} is served on CPUs, and each trial takes a GPU: see --cluster-cpus")
        return self.workers.pool.furnish(pack(what, self.stack.options))

    def run(self, study: Study) -> Found:
        """Search, then confirm. What was spent of the budget, several trials spent at the same time."""
        what, stopwatch, pool = study.what, self.stack.stopwatch, self.workers.pool
        with study.record.naming(self.workers):
            study.prepare(self.stack)
            budget = study.budget(max(1, len(pool.places)))
            with study.watch(what.problem, budget, self.stack.hardware) as watcher, contextlib.ExitStack() as undo:
                keeper = Keeper(study.table, watcher, study.record.folder, self.stack.say)
                with stopwatch.searching():
                    searcher, _ = undo.enter_context(study.search())
                course = Course(what.problem, searcher, budget, stopwatch, what.comparisons())
                trials = Driver(self.workers, course, keeper).run()
                confirming = Confirming(self.workers, keeper, budget)
                if study.confirm_share > 0:
                    with stopwatch.confirming():
                        trials = confirming.run(trials)
        return Found(trials, course.satisfied, (*pool.notes, *confirming.notes))


@contextlib.contextmanager
def on_cluster(
    options: RunOptions, stopwatch: Stopwatch, say: Callable[[str], None], wanted: Fingerprint | None
) -> Iterator[ClusterStudy]:
    """Workers on the cluster that ``options`` names, gone at the end. ``wanted`` is that of a run which is continued.
    Raises EnvironmentFault where there is none that can be used."""
    assert options.cluster is not None
    arrivals(options.arrivals)  # a file that is none is told before anything is started
    with stopwatch.set_up(), contextlib.ExitStack() as undo:
        ray = undo.enter_context(connected(options.cluster))
        share = share_of(read_nodes(ray.nodes()), options.cluster_cpus)
        pool = Pool(ray, options, share, say)
        undo.callback(pool.close)
        about = pool.first(wanted)
        ending = undo.pop_all()
    with ending:
        yield ClusterStudy(_stack(options, about, share, stopwatch, say), share, Workers(pool, stopwatch))


def _stack(
    options: RunOptions, about: About, share: Share, stopwatch: Stopwatch, say: Callable[[str], None]
) -> Stack:
    server, client = about.placement.server, about.placement.client
    apart = "" if server & client else f", {len(client)} of them for the load generator"
    note = f"each trial took {share} of a node of the cluster{apart}"
    placed = Placement(server, client, note)
    return Stack(
        options, about.hardware, SeenGpus(about.hardware.gpus, fault=about.gpus_fault), stopwatch, say, placed
    )


def _name(kind: int) -> str:
    from tritonclient.grpc.model_config_pb2 import ModelInstanceGroup

    return str(ModelInstanceGroup.Kind.Name(kind))
