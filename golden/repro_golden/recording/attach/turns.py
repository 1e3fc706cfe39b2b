"""Which thread makes whose steps: two that train at once cannot be told apart from one run to the next."""

from __future__ import annotations

import threading

__all__ = ["Turns"]


class Turns:
    """The steps made so far, as turns of optimizers and threads.

    Threads that train one after the other, or hand one optimizer to each other, are as good as one. Two that have an
    optimizer each and step in turn race: which step comes first is chance, and so is what random numbers it gets.
    """

    def __init__(self) -> None:
        self._turns: list[tuple[tuple[str, ...], int]] = []
        self._users: dict[str, set[int]] = {}

    def own(self) -> bool:
        """Whether this thread may speak for the steps: it has made one, or nobody has."""
        return not self._turns or any(threading.get_ident() == thread for _, thread in self._turns)

    def take(self, labels: tuple[str, ...]) -> str:
        """Note a step of these optimizers by this thread; why it is refused, or ''."""
        thread = threading.get_ident()
        for label in labels:
            self._users.setdefault(label, set()).add(thread)
        turn = (labels, thread)
        if self._turns and self._turns[-1] == turn:
            return ""
        before = [*self._turns]
        self._turns = [*before[-3:], turn]
        rivals = [other for other, who in before if who != thread and self._apart(labels, other, who)]
        again = turn in before
        main = threading.main_thread().ident
        both = any(who not in (thread, main) and self._apart(labels, other, who) for other, who in before)
        if rivals and (again or (both and thread != main)):
            return "two threads train at the same time, each with an optimizer of its own: record them one at a time"
        return ""

    def _apart(self, labels: tuple[str, ...], other: tuple[str, ...], thread: int) -> bool:
        """Whether another turn was by a thread that lives, and neither's optimizers were ever used by the other."""
        alive = {each.ident for each in threading.enumerate()}
        mine = threading.get_ident()
        shared = any(mine in self._users[o] for o in other) or any(thread in self._users[m] for m in labels)
        return thread in alive and not shared
