"""Check in seconds what would make several nodes wait or fail, and then start torchrun: run it on every node.

It takes torchrun's options. The nodes meet on the master port, compare versions and checkpoint, and try their network;
every line says ok, or FAILED and what to do. With a script after --, torchrun starts it if all nodes passed; the
interface that reaches node 0 is then chosen for NCCL or gloo, unless NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME is set.

Examples:
  python scripts/preflight.py --nproc-per-node 8 --model R1-INT8
  python scripts/preflight.py --nnodes 2 --node-rank 0 --nproc-per-node 8 --master-addr 10.0.0.1 --model R1-INT8 \\
      -- scripts/generate.py --model R1-INT8 --chat
"""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from moe_int8.models.deepseek.preflight import find_model, plan_memory
from moe_int8.parallel.launch import ArgumentParser, one_line_errors
from moe_int8.parallel.network import choose_interface
from moe_int8.parallel.nodes import Nodes
from moe_int8.parallel.preflight import (
    Launch,
    Report,
    compare_nodes,
    find_gpus,
    find_master,
    find_node_rank,
    shared_settings,
    shared_versions,
)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("--nnodes", type=int, default=1, metavar="N", help="number of nodes")
    add("--node-rank", type=int, default=0, metavar="N", help="this node's number; 0 has the master address")
    add("--nproc-per-node", type=int, default=1, metavar="N", help="ranks on each node, one for each GPU")
    add("--master-addr", default="127.0.0.1", metavar="HOST", help="address of node 0")
    add("--master-port", type=int, default=29500, metavar="PORT", help="a free port of node 0")
    add("--model", type=Path, required=True, help="folder of the checkpoint on this node")
    add("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu", help="to run on")
    add("--timeout", type=float, default=60, metavar="SECONDS", help="how long a node waits for the others")
    add("--json", type=Path, metavar="FILE", help="also write the checks here")
    add("command", nargs="*", metavar="-- SCRIPT ...", help="what torchrun is to start, if all is well")
    args = parser.parse_args(argv)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        parser.error("it starts torchrun itself: run it with python, once on each node")
    return args


def run(args: argparse.Namespace, launch: Launch, report: Report) -> None:
    """Make all checks, as the command line says."""
    cuda = args.device == "cuda"
    tp_size = launch.nnodes * launch.nproc_per_node
    node_rank = report("node rank", lambda: find_node_rank(launch))
    address = report("master address", lambda: find_master(launch))
    interface = None
    if address and launch.nnodes > 1:
        variable = "NCCL_SOCKET_IFNAME" if cuda else "GLOO_SOCKET_IFNAME"
        interface = report("interface", lambda: choose_interface(address, variable, set_it=bool(args.command)))
    gpus = report("GPUs", lambda: find_gpus(launch.nproc_per_node)) if cuda else None
    model = report("model", lambda: find_model(args.model, tp_size))
    if model and (gpus or not cuda):
        report("memory", lambda: plan_memory(model, args.device, launch.nproc_per_node))
    shared = [shared_settings(launch, args.device), shared_versions(), *([model.shared()] if model else [])]
    if not node_rank or not address:
        return  # the others would not find this node, or not know who it is
    if launch.nnodes > 1:
        report.say(
            f"waiting up to {launch.timeout:g} s for the other nodes at {launch.master_addr}:{launch.master_port}"
        )
    nodes = report("port", lambda: Nodes(launch.node_rank, launch.nnodes, address, launch.master_port, launch.timeout))
    if nodes:
        compare_nodes(report, nodes, shared, interface)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    out = sys.stderr if args.command else sys.stdout  # a script's answers alone go to stdout
    with one_line_errors():
        launch = Launch(
            args.nnodes, args.node_rank, args.nproc_per_node, args.master_addr, args.master_port, args.timeout
        )
        report = Report(lambda line: print(line, file=out, flush=True))
        run(args, launch, report)
        if args.json:
            args.json.write_text(json.dumps([asdict(check) for check in report.checks], indent=2) + "\n")
        if report.failed:
            raise ValueError(f"{len(report.failed)} of {len(report.checks)} checks failed: {', '.join(report.failed)}")
        print(f"preflight: ok on node {launch.node_rank}", file=out, flush=True)
        if args.command:
            command = launch.torchrun(args.command)
            os.execv(command[0], command)


if __name__ == "__main__":
    main()
