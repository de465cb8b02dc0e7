"""Process groups: who works together on one model. Built once, passed to every layer that communicates."""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moe_int8.parallel.meeting import agree, current_meeting, interface_hint, local_rank, meet, part, world_size
from moe_int8.parallel.watch import print_at_once


@dataclass(frozen=True)
class Group:
    """One group of ranks. Its collectives are the identity when it has one member.

    A group without a `process_group` but of size > 1 describes a rank that is not running here (to size a model, say):
    it shards weights and cannot communicate.
    """

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place; returns x."""
        if self.size > 1:
            dist.all_reduce(x, group=self._running())
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n] on each rank -> [..., size * n] on all, in rank order."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self._running())
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's x, written into everyone's x; returns x."""
        if self.size > 1:
            dist.broadcast(x, group=self._running(), group_src=0)
        return x

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value (anything small that pickles), on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self._running(), group_src=0)
        return box[0]

    def _running(self) -> dist.ProcessGroup:
        assert self.process_group is not None, "this group only describes a shape"
        return self.process_group


@dataclass(frozen=True)
class Groups:
    """The groups of one rank: tensor-parallel now; expert- and data-parallel have one member."""

    tp: Group = Group()
    ep: Group = Group()
    dp: Group = Group()


def init_groups(
    device: torch.device, timeout_seconds: float = 600.0, settings: Mapping[str, object] | None = None
) -> Groups:
    """Join the other ranks of this torchrun (NCCL on GPUs, gloo on CPUs); alone without torchrun.

    All ranks form one tensor-parallel group. From here on the failure of one ends all.

    Args:
        device: this rank's device, from `local_device`.
        timeout_seconds: how long a rank waits for the others, until they are ready and in each collective.
        settings: what must be the same on all ranks, by the name that a user knows it by.

    Raises:
        MeetingError: ranks are missing, have failed before they came here, or have other settings.
    """
    if world_size() == 1:
        return Groups()
    meet()
    agree(settings or {}, timeout_seconds)
    meeting = current_meeting()
    assert meeting is not None
    backend = "nccl" if device.type == "cuda" else "gloo"
    with _connecting(backend):
        dist.init_process_group(
            backend=backend,
            store=meeting.store,
            rank=meeting.rank,
            world_size=world_size(),
            timeout=timedelta(seconds=timeout_seconds),
            device_id=device if device.type == "cuda" else None,
        )
    return Groups(tp=Group(dist.get_rank(), world_size(), dist.group.WORLD))


@contextmanager
def _connecting(backend: str) -> Iterator[None]:
    """End this process if connecting takes longer than the join timeout: over a wrong interface it never ends."""
    meeting = current_meeting()
    assert meeting is not None

    def give_up() -> None:
        message = f"{backend} has not connected the ranks within {meeting.join_timeout:g} s; {interface_hint()}"
        print_at_once(f"error [rank {meeting.rank}]: {message}")
        meeting.watch.tell(message)
        os._exit(1)

    timer = threading.Timer(meeting.join_timeout, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def local_device(kind: str) -> torch.device:
    """This rank's device: `kind` is "cpu" or "cuda"; torchrun's LOCAL_RANK picks the GPU.

    Raises:
        ValueError: there is no such GPU on this node.
    """
    if kind == "cpu":
        return torch.device("cpu")
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    count = torch.cuda.device_count()
    if ranks > count:
        raise ValueError(
            f"{ranks} ranks on this node need a GPU each and it has {count}; lower --nproc-per-node or use --device cpu"
        )
    device = torch.device("cuda", local_rank())
    torch.cuda.set_device(device)
    return device


def close_groups(timeout_seconds: float = 600.0) -> None:
    """Leave the other ranks, if there are any, when all of them do.

    Raises:
        TimeoutError: some have not come here `timeout_seconds` after this rank.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    part(timeout_seconds)
