"""Is the engine there? The client's half of hello and heartbeats, as a state machine without IO.

::

    GREETING --welcome--> READY --silence or "who are you"--> LOST --somebody listens--> GREETING
        `------silence------------------------------------------^

Times are the caller's monotonic seconds.
"""

from __future__ import annotations

import enum
import math

HANG_FACTOR = 4
"""How much longer than a client an engine may be silent.

One whose process ended is noticed without any silence; to lose one that is only held up costs the
turns that run there.
"""
PROBE_S = 0.2
"""How often a lost engine is looked for."""


class Phase(enum.Enum):
    """Where the link stands."""

    GREETING = "greeting"
    READY = "ready"
    LOST = "lost"


class Due(enum.Enum):
    """What the owner of the socket has to do now."""

    NOTHING = "nothing"
    PING = "ping"
    LOSE = "lose"
    PROBE = "probe"
    GIVE_UP = "give_up"


class Link:
    """Deadlines of one client's connection. Used by one thread."""

    def __init__(self, *, reconnect_s: float, heartbeat_s: float = 1.0, missed: int = 3) -> None:
        """Start as lost, with nothing due before :meth:`greeted`.

        Args:
            reconnect_s: How long after a loss :attr:`Due.GIVE_UP` is due, once.
            heartbeat_s: Between pings, until a welcome says otherwise.
            missed: A greeting without answer for so many heartbeats is a loss, and once welcomed
                silence of :data:`HANG_FACTOR` times as many.
        """
        self.phase = Phase.LOST
        self._reconnect_s = reconnect_s
        self._heartbeat_s = heartbeat_s
        self._missed = missed
        self._heard_s = 0.0
        self._next_ping_s = 0.0
        self._next_probe_s = 0.0
        self._give_up_s: float | None = None

    @property
    def patience_s(self) -> float:
        """Silence that counts as a loss."""
        factor = HANG_FACTOR if self.phase is Phase.READY else 1
        return self._heartbeat_s * self._missed * factor

    @property
    def has_given_up(self) -> bool:
        """Giving up was due and done since the last welcome."""
        return self._give_up_s == math.inf

    def greeted(self, now_s: float) -> None:
        """Hello was sent on a new socket."""
        self.phase = Phase.GREETING
        self._heard_s = now_s

    def welcomed(self, now_s: float, *, heartbeat_s: float, missed: int) -> None:
        """The engine answered the hello with its heartbeat."""
        self.phase = Phase.READY
        self._heartbeat_s = heartbeat_s
        self._missed = missed
        self._heard_s = now_s
        self._next_ping_s = now_s + heartbeat_s
        self._give_up_s = None

    def heard(self, now_s: float) -> None:
        """Something came from the engine."""
        self._heard_s = now_s

    def overslept(self, seconds: float) -> None:
        """This process stood still for so long: nobody was asked then, so silence says nothing."""
        self._heard_s += seconds

    def pinged(self, now_s: float) -> None:
        """A ping was sent."""
        self._next_ping_s = now_s + self._heartbeat_s

    def probed(self, now_s: float) -> None:
        """Nobody listens yet."""
        self._next_probe_s = now_s + PROBE_S

    def lose(self, now_s: float) -> None:
        """The connection is of no use any more.

        The first probe is due at once, but not after a greeting: an engine that keeps refusing is
        not to be asked in a tight loop.
        """
        self._next_probe_s = now_s + (PROBE_S if self.phase is Phase.GREETING else 0.0)
        self.phase = Phase.LOST
        if self._give_up_s is None:
            self._give_up_s = now_s + self._reconnect_s

    def gave_up(self) -> None:
        """Keyed requests were ended; probing goes on for later ones."""
        self._give_up_s = math.inf

    def due(self, now_s: float) -> Due:
        """The most pressing thing to do."""
        if self._give_up_s is not None and now_s >= self._give_up_s:
            return Due.GIVE_UP
        if self.phase is Phase.LOST:
            return Due.PROBE if now_s >= self._next_probe_s else Due.NOTHING
        if now_s - self._heard_s >= self.patience_s:
            return Due.LOSE
        if self.phase is Phase.READY and now_s >= self._next_ping_s:
            return Due.PING
        return Due.NOTHING

    def wait_s(self, now_s: float) -> float:
        """Seconds until something is due, unless something arrives before."""
        if self.phase is Phase.LOST:
            moments = [self._next_probe_s]
        else:
            moments = [self._heard_s + self.patience_s]
        if self.phase is Phase.READY:
            moments.append(self._next_ping_s)
        if self._give_up_s is not None:
            moments.append(self._give_up_s)
        return max(0.0, min(moments) - now_s)
