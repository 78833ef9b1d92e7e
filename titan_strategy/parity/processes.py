"""Processes that are started once and run one layout after another: importing torch costs each of them seconds."""

import multiprocessing
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from types import TracebackType
from typing import Any, Literal, NamedTuple

_GRACE_SECONDS = 5.0  # for the others, once one rank has failed


class RankError(RuntimeError):
    """A rank raised, died or did not answer."""


class _Failure(NamedTuple):
    summary: str
    traceback: str
    time: float  # time.monotonic(), one clock for all processes of a machine


class Ranks:
    """Up to any number of processes; a context manager that ends them.

    Args:
        timeout: Seconds that one call may take.
        start_method: `"forkserver"` forks ranks from one process that has imported torch; `"spawn"` lets each import
            it, which a process that uses a GPU needs.
    """

    def __init__(self, timeout: float, start_method: Literal["forkserver", "spawn"]) -> None:
        self._timeout = timeout
        self._context = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            self._context.set_forkserver_preload(["titan_strategy.parity.rank"])
        self._workers: list[_Worker] = []

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def run(self, function: Callable[..., Any], count: int, *args: Any) -> list[Any]:
        """Call `function(*args)` on `count` ranks at once; a top-level function and picklable arguments.

        Returns:
            The results, in the order of the ranks.

        Raises:
            RankError: The first failure, with its rank and traceback. No process is left behind.
        """
        self._workers += [_Worker(self._context) for _ in range(count - len(self._workers))]
        workers = self._workers[:count]
        port = _free_port()
        for rank, worker in enumerate(workers):
            environment = {
                "LOCAL_RANK": str(rank),
                "NODE_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            worker.send(environment, function, args)
        answers = self._collect(workers)
        failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, _Failure)}
        if len(answers) < count or failures:
            self._end()  # some may be stuck; the next call starts new ones
        if failures:
            rank, first = min(failures.items(), key=lambda item: item[1].time)
            error = RankError(f"rank {rank}: {first.summary}")
            error.add_note(first.traceback)
            raise error
        if len(answers) < count:
            silent = ", ".join(str(rank) for rank in range(count) if rank not in answers)
            raise RankError(f"no answer from rank {silent} within {self._timeout:g} s")
        # Rank 0 serves the store that the others may use up to their last word.
        for worker in workers:
            worker.connection.send(None)
        return [answers[rank] for rank in range(count)]

    def _collect(self, workers: list["_Worker"]) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self._timeout
        while len(answers) < len(workers):
            waiting = {w.connection: rank for rank, w in enumerate(workers) if rank not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                answers[rank] = workers[rank].receive()
                if isinstance(answers[rank], _Failure):
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        return answers

    def _end(self) -> None:
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
        self._workers = []


class _Worker:
    """The parent's end of one rank."""

    def __init__(self, context: BaseContext) -> None:
        self.connection, child = context.Pipe()
        # No daemon: it may have DataLoader workers.
        self.process = context.Process(target=_serve, args=(child,))  # type: ignore[attr-defined]  # every method has it
        self.process.start()
        child.close()

    def send(self, environment: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        # Pickled apart, because the rank needs the path before it can import what the task refers to.
        self.connection.send((sys.path, environment, pickle.dumps((function, args))))

    def receive(self) -> Any:
        try:
            return self.connection.recv()
        except EOFError:
            self.process.join()
            return _Failure(f"the process ended with exit code {self.process.exitcode}", "", time.monotonic())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- In the rank -------------------------------------------------------------------------------------------------------


def _serve(connection: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    before = dict(os.environ)
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        if message is None:
            _leave_process_group()
            continue
        sys.path[:], environment, task = message
        os.environ.clear()
        os.environ.update(before | environment)
        try:
            function, args = pickle.loads(task)
            connection.send(function(*args))
        except Exception as error:
            summary = f"{type(error).__name__}: {error}"
            connection.send(_Failure(summary, traceback.format_exc(), time.monotonic()))
            _leave_process_group()  # closes the connections that the others may be waiting on


def _leave_process_group() -> None:
    import torch.distributed as dist

    # There is no public way to make DTensor forget meshes that equal the next layout's, but whose groups are gone.
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    if dist.is_initialized():
        dist.destroy_process_group()
    _clear_sharding_prop_cache()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
