"""How the operator benchmarks measure: medians, CUDA graphs, the floor that memory and arithmetic set on a card."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

# What was measured to be reachable: bytes a second from and to memory, int8 operations a second.
CEILINGS = {"NVIDIA H200": (4.3e12, 1.98e15)}

Call = Callable[[], object]


def median_us(calls: Sequence[Call], *, graph: bool, repeats: int = 20) -> float:
    """Median microseconds of one call.

    Args:
        calls: the same work on different data, more of it than a cache holds; they run one after the other.
        graph: as a CUDA graph, so that the time of launching kernels is not counted.
    """
    if not torch.cuda.is_available():
        return statistics.median(_host_seconds(call) for call in calls for _ in range(repeats)) * 1e6
    for call in calls:  # kernels are compiled at their first use
        call()
    torch.cuda.synchronize()
    run = captured(calls) if graph else lambda: [call() for call in calls]
    times = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[2:])


def captured(calls: Sequence[Call]) -> Call:
    """The calls as one CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def floor_us(num_bytes: float, operations: float) -> float | None:
    """The microseconds that no version gets below on this card; None if the card's ceilings are not known."""
    if not torch.cuda.is_available() or torch.cuda.get_device_name() not in CEILINGS:
        return None
    bandwidth, rate = CEILINGS[torch.cuda.get_device_name()]
    return max(num_bytes / bandwidth, operations / rate) * 1e6


def _host_seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
