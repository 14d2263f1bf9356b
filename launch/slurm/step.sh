# shellcheck shell=bash
# Sourced by the job scripts of this folder, after their knobs, with their arguments: checks what they share, and defines
#   bin            what programs of the environment begin with: VENV/bin/, or nothing in a container
#   run_step       runs a command once on every node of the job
#   run_torchrun   runs torchrun on every node, PROCS_PER_NODE ranks on each
#   resume         what Slurm has queued again goes on where it was: options of megarl's, unless the arguments say where

refuse() {
  echo "error: $1" >&2
  exit 2
}

# require_whole_number NAME: the knob of that name is a number above 0
require_whole_number() {
  [[ ${!1} =~ ^[1-9][0-9]*$ ]] || refuse "$1 needs a whole number above 0, got '${!1}'"
}

# require_config CONFIG: the first argument of a script that takes a configuration
require_config() {
  [[ $# -gt 0 ]] || refuse "the script needs a configuration: sbatch launch/slurm/NAME.sbatch CONFIG [--set key=value]"
  [[ -f $1 ]] || refuse "CONFIG needs a file, relative to $PWD or not, got $1"
}

[[ -n ${SLURM_JOB_ID:-} ]] || refuse "the script needs a Slurm job: start it with sbatch"
cd "$MEGARL_ROOT" || exit 2

step=(srun --wait=60)  # seconds; nodes end together, and none outlives the others by so long
if [[ -n ${SLURM_HET_SIZE:-} ]]; then
  step+=("--het-group=0-$((SLURM_HET_SIZE - 1))" --ntasks-per-node=1)
else
  step+=("--nodes=$SLURM_JOB_NUM_NODES" "--ntasks=$SLURM_JOB_NUM_NODES" --ntasks-per-node=1)
fi

if [[ -n $CONTAINER_IMAGE ]]; then
  [[ -z $VENV ]] || refuse "CONTAINER_IMAGE needs VENV to be empty, got VENV=$VENV"
  srun --help | grep -q -e --container-image || refuse "CONTAINER_IMAGE needs Pyxis: this cluster's srun has no --container-image"
  bin=""
  step+=("--container-image=$CONTAINER_IMAGE" "--container-workdir=$PWD")
  step+=("--container-mounts=$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}")
else
  [[ -z $CONTAINER_MOUNTS ]] || refuse "CONTAINER_MOUNTS needs CONTAINER_IMAGE, got none"
  VENV=${VENV:-$PWD/.venv}
  [[ -x $VENV/bin/megarl ]] || refuse "VENV needs an environment with megarl, got $VENV without bin/megarl"
  bin=$VENV/bin/
fi

resume=()
if [[ ${SLURM_RESTART_COUNT:-0} != 0 && " $*" != *" --resume"* ]]; then
  # shellcheck disable=SC2034  # read by the scripts
  resume=(--resume auto)
fi

# Cancelled, Slurm tells the script and every step. The script stays until the steps have ended: srun, and with it their
# last words, would end with it.
trap : TERM

run_step() {
  "${step[@]}" "$@"
}

run_torchrun() {
  local head
  [[ -z ${SLURM_HET_SIZE:-} ]] || refuse "torchrun needs nodes that are alike, got a heterogeneous job"
  [[ $PROCS_PER_NODE =~ ^(auto|[1-9][0-9]*)$ ]] || refuse "PROCS_PER_NODE needs auto or a whole number above 0, got '$PROCS_PER_NODE'"
  require_whole_number RDZV_PORT
  # as Slurm itself reaches this node, which is the first of the job
  head=$(scontrol --oneliner show node "$SLURMD_NODENAME" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
  # torchrun tells by the machine's own name whether it keeps the meeting, and is wrong where that name means the loopback:
  # hence is_host
  # shellcheck disable=SC2016  # for the shell on each node
  run_step bash -c 'exec "$0" --rdzv-conf "is_host=$((SLURM_NODEID == 0))" "$@"' \
    "${bin}torchrun" --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$PROCS_PER_NODE" \
    --rdzv-backend c10d --rdzv-endpoint "$head:$RDZV_PORT" --rdzv-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout 600 "$@"
}
