"""Tensor parallelism: rank 0 runs the engine, and the other ranks compute their parts of every pass it announces.

    rank 0    schedule -> announce -> layers -> heads, sampling -> postprocess
    others                   '-> the same layers, for their own heads and columns; all-reduce with all ranks

Rank 0 starts the others as processes on the same machine. It decides everything, and announces positions, slots and the
slots of contexts. It broadcasts hidden states that the other ranks do not have. All-reduces use gloo on a CPU and NCCL
on GPUs. Each engine has its own process group, so that a process can run several engines one after another."""

from __future__ import annotations

import datetime
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Self

import torch
import torch.distributed as dist

from swiftkv_platform.engine.batch import (
    BypassRows,
    DeepRowsWriter,
    PagedAttentionMetadata,
    make_pass_context,
    move_inputs_to_device,
    read_shared_key_values,
    write_and_read_shared_key_values,
    write_shared_key_values,
)
from swiftkv_platform.errors import ModelError
from swiftkv_platform.model.context import DecoderContext, TokenSelection
from swiftkv_platform.specs.engine import EngineConfig

_c10d: Any = dist  # its type stubs lack stores and groups
ALL_REDUCE_TIMEOUT = datetime.timedelta(minutes=5)
"""Max time that a rank waits for the other ranks in an all-reduce."""
EXIT_TIMEOUT_S = 10.0


class TensorParallelGroup:
    """This process's rank in the group of processes that share a model."""

    def __init__(self, store: Any, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        sums = _c10d.PrefixStore("sums", store)
        if device.type == "cuda":
            options = _c10d.ProcessGroupNCCL.Options()
            options._timeout = ALL_REDUCE_TIMEOUT
            self._group: Any = _c10d.ProcessGroupNCCL(sums, rank, size, options)
        else:
            self._group = _c10d.ProcessGroupGloo(sums, rank, size, ALL_REDUCE_TIMEOUT)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' `x`, computed in place."""
        x = x.contiguous()
        self._group.allreduce([x]).wait()
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return rank 0's `x`, which overwrites the other ranks' in place."""
        x = x.contiguous()
        self._group.broadcast(x, 0).wait()
        return x


@dataclass(frozen=True)
class AllocateMessage:
    """Message of rank 0: allocate a KV cache of `num_blocks` blocks."""

    num_blocks: int


@dataclass(frozen=True)
class PassMessage:
    """Message of rank 0: run layers < l and write K and V of layers >= l, or run layers >= l."""

    is_upper: bool
    """Whether layers >= l run."""
    attention: PagedAttentionMetadata
    """Positions, slots and contexts, without tensors on a device."""
    hidden_shape: tuple[int, ...] | None
    """Shape of the broadcast hidden states; None: use the output of the last pass of layers < l."""
    selected_rows: tuple[int, ...] | None = None
    """Rows that run through layers >= l; None: all."""
    deep_rows: tuple[int, ...] = ()
    """Pass of layers >= l: rows that write their own K and V. Pass of layers < l: rows that bypass no layer."""


@dataclass(frozen=True)
class WriteSharedMessage:
    """Message of rank 0: write K and V of layers >= l from x, for `rows` of the last pass of layers < l."""

    rows: tuple[int, ...]


class BroadcastingDecoder:
    """Rank 0's decoder: announces each pass to the other ranks, then runs it."""

    def __init__(self, decoder: Any, rank_processes: RankProcesses) -> None:
        self._decoder = decoder
        self._rank_processes = rank_processes
        self._x: torch.Tensor | None = None

    def run_lower_layers(self, context: DecoderContext, bypass: BypassRows | None = None) -> torch.Tensor:
        """Run layers < l on all ranks. The other ranks then write K and V of layers >= l without another message,
        unless deep tokens have their own."""
        deep_rows = tuple(range(context.num_tokens)) if bypass is None else bypass.deep_rows
        self._announce_pass(context, context.hidden, is_upper=False, deep_rows=deep_rows)
        self._x = self._decoder.run_lower_layers(context, bypass)
        return self._x

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def run_student_upper(
        self,
        x: torch.Tensor,
        context: DecoderContext,
        *,
        shared: Sequence[Any] = (),
        selection: TokenSelection | None = None,
        deep: DeepRowsWriter | None = None,
    ) -> torch.Tensor:
        if self.layer_map.leaders:  # in a dense model all layers are lower ones
            deep_rows = () if deep is None else deep.rows
            self._announce_pass(context, x, is_upper=True, selection=selection, deep_rows=deep_rows)
        hidden: torch.Tensor = self._decoder.run_student_upper(
            x, context, selection=selection, shared=shared, deep=deep
        )
        return hidden

    def write_shared_key_values(self, x: torch.Tensor, context: DecoderContext, rows: Sequence[int]) -> None:
        """Write K and V from x on all ranks, for `rows` of the last pass of layers < l."""
        assert x is self._x, "x is not the output of the last `run_lower_layers`"
        self._rank_processes.send_message(WriteSharedMessage(tuple(rows)))
        write_shared_key_values(self._decoder, x, context, rows)

    def _announce_pass(
        self,
        context: DecoderContext,
        hidden: torch.Tensor,
        *,
        is_upper: bool,
        selection: TokenSelection | None = None,
        deep_rows: tuple[int, ...] = (),
    ) -> None:
        is_known = is_upper and hidden is self._x
        self._rank_processes.send_message(
            PassMessage(
                is_upper=is_upper,
                attention=context.layer_arguments["paged"].copy_without_device_tensors(),
                hidden_shape=None if is_known else tuple(hidden.shape),
                selected_rows=None if selection is None else selection.indices,
                deep_rows=deep_rows,
            )
        )
        if not is_known:
            self._rank_processes.ranks.broadcast(hidden)


class RankProcesses:
    """Rank 0's connections to the processes of the other ranks."""

    def __init__(
        self, ranks: TensorParallelGroup, connections: list[Connection], processes: list[subprocess.Popen[bytes]]
    ) -> None:
        self.ranks = ranks
        self._connections = connections
        self._processes = processes
        self.close = weakref.finalize(self, _stop_processes, connections, processes)
        """End the other processes. Further calls do nothing."""

    @classmethod
    def start(cls, path: str, config: EngineConfig) -> Self:
        """Start the other ranks, which then load the model at `path`."""
        size, device = config.tensor_parallel_size, get_rank_device(config, 0)
        store = _c10d.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        connections, processes = [], []
        try:
            for rank in range(1, size):
                ours, theirs = socket.socketpair()
                with theirs:
                    command = [sys.executable, "-m", "swiftkv_platform.engine.rank_process", str(theirs.fileno())]
                    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
                    processes.append(subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()]))
                connections.append(Connection(ours.detach()))
                connections[-1].send((rank, store.port, path, config.model_dump()))
            return cls(TensorParallelGroup(store, 0, size, device), connections, processes)
        except BaseException:
            _stop_processes(connections, processes)
            raise

    def wait_until_loaded(self) -> None:
        """Wait until the other ranks have loaded their parts. Raises `OSError`: one of them has ended."""
        for rank, connection in enumerate(self._connections, start=1):
            try:
                connection.recv()
            except (EOFError, ConnectionResetError) as error:
                raise ConnectionError(
                    f"rank {rank} of tensor_parallel_size {self.ranks.size} ended before it had loaded its part of the "
                    "model; see its output"
                ) from error

    def send_message(self, message: AllocateMessage | PassMessage | WriteSharedMessage) -> None:
        """Send a message to the other ranks. Raises `OSError`: one of them has ended."""
        for connection in self._connections:
            connection.send(message)


def join_group(rank: int, port: int, config: EngineConfig) -> TensorParallelGroup:
    size = config.tensor_parallel_size
    store = _c10d.TCPStore("127.0.0.1", port, size, is_master=False)
    return TensorParallelGroup(store, rank, size, get_rank_device(config, rank))


def run_announced_passes(connection: Connection, model: Any, make_cache: Any, ranks: TensorParallelGroup) -> None:
    """Run the passes that rank 0 announces, until it exits. `make_cache`: makes a cache of n blocks."""
    decoder, x = model.model, torch.empty(0)
    has_own_deep_kv = bool(model.config.layer_map.deep_leaders)
    cache: Any = None
    context: Any = None
    while True:
        try:
            message = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        if isinstance(message, AllocateMessage):
            cache = None  # free its memory before allocating the next
            cache = make_cache(message.num_blocks)
            continue
        if isinstance(message, WriteSharedMessage):
            write_shared_key_values(decoder, x, context, message.rows)
            continue
        # 1. get the hidden states, and put the metadata on the device
        hidden = x
        if message.hidden_shape is not None:
            hidden = ranks.broadcast(torch.empty(message.hidden_shape, dtype=model.dtype, device=ranks.device))
        inputs = move_inputs_to_device(message.attention, (), cache, message.selected_rows or ())
        context = make_pass_context(decoder, inputs, cache, hidden)
        # 2. run the layers
        if message.is_upper:
            kept = None if message.selected_rows is None else inputs.select_rows(message.selected_rows)
            if has_own_deep_kv:
                rows = range(hidden.shape[1]) if message.selected_rows is None else message.selected_rows
                writer = DeepRowsWriter.make_for_pass(decoder, context, rows, set(message.deep_rows))
                decoder.run_student_upper(hidden, context, selection=kept, deep=writer)
                continue
            decoder.run_student_upper(hidden, context, selection=kept, shared=read_shared_key_values(decoder, context))
        else:
            bypass = BypassRows.make_for_rows(decoder, message.deep_rows, context.num_tokens)
            x = decoder.run_lower_layers(context, bypass)
            if not has_own_deep_kv:
                write_and_read_shared_key_values(decoder, x, context)


def get_rank_device(config: EngineConfig, rank: int) -> torch.device:
    """Return the device of a rank. Raises `ModelError`: there are more ranks than GPUs."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return torch.device("cpu")
    if torch.cuda.device_count() < config.tensor_parallel_size:
        raise ModelError.for_field(
            "tensor_parallel_size", config.tensor_parallel_size, f", but torch sees {torch.cuda.device_count()} GPUs"
        )
    return torch.device("cuda", rank)


def _stop_processes(connections: list[Connection], processes: list[subprocess.Popen[bytes]]) -> None:
    """Close the connections, which ends the processes. Kill processes that do not end in time."""
    for connection in connections:
        connection.close()
    for process in processes:
        try:
            process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
