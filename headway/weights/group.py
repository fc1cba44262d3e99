"""A weight group epoch: one process group, apart from any default group.

A learner with its own default process group and vLLM's workers can both hold
one. The sender is rank 0. A member that dies or hangs shows as EpochBroken on
every other member within the deadline; the remedy is always a new epoch.
All calls here block: give them a thread of their own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Self

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import BroadcastOptions

from headway.errors import EpochBroken
from headway.messages import EpochInvite
from headway.ports import address_towards


class Rendezvous:
    """A meeting point: a store that listens on one address only. `port` 0: a free one."""

    def __init__(self, host: str, timeout_s: float, port: int = 0) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
        self.host = host
        self.port: int = listener.getsockname()[1]
        # a listener of our own, since the store by itself would listen on all addresses
        self.store: TCPStore | None = TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )

    def close(self) -> None:
        """Ends the store; members that still wait in it fail at once."""
        self.store = None


class Transfer:
    """A broadcast under way; wait() ends it."""

    def __init__(self, group: WeightGroup, work: Any) -> None:
        self._group = group
        self._work = work

    def wait(self, ends: float | None = None) -> None:
        """Returns when the bytes are there.

        EpochBroken past the deadline (`ends`, by time.monotonic; the group's from now if None)
        or on a lost member.
        """
        work, self._work = self._work, None
        left_s = self._group.timeout_s if ends is None else max(0.001, ends - time.monotonic())
        try:
            with self._group.breaking("broadcast"):
                if not work.wait(timedelta(seconds=left_s)):
                    raise RuntimeError("the broadcast did not complete")
        finally:
            del work  # it holds the group's connections open


class WeightGroup:
    """One epoch's members. Broken once, broken for good."""

    def __init__(self, process_group: Any, invite: EpochInvite, device: str) -> None:
        self._group: Any = process_group
        self.device = device  # where tensors to broadcast lie
        self.epoch = invite.epoch
        self.rank = invite.rank
        self.world_size = invite.world_size
        self.timeout_s = invite.timeout_s

    @classmethod
    def join(cls, invite: EpochInvite, device: str = "cpu", store: Store | None = None) -> Self:
        """Meets the other members, then proves the group by a first broadcast.

        `device` is this member's; Gloo carries host memory whatever it is. `store` is the
        sender's own; members connect to the invite's. EpochBroken when anyone is missing at
        the deadline.
        """
        device = "cpu" if invite.backend == "gloo" else device
        deadline = timedelta(seconds=invite.timeout_s)
        started = time.monotonic()
        try:
            if store is None:
                store = TCPStore(
                    invite.store_host, invite.store_port, is_master=False, timeout=deadline
                )
            scoped = PrefixStore(f"{invite.job_id}/{invite.epoch}", store)
            make = _BACKENDS[invite.backend]
            local = _local_address(invite)
            group = cls(make(scoped, invite, deadline, local), invite, device)
        except RuntimeError as error:
            raise EpochBroken(
                f"epoch {invite.epoch}: rank {invite.rank} of {invite.world_size} waited"
                f" {time.monotonic() - started:.1f} s for the others: {_first_line(error)}"
            ) from error
        group.broadcast(torch.zeros(1, dtype=torch.uint8, device=device))
        return group

    def start_broadcast(self, tensor: Tensor) -> Transfer:
        """Starts a broadcast from rank 0 of a contiguous tensor; it must live until wait()."""
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=self.timeout_s)
        with self.breaking("broadcast"):
            if self._group is None:
                raise RuntimeError("the group was closed")
            return Transfer(self, self._group.broadcast([tensor], options))

    def broadcast(self, tensor: Tensor) -> None:
        """Broadcasts from rank 0 and waits. EpochBroken past the deadline."""
        self.start_broadcast(tensor).wait()

    @contextlib.contextmanager
    def breaking(self, what: str) -> Any:
        """Turns a failure of the group into EpochBroken and hangs up on the other members."""
        try:
            yield
        except RuntimeError as error:
            self.close()
            raise EpochBroken(
                f"epoch {self.epoch}: {what} failed on rank {self.rank} of"
                f" {self.world_size}: {_first_line(error)}"
            ) from error

    def close(self) -> None:
        """Leaves the group, broadcasts under way included; the others notice at once."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.abort()


def _gloo(store: Store, invite: EpochInvite, timeout: timedelta, local: str) -> Any:
    from torch.distributed import ProcessGroupGloo

    gloo: Any = ProcessGroupGloo  # its options are missing from torch's stubs
    options = gloo._Options()
    options._timeout = timeout
    options._threads = 2
    # by address, so that it never matters what this machine's host name resolves to
    options._devices = [gloo.create_device(hostname=local)]
    return gloo(store, invite.rank, invite.world_size, options)


def _nccl(store: Store, invite: EpochInvite, timeout: timedelta, local: str) -> Any:
    from torch.distributed import ProcessGroupNCCL

    # by default torch's watchdog ends the whole process when a peer is lost
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, invite.rank, invite.world_size, options)


_BACKENDS: dict[str, Callable[[Store, EpochInvite, timedelta, str], Any]] = {
    "gloo": _gloo,
    "nccl": _nccl,
}


def _local_address(invite: EpochInvite) -> str:
    """The address of this machine on the way to the store."""
    if invite.rank == 0:
        return invite.store_host
    return address_towards(invite.store_host, invite.store_port)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
