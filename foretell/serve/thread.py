"""The engine in a thread of its own: requests come in from other threads, their tokens go out by a call for each."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretell.errors import UserError
from foretell.serve.engine import CANCELLED, Completion, ServingEngine, TokenEvent
from foretell.serve.sampling import Sampling

if TYPE_CHECKING:
    from foretell.serve.record import ServeRecord

Listener = Callable[[TokenEvent], None]
"""Told of every token of one request, and of its end, in the engine's thread."""
FAILED = "error"
IDLE_SECONDS = 0.2


class EngineLost(Exception):
    """What computes is gone for good: no step will succeed any more."""


class Busy(UserError):
    """As many requests wait as may; try later."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Of the engine, now and since it began."""

    waiting: int
    running: int
    pages: int
    pages_held: int
    preemptions: int
    requests: int
    cancelled: int
    failed: int
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int
    steps: int


class EngineThread:
    """Steps as long as there is something to do; the only thread that touches the engine."""

    def __init__(self, engine: ServingEngine, *, most_waiting: int = 1024, record: ServeRecord | None = None) -> None:
        self.engine, self.most_waiting, self.record = engine, most_waiting, record
        if record is not None:
            engine.watch = record.watch
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listeners: dict[Completion, Listener] = {}
        self._sums = dict.fromkeys(("requests", "cancelled", "failed", "prompt_tokens", "output_tokens", "shared_tokens", "steps"), 0)
        self._draining = False
        self.lost = ""
        """Why it ended, where nobody asked it to."""
        self.when_ended: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def taking(self) -> bool:
        """Requests are taken; not so once it drains."""
        return not self._draining and self.alive

    def submit(self, prompt: tuple[int, ...], how: Sampling, listener: Listener) -> Future[Completion]:
        """A request; its future holds why not where it is refused."""
        return self._ask(lambda: self._submitted(prompt, how, listener))

    def cancel(self, generation: Completion, why: str = CANCELLED) -> None:
        """Nobody listens any more; `why` is for the record."""

        def gone() -> None:
            if self._listeners.pop(generation, None) is not None:
                self._sums["cancelled"] += 1
                self.engine.cancel(generation)
                if self.record is not None:
                    self.record.left(generation, why)

        self._ask(gone)

    def counts(self) -> Counts:
        scheduler = self.engine.scheduler
        return Counts(
            waiting=len(scheduler.waiting), running=len(scheduler.running), pages=scheduler.pages.count, pages_held=scheduler.pages.held,
            preemptions=scheduler.preemptions, **self._sums,
        )  # fmt: skip

    def drain(self) -> None:
        """Take no more; end when all are answered."""
        self._draining = True
        self._asked.put(None)

    def join(self, seconds: float | None = None) -> bool:
        """Wait for the end; whether it came."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # ------------------------------------------------------------------ in the thread

    def _ask(self, work: Callable[[], Any]) -> Future[Any]:
        promise: Future[Any] = Future()

        def run() -> None:
            try:
                promise.set_result(work())
            except BaseException as error:
                promise.set_exception(error)

        self._asked.put(run)
        return promise

    def _submitted(self, prompt: tuple[int, ...], how: Sampling, listener: Listener) -> Completion:
        if self._draining:
            raise Busy("the server is stopping and takes no more requests", "ask another one")
        if len(self.engine.scheduler.waiting) >= self.most_waiting:
            raise Busy(f"{self.most_waiting} requests wait already", "try again later")
        made = self.engine.submit(prompt, how)
        self._listeners[made] = listener
        self._sums["requests"] += 1
        self._sums["prompt_tokens"] += len(prompt)
        if self.record is not None:
            self.record.came(made)
        return made

    def _run(self) -> None:
        try:
            self._steps()
        finally:
            self._draining = True
            self._answer_asked(wait=False)  # who came meanwhile is refused
            self.engine.close()
            self.when_ended()

    def _steps(self) -> None:
        ended = time.perf_counter()
        while not (self._draining and self.engine.idle and self._asked.empty()):
            waits = self.engine.idle
            self._answer_asked(wait=waits)
            began = time.perf_counter() if waits else ended
            try:
                events = self.engine.step()
            except EngineLost as error:
                self.lost, self._draining = str(error), True
                self._fail(error)
                break
            except Exception as error:
                self._fail(error)
                continue
            self._sums["steps"] += bool(events)
            for event in events:
                self._tell(event)
            ended = time.perf_counter()
            if self.record is not None:
                self.record.stepped(began, ended, self.engine)

    def _answer_asked(self, *, wait: bool) -> None:
        try:
            while True:
                work = self._asked.get(timeout=IDLE_SECONDS) if wait else self._asked.get_nowait()
                wait = False
                if work is not None:
                    work()
        except queue.Empty:
            pass

    def _tell(self, event: TokenEvent) -> None:
        self._sums["output_tokens"] += event.token is not None
        listener = self._listeners.get(event.generation)
        if self.record is not None:
            self.record.told(event)
        if event.ended:
            self._listeners.pop(event.generation, None)
            self._sums["shared_tokens"] += event.generation.scheduled.shared
        if listener is not None:
            listener(event)

    def _fail(self, error: Exception) -> None:
        """A step could not be computed: its requests are told, their pages are free, and others may come."""
        self.engine.give_up()
        if self.record is not None:
            self.record.gave_up()
        made = list(self._listeners)
        self._sums["failed"] += len(made)
        if not made and not self.engine.idle:
            raise error
        for one in made:
            listener = self._listeners.pop(one)
            self.engine.cancel(one)
            one.ended = FAILED
            if self.record is not None:
                self.record.left(one, FAILED)
            listener(TokenEvent(one, None, f"{FAILED}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"))
        self.engine.scheduler.pages.forget()

