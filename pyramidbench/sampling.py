"""Sampling in turns: the calls of a group one after another, forth and back, until the median of each is known.

Round 1 goes A B C, round 2 C B A, and so on (ABBA), so that drift of the device meets all alike. A call leaves when its
median is known well enough or its time is spent; until then it has one sample in every round, so that the i-th samples
of two calls always are of one round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pyramidbench.clock import Announce, Call, Clock, nobody
from pyramidbench.nvml import DeviceState, Unwatched, Watch
from pyramidbench.stats import median_interval

ENOUGH_SAMPLES = 30
ENOUGH_SECONDS = 0.1
FEWEST_SAMPLES = 3
CLOSE_ENOUGH = 0.005
"""Half width of the interval of the median, relative, at which sampling stops."""
CHECK_GROWTH = 1.1
"""The interval, a bootstrap of 2 ms, is looked at again when so many times the samples are there."""
WARM_UP = ((1e-3, 0.1), (1e-2, 1.0), (math.inf, 3.0))
"""Seconds of warm-up by the time of a call: a call under 1 ms gets 0.1 s, one under 10 ms 1 s, a longer one 3 s."""
WARM_UP_CALLS = 3
"""Calls of a warm-up at least, where they take longer than that."""
BATCH_S = 0.02
LONGEST_BATCH = 10
"""Rounds between two synchronises: about 20 ms of them, at most 10."""
BLOCK_S = 0.25
"""Sampling between two readings of the device's state."""
RETRIES = 3
"""Throttled blocks of a session that are thrown away and measured again; later ones are kept and marked."""


@dataclass(frozen=True)
class Sampled:
    """What a session gave for one call.

    first_s: its first call, which is no sample. seconds: the samples in the order taken. turns: the place of each among
    all timed calls of the session. state: the worst that was read around its blocks; None where nothing can be read.
    throttled: whether a block was kept during which the device held itself back.
    """

    first_s: float
    seconds: tuple[float, ...]
    turns: tuple[int, ...]
    state: DeviceState | None = None
    throttled: bool = False


@dataclass
class _Entrant:
    """One call of a session, and how far it has come."""

    index: int
    call: Call
    first_s: float = 0.0
    once_s: float = 0.0
    spent_s: float = 0.0
    seconds: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    states: list[DeviceState] = field(default_factory=list)
    throttled: bool = False
    settled: bool = False
    look_again: int = ENOUGH_SAMPLES

    def forget(self, kept: int) -> None:
        """Drop all samples but the first `kept`."""
        del self.seconds[kept:], self.turns[kept:]
        self.settled, self.look_again = False, max(ENOUGH_SAMPLES, kept)

    def is_done(self, budget_s: float) -> bool:
        count = len(self.seconds)
        if count < FEWEST_SAMPLES:
            return False
        if self.spent_s >= budget_s:
            return True
        if count >= self.look_again and sum(self.seconds) >= ENOUGH_SECONDS:
            self.look_again = math.ceil(CHECK_GROWTH * count)
            self.settled = median_interval(self.seconds).relative_half_width <= CLOSE_ENOUGH
        return self.settled


def sample_in_turns(
    calls: Sequence[Call],
    clock: Clock,
    budget_s: float,
    watch: Watch | None = None,
    announce: Announce = nobody,
    *,
    one_by_one: bool = False,
) -> list[Sampled]:
    """Steady-state samples of each call, measured in turns.

    Each call is warmed up (at most a third of the budget), then sampled until it has 30 samples and 0.1 s, and the 95 %
    interval of its median is within ±0.5 %; or until it has had `budget_s` seconds, but never fewer than 3 times.
    `announce(i)` says whose turn it is; with `one_by_one` the device is waited for after every call, so that a fault that
    shows late belongs to the call that was announced last.
    """
    return Session(calls, clock, budget_s, watch or Unwatched(), announce, one_by_one).run()


class Session:
    """One measurement in turns; `sample_in_turns` says what it does."""

    def __init__(
        self, calls: Sequence[Call], clock: Clock, budget_s: float, watch: Watch, announce: Announce, one_by_one: bool
    ) -> None:
        self.entrants = [_Entrant(index, call) for index, call in enumerate(calls)]
        self.clock, self.budget_s, self.watch = clock, budget_s, watch
        self.announce, self.one_by_one = announce, one_by_one
        self.round = self.turn = 0
        self.retries = RETRIES

    def run(self) -> list[Sampled]:
        """Warm up and sample."""
        for entrant in self.entrants:
            self._warm_up(entrant)
        while active := self._active(self.entrants):
            self._block(active)
        return [
            Sampled(e.first_s, tuple(e.seconds), tuple(e.turns), DeviceState.worst(e.states) if e.states else None,
                    e.throttled)
            for e in self.entrants
        ]  # fmt: skip

    def _active(self, entrants: Sequence[_Entrant]) -> list[_Entrant]:
        return [entrant for entrant in entrants if not entrant.is_done(self.budget_s)]

    def _warm_up(self, entrant: _Entrant) -> None:
        """The first call, then further ones; the fastest so far says how long they go on."""
        (entrant.first_s,) = self._make([entrant])
        fastest, calls = entrant.first_s, 1
        while not _is_warm(fastest, calls, entrant.spent_s, self.budget_s):
            taken = self._make([entrant] * _batch(fastest))
            fastest, calls = min(fastest, *taken), calls + len(taken)
        entrant.once_s = fastest

    def _block(self, entrants: list[_Entrant]) -> None:
        """Rounds between two readings of the device's state; thrown away where it held itself back, as often as may be."""
        kept = [len(entrant.seconds) for entrant in entrants]
        before, start, active = self.watch.read(), self.clock.now(), entrants
        while active and self.clock.now() - start < BLOCK_S:
            self._rounds(active)
            active = self._active(active)
        states = [state for state in (before, self.watch.read()) if state is not None]
        throttled = any(state.throttled for state in states)
        if throttled and self.retries:
            self.retries -= 1
            for entrant, count in zip(entrants, kept):
                entrant.forget(count)
            self.watch.rest()
            return
        for entrant in entrants:
            entrant.states += states
            entrant.throttled |= throttled

    def _rounds(self, active: list[_Entrant]) -> None:
        """As many rounds as make a batch; each goes the other way than the one before."""
        count = min(_batch(sum(e.once_s for e in active)), *(self._affordable(e) for e in active))
        order: list[_Entrant] = []
        for _ in range(max(1, count)):
            order += active if self.round % 2 == 0 else active[::-1]
            self.round += 1
        for entrant, seconds in zip(order, self._make(order)):
            entrant.seconds.append(seconds)
            entrant.turns.append(self.turn)
            self.turn += 1

    def _affordable(self, entrant: _Entrant) -> int:
        """Calls that the rest of its budget allows."""
        return int((self.budget_s - entrant.spent_s) / max(entrant.once_s, 1e-6))

    def _announcing(self, part: Sequence[_Entrant]) -> Announce:
        return lambda place: self.announce(part[place].index)

    def _make(self, order: Sequence[_Entrant]) -> list[float]:
        """Time these calls, and charge each with its seconds and its part of what they took besides."""
        start = self.clock.now()
        taken: list[float] = []
        size = 1 if self.one_by_one else len(order)
        for first in range(0, len(order), size):
            part = order[first : first + size]
            taken += self.clock.turns([entrant.call for entrant in part], self._announcing(part))
        besides = (self.clock.now() - start - sum(taken)) / len(order)
        for entrant, seconds in zip(order, taken):
            entrant.spent_s += seconds + besides
        return taken


def _is_warm(call_s: float, calls: int, spent_s: float, budget_s: float) -> bool:
    """Whether a call that takes `call_s` has been warmed up by `calls` of it in `spent_s` seconds."""
    wanted = next(seconds for limit, seconds in WARM_UP if call_s < limit)
    return spent_s >= budget_s / 3 or (spent_s >= wanted and calls >= WARM_UP_CALLS)


def _batch(seconds: float) -> int:
    return max(1, min(LONGEST_BATCH, int(BATCH_S / max(seconds, 1e-6))))
