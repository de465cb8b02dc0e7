#!/bin/bash
# Two nodes on one machine: two network namespaces, each with an interface eth0, joined by a virtual cable. Node 0 has
# the address 10.0.0.1, node 1 has 10.0.0.2; neither sees the other's ports but through the cable, nor any other network.
#
#   tests/two_nodes.sh [MODEL]       preflight and generation, 2 ranks a node, against one rank: the same text
#   tests/two_nodes.sh --run A B     the shell command A on node 0 and B on node 1, for up to LIMIT seconds (120)
#
# PYTHON is the Python to use (.venv/bin/python). Exits with 77 if it cannot run here: it needs root and iproute2.
set -u
limit=${LIMIT:-120}

skip() {
    echo "skipped: $1" >&2
    exit 77
}

# Both commands at once; the output goes to node0.log and node1.log in the current folder.
run() {
    local node pids=() failed=0
    for node in 0 1; do
        # `ip netns exec` becomes the command, so that timeout's signal reaches it
        timeout --kill-after=5 "$limit" ip netns exec "${spaces[node]}" \
            env CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 bash -c "${@:node+1:1}" >"node$node.log" 2>&1 </dev/null &
        pids+=($!)
    done
    for node in 0 1; do
        wait "${pids[node]}" || { echo "node $node: exit status $?" >&2; failed=1; }
    done
    return $failed
}

[ "$(id -u)" = 0 ] || skip "needs root, to make network namespaces"
command -v ip >/dev/null || skip "needs iproute2 (the command ip)"
spaces=("moe-int8-$$-0" "moe-int8-$$-1")
clean() {
    jobs -p | xargs -r kill 2>/dev/null
    for space in "${spaces[@]}"; do ip netns del "$space" 2>/dev/null; done
    [ -z "${work:-}" ] || rm -rf "$work"
}
trap clean EXIT
trap 'exit 130' INT TERM
for space in "${spaces[@]}"; do
    ip netns add "$space" 2>/dev/null || skip "may not make network namespaces here"
done
ip link add eth0 netns "${spaces[0]}" type veth peer name eth0 netns "${spaces[1]}" || skip "has no virtual interfaces"
for node in 0 1; do
    ip -n "${spaces[node]}" addr add "10.0.0.$((node + 1))/24" dev eth0
    ip -n "${spaces[node]}" link set lo up
    ip -n "${spaces[node]}" link set eth0 up
done

if [ "${1:-}" = --run ]; then
    run "$2" "$3"
    exit
fi

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
model=$(realpath "${1:-$root/demo/int8}")
[ -d "$model" ] || { echo "error: $model is missing: make demo builds it, or name a checkpoint" >&2; exit 2; }
work=$(mktemp -d) && cd "$work" || exit 1
generate=("$root/scripts/generate.py" --model "$model" --dtype fp32 --prompt "The capital of France is"
    --max-new-tokens 16)
echo "one rank:"
CUDA_VISIBLE_DEVICES='' "$python" "${generate[@]}" 2>log >one || { cat log; exit 1; }
cat one
commands=()
for node in 0 1; do
    commands+=("$(printf '%q ' "$python" "$root/scripts/preflight.py" --nnodes 2 --node-rank $node --nproc-per-node 2 \
        --master-addr 10.0.0.1 --model "$model" -- "${generate[@]}") >answer$node")
done
run "${commands[@]}" || { tail -n 50 node0.log node1.log; exit 1; }
cat node0.log
echo "two nodes of two ranks:"
cat answer0
cmp one answer0 && echo "two_nodes: ok, the same text"
