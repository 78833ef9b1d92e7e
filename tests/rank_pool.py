"""A pool of warm gloo ranks for tests that need several processes.

Importing torch and Lightning costs seconds per process, so the ranks are forked from one process that has done it and
every multi-process test runs on them. `RankPool.run` sends a top-level function of a test module to the first ranks:

    def _sum_of_ranks(offset: int) -> int:
        torch.distributed.init_process_group("gloo")
        ...

    def test_sum(rank_pool):
        assert rank_pool.run(_sum_of_ranks, 2, 10) == [21, 21]

A rank that raises fails the test with its own exception; the others are not left waiting for it.
"""

import atexit
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.environments import ClusterEnvironment

MAX_RANKS = 8
# How long the other ranks may take to answer once one has failed. Their collectives fail as soon as the failed rank has
# closed its connections; whoever is still silent after this is stuck.
GRACE_SECONDS = 5.0
MAX_THREADS = 100
PRELOADED = [
    "lightning.pytorch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torchmetrics",
    "titan_strategy",
    "models",
]


class ExternalRanks(ClusterEnvironment):
    """Lets a `Trainer` use the processes that are already there, described by `RANK`, `WORLD_SIZE` and the like.

    Example::

        strategy = DDPStrategy(cluster_environment=ExternalRanks(), parallel_devices=[torch.device("cpu")] * 2)
        Trainer(strategy=strategy, accelerator="cpu", devices=2)
    """

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        return int(os.environ["MASTER_PORT"])

    @staticmethod
    def detect() -> bool:
        return False  # never chosen by Lightning itself, only by being passed

    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def set_world_size(self, size: int) -> None:
        if size != self.world_size():
            raise ValueError(f"The Trainer wants {size} processes, but this test runs on {self.world_size()} ranks.")

    def global_rank(self) -> int:
        return int(os.environ["RANK"])

    def set_global_rank(self, rank: int) -> None:
        if rank != self.global_rank():
            raise ValueError(f"The Trainer wants to be rank {rank}, but this process is rank {self.global_rank()}.")

    def local_rank(self) -> int:
        return int(os.environ["LOCAL_RANK"])

    def node_rank(self) -> int:
        return 0


@dataclass(frozen=True)
class _Task:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    environment: dict[str, str]
    directory: str


@dataclass(frozen=True)
class _Failure:
    exception: BaseException
    traceback: str
    time: float  # time.monotonic(), one clock for all processes of a machine


class RankPool:
    """Up to `MAX_RANKS` processes, started when first needed and kept until `close`."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        # Registered after multiprocessing's own exit handler, hence run before it, which would wait for the workers.
        atexit.register(self.close)

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
        """Calls `function(*args)` on `world_size` ranks at once.

        Args:
            function: A top-level function of an importable module. It finds `RANK`, `LOCAL_RANK`, `WORLD_SIZE`,
                `MASTER_ADDR` and `MASTER_PORT` in its environment, and no process group.
            world_size: Number of ranks.
            *args: Picklable arguments, the same on every rank.
            timeout: Seconds after which ranks that have not answered are killed.

        Returns:
            The results in the order of the ranks.

        Raises:
            TimeoutError: If a rank does not answer in time; the Python stacks of the silent ranks go to stderr.
            Exception: What the first failing rank raised, with that rank's traceback as a note.
        """
        if not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"world_size={world_size} is not within 1..{MAX_RANKS}.")
        self._spawn(world_size)
        workers = self._workers[:world_size]
        port = _free_port()
        for rank, worker in enumerate(workers):
            environment = _rank_environment(rank, world_size, port)
            worker.submit(_Task(function, args, environment, os.getcwd()))

        answers = self._collect(workers, timeout)
        silent = [rank for rank in range(world_size) if rank not in answers]
        for rank in silent:
            workers[rank].kill()
        # Only now may the process groups go: rank 0 serves the store that the others could still be using.
        for worker in workers:
            worker.forget_process_groups()
        if failures := {rank: answer for rank, answer in answers.items() if isinstance(answer, _Failure)}:
            rank, first = min(failures.items(), key=lambda item: item[1].time)
            first.exception.add_note(f"Raised on rank {rank} of {world_size}:\n{first.traceback}")
            raise first.exception
        if silent:
            raise TimeoutError(f"{function.__qualname__}: ranks {silent} gave no answer within {timeout} s.")
        return [answers[rank] for rank in range(world_size)]

    def close(self) -> None:
        """Ends all ranks. The next `run` starts new ones."""
        for worker in self._workers:
            worker.connection.close()  # an idle rank ends when its pipe does
        for worker in self._workers:
            worker.process.join(GRACE_SECONDS)
            worker.kill()
        self._workers = []

    def _spawn(self, count: int) -> None:
        """Makes the first `count` ranks live: starts the missing ones and replaces those that died or were killed."""
        for worker in self._workers:
            worker.retire_if_worn_out()
        alive = [worker if worker.process.is_alive() else _Worker(rank) for rank, worker in enumerate(self._workers)]
        self._workers = alive + [_Worker(rank) for rank in range(len(alive), count)]

    def _collect(self, workers: list["_Worker"], timeout: float) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        rank_of = {worker.connection: rank for rank, worker in enumerate(workers)}
        while len(answers) < len(workers):
            waiting = [connection for connection, rank in rank_of.items() if rank not in answers]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = rank_of[connection]
                answers[rank] = workers[rank].receive()
                if isinstance(answers[rank], _Failure):
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers


class _Worker:
    """The parent's end of one rank."""

    def __init__(self, rank: int) -> None:
        # Ranks are forked from a process that has imported the heavy modules and done nothing else: they start in no
        # time, and share no state with pytest's process.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.connection, child = context.Pipe()
        # Not a daemon: daemons may have no children, and a test may use DataLoader workers.
        self.process = context.Process(target=_serve, args=(child,), name=f"rank{rank}")
        self.process.start()
        child.close()

    def submit(self, task: _Task) -> None:
        # The task is pickled apart from the path, which the rank needs before it can import the task's module.
        self.connection.send((sys.path, pickle.dumps(task)))

    def forget_process_groups(self) -> None:
        if self.process.is_alive():
            self.connection.send(None)

    def retire_if_worn_out(self) -> None:
        """End a process in which the threads of earlier runs' groups have piled up; torch keeps some for good."""
        threads = Path(f"/proc/{self.process.pid}/task")
        if threads.is_dir() and len(list(threads.iterdir())) > MAX_THREADS:
            self.process.kill()
            self.process.join()

    def kill(self) -> None:
        if self.process.is_alive():
            os.kill(self.process.pid or 0, signal.SIGABRT)  # faulthandler prints the stacks, then the process ends
            self.process.join(GRACE_SECONDS)
            self.process.kill()
        self.process.join()

    def receive(self) -> Any:
        try:
            return pickle.loads(self.connection.recv_bytes())
        except EOFError:
            self.process.join(GRACE_SECONDS)
            error = RuntimeError(f"The process of this rank died with exit code {self.process.exitcode}.")
            return _Failure(error, traceback="(none: the process is gone)", time=time.monotonic())


def _rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- in the rank -----------------------------------------------------------------------------------------------------


def _serve(connection: Connection) -> None:
    """The main loop of a rank: take a task, answer, clean up when told to."""
    faulthandler.enable()
    threading.Thread(target=_die_with_parent, daemon=True).start()
    gc.freeze()  # what the imports left stays: no collection need look at it again

    environment = dict(os.environ)
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        if message is None:
            _forget_process_groups()
            continue
        sys.path[:], task = message
        _reset(environment)
        connection.send_bytes(_answer(task))


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _answer(pickled_task: bytes) -> bytes:
    try:
        task: _Task = pickle.loads(pickled_task)  # imports the test's module
        os.environ.update(task.environment)
        os.chdir(task.directory)
        # pickle, not the pipe's own pickler, for which torch would pass tensors as shared memory of a mortal process
        return pickle.dumps(task.function(*task.args))
    except BaseException as error:
        failure = _Failure(_picklable(error), traceback.format_exc(), time.monotonic())
        # The peers may be waiting for this rank in a collective: closing the connections makes it fail there.
        _forget_process_groups()
        return pickle.dumps(failure)


def _picklable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")


def _forget_process_groups() -> None:
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    # A module and its trainer refer to each other, and keep the threads of their groups alive: some 30 for each run.
    gc.collect()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    gc.collect()
    # DTensor remembers, per operator, meshes that equal the next test's mesh but name process groups that are gone.
    _clear_sharding_prop_cache()


def _reset(environment: dict[str, str]) -> None:
    """Undoes what a Trainer leaves behind in the process, above all `PL_GLOBAL_SEED` and the thread count."""
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    random.seed(0)
    torch.manual_seed(0)
