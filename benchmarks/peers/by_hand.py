"""FedAvg written by hand in plain PyTorch, in one process and in two; and the floor, which is the SGD steps alone."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import torch
from torch import Tensor, multiprocessing, nn
from work import LR, Count, Round, Workload, client_data, plain_fedavg, sampled, steps, timed

State = dict[str, Tensor]


def train(work: Workload, model: nn.Module, state: State, number: int, clients: list[int]) -> tuple[State, int, Count]:
    """Clients one after the other: (Σ examples × weights, Σ examples, what was done)."""
    sums = {name: torch.zeros_like(value, dtype=torch.float32) for name, value in state.items()}
    total, count = 0, Count()
    for client in clients:
        model.load_state_dict(state)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        done = steps(work, model, optimizer, number, client)
        count.add(done)
        size = done.examples
        for name, value in model.state_dict().items():
            sums[name] += value * size
        total += size
    return sums, total, count


class Bare:
    """FedAvg in one process."""

    def __init__(self, work: Workload) -> None:
        self.work, self.model, self.number = work, work.build(), 0
        self.state = {name: value.clone() for name, value in self.model.state_dict().items()}
        client_data(work)

    def round(self) -> Round:
        """One round."""
        start = time.perf_counter()
        clients = sampled(self.work, self.number)
        sums, total, count = train(self.work, self.model, self.state, self.number, clients)
        self.state = {name: (sums[name] / total).to(value.dtype) for name, value in self.state.items()}
        self.number += 1
        return timed(start, count, clients)

    def burst(self, rounds: int) -> list[Round]:
        """Some rounds."""
        return [self.round() for _ in range(rounds)]

    def weights(self) -> State:
        """The global model."""
        return self.state

    def close(self) -> None:
        """Nothing to release."""


class Reference:
    """What others' first round is compared with, under the same instruction sets."""

    def __init__(self, work: Workload, clients: list[int]) -> None:
        self.work, self.clients = work, clients

    def burst(self, rounds: int) -> list[Round]:
        """The first round."""
        start = time.perf_counter()
        self.state = plain_fedavg(self.work, self.clients)
        return [timed(start, Count(self.work.steps, self.work.seen), self.clients)]

    def weights(self) -> State:
        """The average, in double precision."""
        return self.state

    def close(self) -> None:
        """Nothing to release."""


def fork(target: object, work: Workload) -> list[tuple[multiprocessing.Process, Connection]]:
    """Two processes of one thread each, and a pipe to each. Forked, so that they share the data."""
    client_data(work)
    context = multiprocessing.get_context("fork")
    children = []
    for _ in range(2):
        here, there = context.Pipe()
        process = context.Process(target=target, args=(work, there), daemon=True)
        process.start()
        children.append((process, here))
    return children


def stop(children: list[tuple[multiprocessing.Process, Connection]]) -> None:
    """Tell the processes to end, and wait for it."""
    for process, pipe in children:
        pipe.send(None)
        process.join(5)


def bare_worker(work: Workload, pipe: Connection) -> None:
    """Trains the clients that it is told, and answers with their weighted sum."""
    torch.set_num_threads(1)
    model = work.build()
    while (order := pipe.recv()) is not None:
        pipe.send(train(work, model, *order))


class Bare2(Bare):
    """FedAvg in two processes: a state dict goes to each in every round, and a sum of state dicts comes back."""

    def __init__(self, work: Workload) -> None:
        self.children = fork(bare_worker, work)
        super().__init__(work)

    def round(self) -> Round:
        """One round."""
        start = time.perf_counter()
        clients = sampled(self.work, self.number)
        for rank, (_, pipe) in enumerate(self.children):
            pipe.send((self.state, self.number, clients[rank::2]))
        (sums, total, count), (sums2, total2, count2) = (pipe.recv() for _, pipe in self.children)
        count.add(count2)
        self.state = {
            name: ((sums[name] + sums2[name]) / (total + total2)).to(value.dtype) for name, value in self.state.items()
        }
        self.number += 1
        return timed(start, count, clients)

    def close(self) -> None:
        """End the processes."""
        stop(self.children)


def floor_worker(work: Workload, pipe: Connection) -> None:
    """The SGD steps of the clients that it is told, and nothing else: the model and its optimiser just go on."""
    torch.set_num_threads(1)
    model = work.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    while (order := pipe.recv()) is not None:
        number, clients = order
        count = Count()
        for client in clients:
            count.add(steps(work, model, optimizer, number, client))
        pipe.send(count)


class Floor:
    """Two processes that take the steps of half the clients each: no weights are sent, loaded or averaged."""

    def __init__(self, work: Workload) -> None:
        self.work, self.number = work, 0
        self.children = fork(floor_worker, work)

    def burst(self, rounds: int) -> list[Round]:
        """Some rounds."""
        return [self.round() for _ in range(rounds)]

    def round(self) -> Round:
        """One round: a signal to start, and one that it is done."""
        start = time.perf_counter()
        clients = sampled(self.work, self.number)
        for rank, (_, pipe) in enumerate(self.children):
            pipe.send((self.number, clients[rank::2]))
        count = Count()
        for _, pipe in self.children:
            count.add(pipe.recv())
        self.number += 1
        return timed(start, count, clients)

    def weights(self) -> None:
        """There is no global model."""

    def close(self) -> None:
        """End the processes."""
        stop(self.children)
