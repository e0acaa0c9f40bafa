#!/bin/bash
# Starts torchrun on one node; train_ppo.sbatch runs it on each.
#
#   on_node.sh ATTEMPT INTERFACE PYTHON TORCHRUN [argument of torchrun ...]
#
# ATTEMPT is the folder of the attempt's logs, INTERFACE a network interface or empty.
set -euo pipefail

# Slurm sends signals to every process of the node. SIGUSR1 must not end one that has no handler for
# it yet, and this shell must outlive torchrun, to which Slurm gives KillWait seconds after SIGTERM.
ended='' code=0
trap '' USR1
trap 'ended=1' TERM

INTERRUPTED=75
attempt=$1
interface=$2
command=("$3" "$4")
shift 4

# A rank has a connection to every other one of its groups, and the first torchrun has some to every
# rank. Slurm hands down the limit of the shell that submitted the job, which is often 1024.
ulimit -n "$(ulimit -Hn)" || true

# The first node holds the rendezvous. torchrun would guess this from host names and addresses.
conf=is_host=0
[[ $SLURM_NODEID != 0 ]] || conf=is_host=1
command+=(--rdzv-conf="$conf" --log-dir="$attempt/$SLURMD_NODENAME")
if [[ -n $interface ]]; then
    address=$("${command[0]}" launch/slurm/check_node.py --address-of="$interface") || exit 1
    command+=(--local-addr="$address")
fi

"${command[@]}" "$@" || code=$?

# With --kill-on-bad-exit, an exit code of 75 here would end the other nodes, which are about to
# leave with the same code. So it is told in a file.
if ((code == INTERRUPTED)); then
    touch "$attempt/interrupted"
    code=0
elif [[ -n $ended ]] && ((code > 1)); then
    code=1 # srun tells the highest code: that of the node that failed
fi
exit "$code"
