# shellcheck shell=bash disable=SC2034,SC2153,SC2154 # the script that sources it has variables of its own
# Which nodes of its job a training runs on. A node that fails its check or does not answer, or on which ranks die again
# and again, is sick: it is left out of the attempt, and of what SLURM gives to the job next. Variables of sbatch:
#
#   HEALTH_CHECK   a command that fails on a sick node. Default: true, so that a node must answer, no more
#   HEALTH_SECONDS for how long nodes may take to answer: a prolog at a node's first step, the check. Default: 300
#   SICK_HOURS     for how long a sick node is left out. Default: 6

export HEALTH_CHECK=${HEALTH_CHECK:-true}
HEALTH_SECONDS=${HEALTH_SECONDS:-300}
SICK_HOURS=${SICK_HOURS:-6}
sick_file=$RUN/slurm/sick_nodes # a line is TIME NODE WHY; remove it, and the node has its chance again

# Nodes that were sick lately, the latest first.
sick_nodes() {
    tac "$sick_file" 2>/dev/null |
        awk -v since="$(date -u -d "-$SICK_HOURS hours" +%FT%TZ)" '$1 > since && !seen[$2]++ { print $2 }'
}

mark_sick() { # mark_sick NODE WHY
    say "$1 is sick: $2"
    echo "$(date -u +%FT%TZ) $1 $2" >>"$sick_file"
}

# Set nodes to those of the job that answer and pass the check, as SLURM numbers them in a step: the first has rank 0.
# Where there are more than NODES, those that were sick lately are left out, the latest first.
find_nodes() {
    local all node answer spares well=()
    local -A answers=()
    nodes=()
    for _ in 1 2 3; do
        mapfile -t all < <(job_nodes) # which loses a node that fails; SLURM then refuses to ask the list of before
        while read -r node answer; do
            answers[$node]=$answer
            [ "$answer" != well ] || well+=("$node")
        done < <(ask_nodes "${all[@]}")
        ((${#answers[@]})) && break # else SLURM's controller has just begun, and has not heard of its nodes yet
        sleep "$RETRY_SECONDS"
    done
    ((${#well[@]})) || return # then it is not the nodes, but the check, or SLURM
    for node in "${all[@]}"; do
        answer=${answers[$node]:-did not answer}
        [ "$answer" = well ] || mark_sick "$node" "$answer"
    done
    spares=$((${#well[@]} > NODES ? ${#well[@]} - NODES : 0))
    mapfile -t nodes < <(printf '%s\n' "${well[@]}" |
        grep -vFx -f <(sick_nodes | grep -Fx -f <(printf '%s\n' "${well[@]}") | head -n "$spares"))
}

# ask_nodes NODE...: a line of each that answers, in the order of their tasks: NODE well, or NODE and what is wrong with
# it. What a task's prolog or a shell's start-up file says is no answer.
ask_nodes() {
    # shellcheck disable=SC2016 # each node fills in values of its own
    timeout --kill-after=10 "$HEALTH_SECONDS" srun "$(nodelist "$@")" --ntasks=$# --ntasks-per-node=1 --overlap \
        ${gpus:+--gpus-per-node="$gpus"} --cpu-bind=none --quiet --label --no-kill \
        bash -c 'said=$(bash -c "$HEALTH_CHECK" 2>&1 | tail -n 1; exit "${PIPESTATUS[0]}") && said=well
            echo "answer of $SLURMD_NODENAME ${said:-fails its check}"' |
        sort -n | grep -oP ': answer of \K.*'
}

# Ranks of this job that were killed or fell silent, by the program's own messages: process NUMBER on NODE, a line each
deaths() {
    grep -hE 'ended without a message|has not answered' "$logs"/*.log 2>/dev/null |
        grep -oP 'process \d+ on [^)]+' | sort -u
}

# A node on which ranks died in this attempt and in the one before is sick, unless they died on all nodes. Fails where
# none is.
judge_deaths() {
    local node deadly judged=1
    mapfile -t deadly < <(deaths | grep -vFx "$known_deaths" | sed 's/.* on //' | sort -u)
    ((${#deadly[@]} == ${#nodes[@]})) && deadly=()
    for node in "${deadly[@]}"; do
        [[ " $last_deadly_nodes " != *" $node "* ]] || { mark_sick "$node" "ranks died on it in two attempts" && judged=0; }
    done
    known_deaths=$(deaths) last_deadly_nodes=${deadly[*]}
    return $judged
}

# Have SLURM give this job, which waits again, none of the nodes that were sick lately, as long as its partition, or its
# reservation, has enough others. What a person has excluded stays so, and what was excluded here before is given again.
exclude_sick_nodes() {
    local before=$logs/excluded_nodes excluded sick spare within='' unusable='down|dr|fail' IFS=,
    touch "$before"
    mapfile -t excluded < <(scontrol show hostnames "$(about_job ExcNodeList)" | grep -vFx -e '(null)' -f "$before")
    [ -z "${SLURM_JOB_RESERVATION:-}" ] ||
        within=$(scontrol show reservation "$SLURM_JOB_RESERVATION" | grep -oP '(?<= Nodes=)\S+')
    [ -n "$within" ] || unusable+='|maint|resv'
    spare=$(sinfo -hN --partition="$SLURM_JOB_PARTITION" ${within:+--nodes="$within"} -o %t | grep -cvE "$unusable")
    ((spare -= SLURM_NNODES + ${#excluded[@]}))
    mapfile -t sick < <(sick_nodes | head -n $((spare > 0 ? spare : 0)))
    printf '%s\n' "${sick[@]}" >"$before"
    excluded+=("${sick[@]}")
    scontrol update JobId="$this_job" ExcNodeList="${excluded[*]}"
    [ -z "${sick[*]}" ] || say "SLURM will leave out ${sick[*]}"
}

known_deaths=$(deaths)
last_deadly_nodes=
