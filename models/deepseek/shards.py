"""What a conversion makes of a source shard, and working through the shards one by one or in several processes."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

import torch

from moe_int8.models.deepseek.checkpoint import Checkpoint, CheckpointError
from moe_int8.models.deepseek.formats import projection_kind
from moe_int8.models.deepseek.progress import progress_bar
from moe_int8.quantization.block_fp8 import FP8, dequantize_block_fp8, fp8_to_float32
from moe_int8.quantize import CPU_CHUNK

T = TypeVar("T")


def planned_tensors(source: Checkpoint, file: str, to: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of the tensors that a source shard becomes, converted `to` "int8" or "bf16"."""
    plan: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name in source.names_in(file):
        dtype, shape = source.dtype(name), source.shape(name)
        if to == "int8" and projection_kind(name):
            plan[name] = (torch.int8, shape)
            plan[f"{name}_scale"] = (torch.float32, (shape[0], 1))
        elif dtype is FP8:
            plan[name] = (torch.bfloat16, shape)
        elif not name.endswith("_scale_inv"):
            plan[name] = (dtype, shape)
    return plan


def read_rows(source: Checkpoint, name: str) -> Iterator[torch.Tensor]:
    """A source weight, FP8 as the fp32 values it stands for, everything else as stored; a few rows at a time.

    What is done to so few stays in the cache. The scale of an FP8 weight may live in another shard.

    Raises:
        CheckpointError: a scale is negative or not a number, or 0 for a block that holds other codes than 0.
    """
    weight = source.tensor(name)
    if weight.ndim != 2 or not weight.numel():
        yield weight
        return
    rows = max(1, CPU_CHUNK // weight.shape[1])
    if weight.dtype is not FP8:
        yield from weight.split(rows)
        return
    scales = source.tensor(f"{name}_scale_inv")
    where = f"{source.folder / source.file_of(f'{name}_scale_inv')}: {name}_scale_inv"
    if not ((scales >= 0) & scales.isfinite()).all():
        raise CheckpointError(f"{where} has values that are negative or not finite: download it again")
    if (scales == 0).any():  # converters without a lower bound write it for a block of zeros
        (N, K), (rows_of, columns_of) = weight.shape, source.block
        zero = (scales == 0).repeat_interleave(rows_of, dim=0)[:N].repeat_interleave(columns_of, dim=1)[:, :K]
        if fp8_to_float32(weight[zero]).any():
            raise CheckpointError(f"{where} is 0 for a block whose codes are not: download it again")
    for block, scale in zip(weight.split(source.block[0]), scales, strict=True):
        for part in block.split(rows):
            yield dequantize_block_fp8(part, scale[None], source.block)


def for_each_shard(
    task: Callable[[str], T], source: Checkpoint, pending: Sequence[str], workers: int, total: Sequence[str] = ()
) -> Iterator[T]:
    """Yield `task(shard)` for every pending shard as it ends, with a progress bar over the bytes of the source.

    Args:
        task: with more than one worker it must pickle.
        source: whose shards they are.
        pending: names of the shards to work on.
        workers: processes, of one thread each; 1 stays in this one.
        total: all shards of the job, where some were done before.

    Raises:
        CheckpointError: a worker died. Whatever a task raises is raised here; shards not yet begun are left.
    """
    sizes = {file: source.path(file).stat().st_size for file in {*pending, *total}}
    done = sum(sizes[file] for file in total if file not in pending)
    with progress_bar(total=sum(sizes.values()), initial=done, desc="shards", unit="B", unit_scale=True) as bar:
        for file, result in _results(task, pending, min(workers, len(pending))):
            bar.update(sizes[file])
            yield result


def _results(task: Callable[[str], T], files: Sequence[str], workers: int) -> Iterator[tuple[str, T]]:
    if workers <= 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in a worker
        try:
            for file in files:
                yield file, task(file)
        finally:
            torch.set_num_threads(threads)
        return
    context = multiprocessing.get_context("spawn")  # a fork of a process that has used torch's threads may hang
    with ProcessPoolExecutor(workers, context, initializer=_start_worker) as pool:
        waiting = list(reversed(files))
        running: dict[Future[T], str] = {}
        try:
            while waiting or running:
                while waiting and len(running) < workers:  # no more: after an error, what was submitted still runs
                    file = waiting.pop()
                    running[pool.submit(task, file)] = file
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        except BrokenProcessPool as error:
            raise CheckpointError(
                "a worker process was killed, perhaps for want of memory: use fewer --workers; "
                "the same command continues"
            ) from error


def _start_worker() -> None:
    # More would share steps of some 50 microseconds and meet after each; if one is not running, all wait for it.
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # it was killed: nobody is left to hand a shard to
