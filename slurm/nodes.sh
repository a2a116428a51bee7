# shellcheck shell=bash disable=SC2034,SC2154 # the script that sources it has variables of its own
# Which nodes of its job a training runs on. A node that fails its check or does not answer, or on which ranks die again
# and again, is sick: it is left out of the attempt, and of what SLURM gives to the job next. Variables of sbatch:
#
#   HEALTH_CHECK   a command that fails on a sick node. Default: true, so that a node must answer, no more
#   SICK_HOURS     for how long a sick node is left out. Default: 6

export HEALTH_CHECK=${HEALTH_CHECK:-true}
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

# Set nodes to those of the job that answer and pass the check; those that were sick lately come last.
find_nodes() {
    local all node answer well=()
    local -A answers=()
    nodes=()
    mapfile -t all < <(scontrol show hostnames "$(about_job NodeList)")
    while read -r node answer; do answers[$node]=$answer; done < <(ask_nodes "${all[@]}")
    for node in "${all[@]}"; do [ "${answers[$node]:-}" = well ] && well+=("$node"); done
    ((${#well[@]})) || return # then it is not the nodes, but the check, or SLURM
    for node in "${all[@]}"; do
        answer=${answers[$node]:-did not answer}
        [ "$answer" = well ] || mark_sick "$node" "$answer"
    done
    mapfile -t nodes < <(
        printf '%s\n' "${well[@]}" | grep -vFx -f <(sick_nodes)
        printf '%s\n' "${well[@]}" | grep -Fx -f <(sick_nodes)
    )
}

# ask_nodes NODE...: a line of each that answers: NODE well, or NODE and what is wrong with it
ask_nodes() {
    # shellcheck disable=SC2016 # each node fills in values of its own
    timeout --kill-after=10 60 srun "$(nodelist "$@")" --ntasks=$# --ntasks-per-node=1 --overlap --no-kill \
        ${gpus:+--gpus-per-node="$gpus"} --cpu-bind=none --quiet \
        bash -c 'said=$(bash -c "$HEALTH_CHECK" 2>&1 | tail -n 1; exit "${PIPESTATUS[0]}") && said=well
            echo "$SLURMD_NODENAME ${said:-fails its check}"'
}

# Ranks of this job that were killed or fell silent, by the program's own messages: process NUMBER on NODE, a line each
deaths() {
    grep -hE 'ended without a word|does not answer' "$logs"/*.log 2>/dev/null | grep -oP 'process \d+ on [^).]+' | sort -u
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

# Have SLURM give this job, which waits again, none of the nodes that were sick lately, as long as its partition has
# enough others. What a person has excluded stays so, and what was excluded here before is given again.
exclude_sick_nodes() {
    local before=$logs/excluded_nodes excluded sick spare IFS=,
    touch "$before"
    mapfile -t excluded < <(scontrol show hostnames "$(about_job ExcNodeList)" | grep -vFx -e '(null)' -f "$before")
    spare=$(sinfo --noheader --Node --partition="$SLURM_JOB_PARTITION" --format=%t | grep -cvE 'down|drain|fail')
    ((spare -= SLURM_NNODES + ${#excluded[@]}))
    mapfile -t sick < <(sick_nodes | head -n $((spare > 0 ? spare : 0)))
    printf '%s\n' "${sick[@]}" >"$before"
    excluded+=("${sick[@]}")
    scontrol update JobId="$this_job" ExcNodeList="${excluded[*]}"
    [ -z "${sick[*]}" ] || say "SLURM is to leave out ${sick[*]}"
}

known_deaths=$(deaths)
last_deadly_nodes=
