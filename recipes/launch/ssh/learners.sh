#!/bin/bash
# One learner on each of these machines: ./learners.sh start HOST...; ./learners.sh stop HOST... lets them leave
# systemd starts a learner again whenever it dies. Each machine has this package, and `loginctl enable-linger`.
RECIPE=llama/1b  # set: recipe

start() {
    local host=$1 join env
    join=$(cat run/join) || return
    [ ! -d recipe ] || scp -qr recipe "$host:" || return
    env=$(printf 'DILOCO_JOIN=%s\nDILOCO_LEARNER=%s\n' "$join" "$host" |
        ssh "$host" 'umask 077 && rm -f diloco.env && cat > diloco.env && echo "$PWD/diloco.env"') || return
    ssh "$host" systemd-run --user --unit=diloco-learner --same-dir --collect \
        -p Restart=on-failure -p RestartSec=5 -p "'RestartPreventExitStatus=2 143'" -p TimeoutStopSec=60 \
        -p "EnvironmentFile=$(printf %q "$env")" diloco fit "$(printf %q "$RECIPE")"
}

action=$1 code=0
for host in "${@:2}"; do
    case $action in
    start) start "$host" || { code=$? && echo "$host: not started" >&2; } ;;
    stop) ssh "$host" systemctl --user stop diloco-learner || code=$? ;;
    *) echo "usage: $0 start|stop HOST..." >&2 && exit 2 ;;
    esac
done
exit $code
