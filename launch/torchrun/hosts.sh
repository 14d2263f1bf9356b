#!/usr/bin/env bash
# A run on several machines without a batch system, over ssh:
#   launch/torchrun/hosts.sh HOSTFILE train CONFIG [--set key=value ...]
#
# HOSTFILE has a machine a line, as ssh knows it, and after that its address on the network of the run where it is to be
# another. All see the same files under the same paths.
#   train, eval                       megarl launch on every machine brings up Ray, the first runs the command
#   launch [OPTIONS] COMMAND ...      the same with options of megarl launch, for any of its commands
#   sft, rm, dpo, score               torchrun on every machine, PROCS_PER_NODE ranks on each, without Ray
#   benchmarks.reshard                the same
# When one of them fails, or this script is told to end or is killed, all end. Lines of output begin with their machine.
set -uo pipefail

# Knobs: VENV=/envs/megarl launch/torchrun/hosts.sh ...
SSH=${SSH:-ssh -o ServerAliveInterval=15}  # what runs a command on a machine
MEGARL_ROOT=${MEGARL_ROOT:-$PWD}           # the checkout; relative paths begin there
VENV=${VENV:-$MEGARL_ROOT/.venv}           # virtual environment with megarl
PROCS_PER_NODE=${PROCS_PER_NODE:-auto}     # ranks on each machine; auto: one for every GPU, or core where there is none
RDZV_PORT=${RDZV_PORT:-29400}              # where torchrun's agents meet, on the first machine
# Names of variables that all machines get from here where they are set; others can read them, so no secrets.
EXPORT=${EXPORT:-OMP_NUM_THREADS NCCL_DEBUG NCCL_SOCKET_IFNAME NCCL_IB_HCA GLOO_SOCKET_IFNAME HF_HOME HF_HUB_OFFLINE}

refuse() {
  echo "error: $1" >&2
  exit 2
}

[[ $# -ge 2 ]] || refuse "the script needs a host file and a command: launch/torchrun/hosts.sh HOSTFILE train CONFIG"
hostfile=$1
shift
[[ -r $hostfile ]] || refuse "HOSTFILE needs a file, got $hostfile"
mapfile -t hosts < <(awk '{ sub(/#.*/, "") } NF { print $1 }' "$hostfile")
# slots=8 and the like are for other programs
mapfile -t addresses < <(awk '{ sub(/#.*/, "") } NF { print (NF > 1 && $2 !~ /=/) ? $2 : $1 }' "$hostfile")
size=${#hosts[@]}
((size > 0)) || refuse "HOSTFILE needs a machine a line, got none in $hostfile"
read -ra ssh <<<"$SSH"
addresses=("${addresses[@]#*@}")
head=${addresses[0]}
id=hosts.$HOSTNAME.$$

# Runs on a machine: changes to folder $1 and runs the rest. Its input ends with the connection, or before it to end it.
# shellcheck disable=SC2016  # for the shell over there
agent='cd "$1" || exit 2
shift
exec 3<&0
"$@" </dev/null 3<&- & command=$!
{ while read -r -u 3; do :; done; kill -TERM "$command"; } >/dev/null 2>&1 & guard=$!
wait "$command"; code=$?
kill "$guard" 2>/dev/null
exit "$code"'

# command_of RANK COMMAND ...: sets `command` to what the machine of this rank runs
command_of() {
  local rank=$1 name
  shift
  command=(env)
  for name in $EXPORT; do
    [[ -z ${!name+set} ]] || command+=("$name=${!name}")
  done
  local launch=("$VENV/bin/megarl" launch --nodes "$size" --node-rank "$rank" --head "$head")
  # torchrun tells by the machine's own name whether it keeps the meeting, and is wrong where that name means the
  # loopback: hence is_host
  local torchrun=("$VENV/bin/torchrun" --nnodes "$size" --nproc-per-node "$PROCS_PER_NODE" --rdzv-id "$id"
    --rdzv-backend c10d --rdzv-endpoint "$head:$RDZV_PORT" --rdzv-conf "is_host=$((rank == 0))"
    --local-addr "${addresses[rank]}")
  case $1 in
    train | eval) command+=("${launch[@]}" "$@") ;;
    launch) command+=("${launch[@]}" "${@:2}") ;;
    sft | rm | dpo | score) command+=("${torchrun[@]}" -m megarl "$@") ;;
    benchmarks.reshard) command+=("${torchrun[@]}" -m "$@") ;;
    *) refuse "the command needs to be train, eval, launch, sft, rm, dpo, score or benchmarks.reshard, got $1" ;;
  esac
}

# quoted WORD ...: the words as any shell reads them
quoted() {
  local word
  for word; do
    printf "'%s' " "${word//\'/\'\\\'\'}"
  done
}

scratch=$(mktemp -d) || exit 2
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/codes"
mkfifo "$scratch/life"
exec 3<>"$scratch/life" # open here alone: however this script ends, the machines' input does
exec 4<"$scratch/life"
told=0
trap 'told=130; exec 3>&-' INT
trap 'told=143; exec 3>&-' TERM HUP

command_of 0 "$@" # refuses what it does not know, before anything starts
for rank in "${!hosts[@]}"; do
  command_of "$rank" "$@"
  {
    trap '' INT # a terminal's goes to all of them; the connections have to stay until the machines have ended
    "${ssh[@]}" "${hosts[rank]}" "$(quoted bash -c "$agent" agent "$MEGARL_ROOT" "${command[@]}")" 2>&1 |
      sed -u "s|^|${hosts[rank]}: |"
    echo "$?" >"$scratch/$rank"
    mv "$scratch/$rank" "$scratch/codes"
  } <&4 3>&- 4<&- &
done

shopt -s nullglob
code=0
ended=()
while ((${#ended[@]} < size)); do
  wait -n # for the next to end, or a signal
  [[ $? != 127 || -n $(jobs -p) ]] || break # who was killed says no code
  ended=("$scratch"/codes/*)
  ((${#ended[@]} > 0 && code == 0 && told == 0)) || continue
  for each in "${ended[@]}"; do
    read -r code <"$each"
    ((code == 0)) || break
  done
  if ((code != 0)); then
    echo "error: ${hosts[${each##*/}]} has ended with code $code; so do all" >&2
    exec 3>&-
  fi
done
((${#ended[@]} == size || code != 0)) || code=1
exit "$((told ? told : code))"
