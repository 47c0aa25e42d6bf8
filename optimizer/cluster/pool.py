"""The workers on a Ray cluster: begun wherever there is room, lost, and begun again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from optimizer.cluster.alike import Kind, kind, usual
from optimizer.cluster.jobs import ConfirmJob, Job
from optimizer.cluster.parcel import Parcel
from optimizer.cluster.place import Happening, Joined, Lost, Place
from optimizer.cluster.share import Node, Share, read_nodes
from optimizer.cluster.worker import About, Worker, check_version
from optimizer.errors import BadInputError, EnvironmentFault, TuneError
from optimizer.machine.fingerprint import Fingerprint
from optimizer.options import RunOptions
from optimizer.untrusted import one_line

TOLD_SECONDS = 30.0  # that a worker with nothing to tell is asked for
LOOK_SECONDS = 5.0  # between two looks at which nodes there are
FIRST_SECONDS = 60.0  # to the first worker, before the user is told what is waited for
OTHERS_SECONDS = 3.0  # that the others get once there is one, before it is decided whose hardware counts
CLOSE_SECONDS = 5.0
CALLS_AT_ONCE = 4  # of one worker: work, telling, closing


class Pool:
    """As many workers as the cluster has room for, each with ``share`` for itself. ``say`` gets a line for what the
    user should know, which is in ``notes`` too."""

    def __init__(self, ray: Any, options: RunOptions, share: Share, say: Callable[[str], None]) -> None:
        self._ray, self._options, self._share, self._say = ray, options, share, say
        self.places: list[Place] = []
        self.notes: list[str] = []
        self._nodes: list[Node] = []
        self._left_out: dict[str, str] = {}  # why, by the node's id
        self._actor = ray.remote(Worker)
        self._parcel: Any = None
        self._kind: Kind | None = None  # that counts
        self._fingerprint: Fingerprint | None = None
        self._looked = -LOOK_SECONDS

    def first(self, wanted: Fingerprint | None) -> About:
        """A worker of the kind that most are of, or of that which ``wanted`` is of. Raises EnvironmentFault where no
        node can do what is asked."""
        began, alone_since, told = time.monotonic(), None, False
        while True:
            self._look()
            started = [place.about for place in self.places if place.about and place.state == "started"]
            now = time.monotonic()
            if started and alone_since is None:
                alone_since = now
            if alone_since is not None and (len(started) == len(self.places) or now - alone_since > OTHERS_SECONDS):
                about = usual(started, wanted)
                self._kind = kind(about)
                return about
            if self.is_hopeless:
                raise EnvironmentFault(f"--cluster: no node can be used: {self.why_none()}")
            if now - began > FIRST_SECONDS and not told:
                told = True
                self._say(f"waiting for {self._share} on the cluster; `ray status` tells who has them")
            for _ in self._happened(0.2):
                pass

    def furnish(self, parcel: Parcel) -> Fingerprint:
        """Send the model to every worker, and to those that will join. That of the first to be ready is what all the
        others are held to. Raises EnvironmentFault where none gets ready."""
        self._parcel = self._ray.put(parcel)
        for place in [place for place in self.places if place.state == "started"]:
            self._check_kind(place)
        while self._fingerprint is None:
            for _ in self._happened(0.2):
                pass
            self._look()
            if self.is_hopeless:
                raise EnvironmentFault(f"--cluster: no node can be used: {self.why_none()}")
        return self._fingerprint

    def ready(self) -> list[Place]:
        return [place for place in self.places if place.state == "ready"]

    def send(self, place: Place, job: Job) -> None:
        call = place.actor.confirm if isinstance(job, ConfirmJob) else place.actor.run
        place.waited[call.remote(job)] = "work"

    def happened(self, seconds: float) -> list[tuple[Place, Happening]]:
        """What happens within that time, in order for each worker; it does not wait longer than for the first."""
        self._look()
        return list(self._happened(seconds))

    def leave_out(self, place: Place, reason: str) -> None:
        """Use its node no more."""
        line = f"{place.host} is left out: {reason}"
        if place.node.id not in self._left_out:
            self._left_out[place.node.id] = line
            self._tell(line)
        place.state, place.waited = "leaving", {place.actor.close.remote(): "close"}

    @property
    def is_hopeless(self) -> bool:
        """Whether there is no worker, and none is to be expected: each node is left out."""
        others = [node for node in self._nodes if node.id not in self._left_out and self._share.rooms(node)]
        return bool(self._left_out) and not others and all(place.state == "leaving" for place in self.places)

    def why_none(self) -> str:
        return list(self._left_out.values())[-1] if self._left_out else "its nodes are gone; `ray status` tells"

    def close(self) -> None:
        """End all workers, their servers first."""
        closing = [place.actor.close.remote() for place in self.places if place.about]
        with contextlib.suppress(Exception):  # whatever Ray says of workers that are gone
            self._ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
        for place in list(self.places):
            self._drop(place)

    # -- who is there -----------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Begin workers where there is room for more."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        self._nodes = read_nodes(self._ray.nodes())
        for node in self._nodes:
            there = sum(place.node.id == node.id for place in self.places)
            for _ in range(self._share.rooms(node) - there if node.id not in self._left_out else 0):
                self._begin(node)

    def _begin(self, node: Node) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor = self._actor.options(
            num_cpus=self._share.cpus,
            num_gpus=self._share.gpus,
            max_concurrency=CALLS_AT_ONCE,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        ).remote(self._options, self._share.cpus, self._share.gpus, node.cpus)
        place = Place(actor, node)
        place.waited[actor.about.remote()] = "about"
        self.places.append(place)

    def _drop(self, place: Place) -> None:
        if place in self.places:
            self.places.remove(place)
        with contextlib.suppress(Exception):
            self._ray.kill(place.actor)

    def _tell(self, line: str) -> None:
        self.notes.append(line)
        self._say(line)

    # -- what they answer -------------------------------------------------------------------------------------

    def _happened(self, seconds: float) -> Iterator[tuple[Place, Happening]]:
        asked = {ref: place for place in self.places for ref in place.waited}
        if not asked:
            time.sleep(seconds)  # until nodes come
            return
        answered, _ = self._ray.wait(list(asked), num_returns=1, timeout=seconds)
        more, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=0)
        for ref in dict.fromkeys([*answered, *more]):
            place = asked[ref]
            if place in self.places and (call := place.waited.pop(ref, None)):
                yield from self._answered(place, call, ref)

    def _answered(self, place: Place, call: str, ref: Any) -> Iterator[tuple[Place, Happening]]:
        if call == "close":
            self._drop(place)
            return
        try:
            answer = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            self._refused(place, call, error)
            yield place, Lost("it could not begin")
            return
        except self._ray.exceptions.RayError as error:
            self._drop(place)
            yield place, Lost(_last_line(error))
            return
        if call == "about":
            self._started(place, answer)
        elif call == "furnish":
            yield from self._furnished(place, answer)
        elif call == "told":
            self._listen(place)
            yield from ((place, event) for event in answer)

    def _started(self, place: Place, about: About) -> None:
        place.about, place.state = about, "started"
        try:
            check_version(about)
        except TuneError as error:
            self.leave_out(place, str(error))
            return
        if about.note and about.note not in self.notes:
            self._tell(about.note)
        if self._parcel is not None:
            self._check_kind(place)

    def _check_kind(self, place: Place) -> None:
        assert place.about is not None
        if kind(place.about) != self._kind:
            self.leave_out(place, f"{place.about.hardware}: measurements there would not be comparable")
            return
        place.state = "furnishing"
        place.waited[place.actor.furnish.remote(self._parcel)] = "furnish"

    def _furnished(self, place: Place, fingerprint: Fingerprint) -> Iterator[tuple[Place, Happening]]:
        if self._fingerprint is None:
            self._fingerprint = fingerprint
        if fingerprint != self._fingerprint:
            differences = self._fingerprint.differences(fingerprint)
            self.leave_out(place, f"measurements there would not be comparable ({differences})")
            return
        place.state = "ready"
        self._listen(place)
        yield place, Joined()

    def _listen(self, place: Place) -> None:
        place.waited[place.actor.told.remote(TOLD_SECONDS)] = "told"

    def _refused(self, place: Place, call: str, error: Any) -> None:
        """A fault of the node's leaves it out; one of tune's own is raised, as is what no node could do."""
        cause = getattr(error, "cause", None)
        if call == "about" and "No module named 'optimizer'" in str(error):
            self.leave_out(place, "it has no tritune; pip install 'tritune[ray]' there")
        elif call == "furnish" and isinstance(cause, BadInputError):
            raise BadInputError(str(cause)) from None
        elif isinstance(cause, TuneError):
            self.leave_out(place, str(cause))
        else:
            raise error


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return one_line(lines[-1] if lines else type(error).__name__, 200)
