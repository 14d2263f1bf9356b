#!/usr/bin/env bash
# Runs a command on several nodes over ssh, without a batch system:
#   launch/torchrun/hosts.sh HOSTFILE train CONFIG [--set key=value ...]
#
# HOSTFILE has one node per line: its name for ssh and, if different, its address on the network of the run. All nodes
# see the same files under the same paths.
#   train, eval                       megarl launch on every node starts Ray; the first node runs the command
#   launch [OPTIONS] COMMAND ...      the same with options of megarl launch, for any of its commands
#   sft, rm, dpo, score               torchrun on every node, PROCS_PER_NODE ranks each, without Ray
#   benchmarks.reshard                the same
# All nodes stop if one of them fails or if this script is terminated or killed. Each output line starts with its node.
# megarl launch and Ray admit only nodes that know MEGARL_LAUNCH_SECRET. The script makes a new secret for each run, unless
# one is set, and sends it to the nodes over ssh's stdin.
set -uo pipefail

# Knobs: VENV=/envs/megarl launch/torchrun/hosts.sh ...
SSH=${SSH:-ssh -o ServerAliveInterval=15}  # runs a command on a node
MEGARL_ROOT=${MEGARL_ROOT:-$PWD}           # checkout of megarl; relative paths start here
VENV=${VENV:-$MEGARL_ROOT/.venv}           # virtual environment with megarl
PROCS_PER_NODE=${PROCS_PER_NODE:-auto}     # ranks per node; auto: one per GPU, or one per core without GPUs
RDZV_PORT=${RDZV_PORT:-29400}              # rendezvous port of torchrun, on the first node
# Names of variables that are passed to all nodes if they are set here. Other users can read them: do not list secrets.
EXPORT=${EXPORT:-OMP_NUM_THREADS NCCL_DEBUG NCCL_SOCKET_IFNAME NCCL_IB_HCA GLOO_SOCKET_IFNAME HF_HOME HF_HUB_OFFLINE}

fail() {
  echo "error: $1" >&2
  exit 2
}

[[ $# -ge 2 ]] || fail "the script needs a host file and a command: launch/torchrun/hosts.sh HOSTFILE train CONFIG"
hostfile=$1
shift
[[ -r $hostfile ]] || fail "HOSTFILE needs a file, got $hostfile"
mapfile -t hosts < <(awk '{ sub(/#.*/, "") } NF { print $1 }' "$hostfile")
# fields such as slots=8 are for other programs
mapfile -t addresses < <(awk '{ sub(/#.*/, "") } NF { print (NF > 1 && $2 !~ /=/) ? $2 : $1 }' "$hostfile")
size=${#hosts[@]}
((size > 0)) || fail "HOSTFILE needs one node per line, got none in $hostfile"
read -ra ssh <<<"$SSH"
addresses=("${addresses[@]#*@}")
head=${addresses[0]}
id=hosts.$HOSTNAME.$$
[[ " $EXPORT " != *" MEGARL_LAUNCH_SECRET "* ]] ||
  fail "EXPORT must not list MEGARL_LAUNCH_SECRET: the script passes it where other users cannot read it"
secret=${MEGARL_LAUNCH_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}

# Runs on a node: changes to folder $1 and runs the other arguments as a command. The first line of input is the secret.
# End of input, which also follows the loss of the connection, terminates the command.
# shellcheck disable=SC2016  # expanded by the shell on the node
node_script='cd "$1" || exit 2
shift
exec 3<&0
IFS= read -r -u 3 MEGARL_LAUNCH_SECRET || exit 2
export MEGARL_LAUNCH_SECRET
"$@" </dev/null 3<&- & command=$!
{ while read -r -u 3; do :; done; kill -TERM "$command"; } >/dev/null 2>&1 & guard=$!
wait "$command"; code=$?
kill "$guard" 2>/dev/null
exit "$code"'

# set_command RANK COMMAND ...: sets `command` to the command line of the node of this rank
set_command() {
  local rank=$1 name
  shift
  command=(env)
  for name in $EXPORT; do
    [[ -z ${!name+set} ]] || command+=("$name=${!name}")
  done
  local launch=("$VENV/bin/megarl" launch --nodes "$size" --node-rank "$rank" --head "$head")
  # is_host is set explicitly: torchrun derives from the host name whether it hosts the rendezvous, which is wrong if
  # that name resolves to the loopback
  local torchrun=("$VENV/bin/torchrun" --nnodes "$size" --nproc-per-node "$PROCS_PER_NODE" --rdzv-id "$id"
    --rdzv-backend c10d --rdzv-endpoint "$head:$RDZV_PORT" --rdzv-conf "is_host=$((rank == 0))"
    --local-addr "${addresses[rank]}")
  case $1 in
    train | eval) command+=("${launch[@]}" "$@") ;;
    launch) command+=("${launch[@]}" "${@:2}") ;;
    sft | rm | dpo | score) command+=("${torchrun[@]}" -m megarl "$@") ;;
    benchmarks.reshard) command+=("${torchrun[@]}" -m "$@") ;;
    *) fail "the command needs to be train, eval, launch, sft, rm, dpo, score or benchmarks.reshard, got $1" ;;
  esac
}

# quote WORD ...: prints the words quoted for any POSIX shell
quote() {
  local word
  for word; do
    printf "'%s' " "${word//\'/\'\\\'\'}"
  done
}

scratch=$(mktemp -d) || exit 2
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/codes"
mkfifo "$scratch/stdin"
exec 3<>"$scratch/stdin" # only this script holds the writing end: however it ends, the input of the nodes ends too
exec 4<"$scratch/stdin"
signal_code=0
trap 'signal_code=130; exec 3>&-' INT
trap 'signal_code=143; exec 3>&-' TERM HUP

set_command 0 "$@" # fails on an unknown command before anything starts
for rank in "${!hosts[@]}"; do
  set_command "$rank" "$@"
  {
    trap '' INT # Ctrl-C reaches the connections too, but they must stay open until the nodes have stopped
    # printf is part of the shell: the secret is on no command line
    "${ssh[@]}" "${hosts[rank]}" "$(quote bash -c "$node_script" agent "$MEGARL_ROOT" "${command[@]}")" \
      < <(printf '%s\n' "$secret"; exec cat <&4) 4<&- 2>&1 |
      sed -u "s|^|${hosts[rank]}: |" 4<&-
    echo "$?" >"$scratch/$rank"
    mv "$scratch/$rank" "$scratch/codes"
  } 3>&- &
done

shopt -s nullglob
code=0
ended=()
while ((${#ended[@]} < size)); do
  wait -n # until a node ends or a signal arrives
  [[ $? != 127 || -n $(jobs -p) ]] || break # a job that was killed has left no code
  ended=("$scratch"/codes/*)
  ((${#ended[@]} > 0 && code == 0 && signal_code == 0)) || continue
  for each in "${ended[@]}"; do
    read -r code <"$each"
    ((code == 0)) || break
  done
  if ((code != 0)); then
    echo "error: ${hosts[${each##*/}]} exited with code $code; stopping all nodes" >&2
    exec 3>&-
  fi
done
((${#ended[@]} == size || code != 0)) || code=1
exit "$((signal_code ? signal_code : code))"
