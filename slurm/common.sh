# shellcheck shell=bash
# What the jobs of this folder share; they source it in megalite's folder. Variables that sbatch passes on:
#
#   NODES            nodes to train on; what the allocation has beyond them are spares. Default: all
#   RANKS_PER_NODE   default: the GPUs of a node (--gpus-per-node), else its tasks (--ntasks-per-node), else 1
#   LAUNCHER         srun, the default: a task for each rank, and nothing between; or torchrun, with an agent on each node
#   CONTAINER        how to run in a container: options of srun (--container-image=x.sqsh, of pyxis), or a command that
#                    runs another one (apptainer exec --nv x.sif)
set -uo pipefail

gpus=${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}} # --exclusive gives a job more than it asked for
gpus=${gpus##*:} # without their kind
# Steps ask for all of their nodes' GPUs, and inherit every variable: neither what the job asked for nor what `sbatch
# --export` left out counts for them. A step's task may be the launcher of all ranks of its node.
unset SLURM_GPUS SLURM_GPUS_PER_SOCKET SLURM_GPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_GPU_BIND SLURM_TRES_BIND
export SLURM_EXPORT_ENV=ALL
RANKS_PER_NODE=${RANKS_PER_NODE:-${gpus:-${SLURM_NTASKS_PER_NODE:-1}}}
STOP_SECONDS=${STOP_SECONDS:-240} # what a program may take to save and end, once it was asked to
threads=$((${SLURM_CPUS_ON_NODE:-1} / RANKS_PER_NODE))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
export PYTHONUNBUFFERED=1 # so that logs are there at once
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$STOP_SECONDS # else torchrun kills its ranks 30 seconds after a SIGTERM

nodes=() # that a program is launched on

say() { printf '=== %(%F %T)T %s\n' -1 "$*"; }

end() { # end CODE WHY: end the job
    say "$2 (exit code $1)"
    exit "$1"
}

# need VARIABLE WHAT: end the job where a variable is not set
need() { [ -n "${!1:-}" ] || end 64 "$1 is not set, $2: $1=... sbatch ..."; }

nodelist() { (IFS=, && echo "--nodelist=$*"); }

# with_container COMMAND...: a step of one task on this node
with_container() {
    split_container
    srun --ntasks=1 --nodes=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "${container_options[@]}" \
        "${container[@]}" "$@"
}

# Make of CONTAINER the options of srun, or the command.
split_container() {
    local words
    read -r -d '' -a words <<<"${CONTAINER:-}"
    container=() container_options=()
    case ${words[0]:-} in
        -*)
            container_options=("${words[@]}")
            # pyxis begins in a folder that the image names
            [[ $CONTAINER == *--container-workdir* ]] || container_options+=(--container-workdir="$PWD")
            ;;
        *) container=("${words[@]}") ;;
    esac
}

# patiently COMMAND...: again until it succeeds, as SLURM's controller may not answer for a while
patiently() { until "$@"; do sleep 5; done; }

# outlives_nodes FLAGS...: whether a run goes on without a node that it loses
outlives_nodes() { [[ " $* " =~ \ --(spare[-_]nodes[\ =]|elastic\ ) ]]; }

# launch LOGS ATTEMPT PROGRAM FLAGS...: a program on every rank of "${nodes[@]}", which are in the order in which SLURM
# numbers them in a step; each node writes LOGS/NODE.log
launch() {
    local logs=$1 attempt=$2 address port
    shift 2
    mkdir -p "$logs"
    address=$(patiently scontrol show node --oneliner "${nodes[0]}" | grep -oP '(?<= NodeAddr=)\S+')
    # Below the ports that systems hand out, and another one for each attempt.
    port=$((20000 + (SLURM_JOB_ID * 101 + ${SLURM_RESTART_COUNT:-0} * 11 + attempt) % 10000))
    split_container
    local options=(
        "${container_options[@]}"
        ${gpus:+--gpus-per-node="$gpus"} --overlap --nodes="${#nodes[@]}" "$(nodelist "${nodes[@]}")" --cpu-bind=none
        --kill-on-bad-exit=0 --wait=40 # ranks that have lost a peer end by themselves, once they have met
        --label --open-mode=append --output="$logs/%N.log"
    )
    # A run that goes on without a lost node does so within this step, whose other tasks live on.
    outlives_nodes "$@" && options+=(--no-kill --wait=0)
    # By it the ranks know each other (SECURITY.md): each start has its own, and no command line shows it.
    MEGALITE_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
    export MEGALITE_SECRET
    # shellcheck disable=SC2016 # each task fills in values of its own
    if [ "${LAUNCHER:-srun}" = torchrun ]; then
        # A static rendezvous: the other kind unpickles what anyone who reaches the port has put there.
        srun "${options[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 bash -c \
            'PET_NODE_RANK=$SLURM_PROCID exec "$@"' - \
            "${container[@]}" torchrun --nnodes="${#nodes[@]}" --nproc-per-node="$RANKS_PER_NODE" --max-restarts=0 \
            --rdzv-backend=static --rdzv-endpoint="$address:$port" --rdzv-conf=timeout=900 "$@" &
    else
        export MASTER_ADDR=$address MASTER_PORT=$port LOCAL_WORLD_SIZE=$RANKS_PER_NODE
        srun "${options[@]}" --ntasks=$((${#nodes[@]} * RANKS_PER_NODE)) --ntasks-per-node="$RANKS_PER_NODE" bash -c \
            'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS exec "$@"' - \
            "${container[@]}" python "$@" &
    fi
    # shellcheck disable=SC2034 # the scripts wait for it
    step=$!
}
