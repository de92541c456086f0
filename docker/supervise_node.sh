#!/bin/bash
# Supervise the ranks of one node of a run in a container, for schedulers that know only whether to start it again.
#
#   docker/supervise_node.sh CONFIG NODES NODE_RANK MASTER_ADDR [option of electra_launcher.supervise]...
#
# TERM (the pod is deleted, evicted or preempted) is passed on: the ranks save, and the supervisor ends with 75. The
# exit code is 0 if the run is done and 78 if the configuration or the data have an error: neither needs another start.
# To every other code 128 is added, because Kubeflow's restart policy `ExitCode` starts a pod again only from 128 on:
# 203 stopped and saved (75), 197 the node is unhealthy (69), 129 crashed (1).
set -u
if [ $# -lt 4 ]; then
    echo "error: give CONFIG NODES NODE_RANK MASTER_ADDR; $# arguments were given" >&2
    exit 78
fi
config=$1 nodes=$2 node_rank=$3 master_addr=$4
shift 4

supervisor= received=
pass_on() {
    received=TERM
    [ -z "$supervisor" ] || kill -TERM "$supervisor"
}
trap pass_on TERM

# Kubeflow sets these variables for torchrun, one rank per pod. Preflight would take them for those of a rank.
env -u RANK -u LOCAL_RANK -u WORLD_SIZE -u MASTER_ADDR -u MASTER_PORT \
    python -m electra_launcher.supervise --config "$config" --nodes "$nodes" --node-rank "$node_rank" \
    --master-addr "$master_addr" "$@" &
supervisor=$!
[ -z "$received" ] || kill -TERM "$supervisor" # It came before the supervisor's number was known.
wait "$supervisor"
code=$?
while [ "$code" -eq 143 ] && kill -0 "$supervisor" 2>/dev/null; do # The trap has ended the wait; the supervisor saves.
    wait "$supervisor"
    code=$?
done
case $code in
0 | 78) exit "$code" ;;
*) exit $((code < 128 ? code + 128 : code)) ;;
esac
