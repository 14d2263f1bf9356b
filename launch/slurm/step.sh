# shellcheck shell=bash
# Sourced by the job scripts of this folder, with their arguments, after they have set their knobs.
# Checks the common knobs and defines
#   bin            prefix of programs of the environment: VENV/bin/, or empty in a container
#   run_step       runs a command once on every node of the job
#   run_torchrun   runs torchrun on every node, with PROCS_PER_NODE ranks each
#   resume         --resume auto if Slurm requeued the job and the arguments have no --resume; else empty

fail() {
  echo "error: $1" >&2
  exit 2
}

# require_positive_integer NAME: fails unless the knob NAME is an integer above 0
require_positive_integer() {
  [[ ${!1} =~ ^[1-9][0-9]*$ ]] || fail "$1 needs a whole number above 0, got '${!1}'"
}

# require_config [CONFIG ...]: fails unless the first argument is a file
require_config() {
  [[ $# -gt 0 ]] || fail "the script needs a configuration: sbatch launch/slurm/NAME.sbatch CONFIG [--set key=value]"
  [[ -f $1 ]] || fail "CONFIG needs the path of a file, relative to $PWD or absolute, got $1"
}

[[ -n ${SLURM_JOB_ID:-} ]] || fail "the script needs a Slurm job: start it with sbatch"
cd "$MEGARL_ROOT" || exit 2

step=(srun --wait=60)  # seconds after the first task exits until srun terminates the others
if [[ -n ${SLURM_HET_SIZE:-} ]]; then
  step+=("--het-group=0-$((SLURM_HET_SIZE - 1))" --ntasks-per-node=1)
else
  step+=("--nodes=$SLURM_JOB_NUM_NODES" "--ntasks=$SLURM_JOB_NUM_NODES" --ntasks-per-node=1)
fi

if [[ -n $CONTAINER_IMAGE ]]; then
  [[ -z $VENV ]] || fail "CONTAINER_IMAGE needs VENV to be empty, got VENV=$VENV"
  srun --help | grep -q -e --container-image || fail "CONTAINER_IMAGE needs Pyxis: this cluster's srun has no --container-image"
  bin=""
  step+=("--container-image=$CONTAINER_IMAGE" "--container-workdir=$PWD")
  step+=("--container-mounts=$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}")
else
  [[ -z $CONTAINER_MOUNTS ]] || fail "CONTAINER_MOUNTS needs CONTAINER_IMAGE, got none"
  VENV=${VENV:-$PWD/.venv}
  [[ -x $VENV/bin/megarl ]] || fail "VENV needs an environment with megarl, got $VENV without bin/megarl"
  bin=$VENV/bin/
fi

resume=()
if [[ ${SLURM_RESTART_COUNT:-0} != 0 && " $*" != *" --resume"* ]]; then
  # shellcheck disable=SC2034  # read by the scripts
  resume=(--resume auto)
fi

# On scancel, Slurm signals the script and every step. The script ignores the signal and waits for the steps: if it
# exited first, srun would end with it and the last output of the steps would be lost.
trap : TERM

run_step() {
  "${step[@]}" "$@"
}

run_torchrun() {
  local head
  [[ -z ${SLURM_HET_SIZE:-} ]] || fail "torchrun needs identical nodes, got a heterogeneous job"
  [[ $PROCS_PER_NODE =~ ^(auto|[1-9][0-9]*)$ ]] || fail "PROCS_PER_NODE needs auto or a whole number above 0, got '$PROCS_PER_NODE'"
  require_positive_integer RDZV_PORT
  # the address by which Slurm reaches this node, which is the first of the job
  head=$(scontrol --oneliner show node "$SLURMD_NODENAME" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
  # is_host is set explicitly: torchrun derives from the host name whether it hosts the rendezvous, which is wrong if
  # that name resolves to the loopback
  # shellcheck disable=SC2016  # expanded by the shell on each node
  run_step bash -c 'exec "$0" --rdzv-conf "is_host=$((SLURM_NODEID == 0))" "$@"' \
    "${bin}torchrun" --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$PROCS_PER_NODE" \
    --rdzv-backend c10d --rdzv-endpoint "$head:$RDZV_PORT" --rdzv-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout 600 "$@"
}
