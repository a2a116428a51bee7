#!/usr/bin/env bash
# Run torchrun in a pod with several GPUs, and end with the code that says what to start again (docs/operations.md).
#
#   MEGALITE_EXIT_FILE=/runs/ends/NAME bash examples/kubernetes/pod.sh TORCHRUN'S ARGUMENTS
#
# torchrun ends with 1 whatever happened. So the pods of an attempt share a file, in which a rank leaves its exit code.
set -uo pipefail
SECONDS_FOR_FILE=${SECONDS_FOR_FILE:-60} # until a shared file system shows what another node has written

end() { # end CODE WHY
    echo "pod: exit code $1: $2" >&2
    exit "$1"
}

end_by_file() { [ ! -s "$MEGALITE_EXIT_FILE" ] || end "$(cat "$MEGALITE_EXIT_FILE")" "by $MEGALITE_EXIT_FILE"; }

mkdir -p "$(dirname "$MEGALITE_EXIT_FILE")" || exit
end_by_file # this pod replaces one of an attempt that is over

agent='' asked=''
# shellcheck disable=SC2317 # the trap runs it
stop() { # once: a second signal would keep torchrun from waiting for its ranks
    trap '' TERM
    asked=yes
    [ -z "$agent" ] || kill -TERM "$agent" 2>/dev/null
}
trap stop TERM
torchrun "$@" &
agent=$!
[ -z "$asked" ] || kill -TERM "$agent" 2>/dev/null
while kill -0 "$agent" 2>/dev/null; do
    sleep 1 & wait $! # not for the agent, as a signal would hide its code
done
wait "$agent"
code=$?

[ "$code" != 0 ] || end 0 "finished"
for ((waited = 0; waited < SECONDS_FOR_FILE; waited++)); do
    if [ -s "$MEGALITE_EXIT_FILE" ] || [ -n "$asked" ]; then break; fi
    sleep 1 & wait $!
done
end_by_file
[ -z "$asked" ] || end 85 "stopped before the run had begun"
end "$code" "torchrun's, as no rank left one"
