# shellcheck shell=bash disable=SC2154 # the script that sources it has variables of its own
# What a training asks SLURM of its job: until when it runs, and that it begins again where its first node is lost.

# The job as scontrol names it: SLURM_JOB_ID alone may be the number of a whole array.
this_job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
this_job=${this_job:-$SLURM_JOB_ID}

# about_job FIELD: what SLURM says of this job now
about_job() { patiently scontrol show job --oneliner "$this_job" | grep -oP "(?<= $1=)\S+"; }

job_nodes() { scontrol show hostnames "$(about_job NodeList)"; }

# Whether the job has ended but for its script, which SLURM is about to end. Else it runs, or SIGNALING, RESIZING, ...
job_is_over() { about_job JobState | grep -qE 'COMPLET|CANCEL|PENDING|REQUEUE|TIMEOUT|PREEMPT|FAIL|MEMORY|DEADLINE'; }

# Tell programs when SLURM ends this job, in seconds since 1970: its time limit may have been changed since it began.
export_end_time() {
    local end
    end=$(about_job EndTime)
    unset SLURM_JOB_END_TIME
    case $end in
        *T*) SLURM_JOB_END_TIME=$(date -d "$end" +%s) && export SLURM_JOB_END_TIME ;; # else there is no limit
    esac
}

# Whether another attempt would soon have to stop.
is_near_its_end() {
    export_end_time
    [ -n "${SLURM_JOB_END_TIME:-}" ] && ((SLURM_JOB_END_TIME - $(date +%s) < 2 * STOP_SECONDS))
}

# Under --no-kill, which spares need, SLURM lets a job run on without its script when that one's node is lost: the last
# node sees to it that the job begins again. Where the last one is lost first, another takes its place.
guard() {
    while kill -0 $$ 2>/dev/null; do
        # shellcheck disable=SC2016 # the step has arguments of its own
        srun --overlap --nodes=1 --ntasks=1 --nodelist="$(job_nodes | tail -n 1)" --cpu-bind=none bash -c \
            'source slurm/common.sh && source slurm/allocation.sh && watch_over "$1"' - "$SLURMD_NODENAME"
        sleep 10
    done
}

# watch_over NODE: have the job begin again once it goes on without this node (grep reads on to the end of a long list:
# else what writes it would fail)
watch_over() {
    trap '' USR1
    while sleep 20; do
        job_is_over || job_nodes | grep -Fx "$1" >/dev/null || scontrol requeue "$this_job"
    done
}
