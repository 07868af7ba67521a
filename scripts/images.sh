#!/bin/sh
# Build the images of deploy/Dockerfile, and run the federation of deploy/compose.yaml with them:
#
#   scripts/images.sh HUB SITE RESEARCH     # a wheelhouse of each role
#
# Fails unless each container runs without root and capabilities, writes only to its volume and /tmp, is healthy,
# and ends on SIGTERM with the exit code of its command, and the hub continues its run after that. Needs root,
# since the volumes belong to the images' user. Leaves the images prefed-hub, prefed-site and prefed-research.
#
# CONTAINER  docker (the default) or podman
# COMPOSE    the command for compose.yaml, e.g. podman-compose (default: docker compose)
# BASE       the base image, with the wheelhouses' Python
# WAIT       seconds for each of: the first round, the other rounds, a site's health (default: 300)
set -eu
[ $# -eq 3 ] || {
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p;}' "$0" >&2
    exit 2
}
here=$(cd "$(dirname "$0")/.." && pwd)
engine=${CONTAINER:-docker}

build() { # ROLE WHEELHOUSE
    set -- --file "$here/deploy/Dockerfile" --target "$1" --tag "prefed-$1" ${BASE:+--build-arg "BASE=$BASE"} "$2"
    [ "$engine" != podman ] || set -- --no-cache --format docker "$@" # its own format has no health check; its cache ignores bind mounts
    "$engine" build --quiet "$@"
}
build hub "$1"
build site "$2"
build research "$3"

work=$(mktemp -d)
cd "$work"
project=prefed-images
compose() { ${COMPOSE:-docker compose} --project-name $project "$@" >>log 2>&1; }
run() { # IMAGE COMMAND …: in this folder
    image=$1
    shift
    "$engine" run --rm --read-only --tmpfs /tmp --cap-drop ALL --network none --volume "$work:/srv/prefed" \
        --entrypoint prefed "$image" "$@" >>log
}
container() { "$engine" ps --all --quiet --filter "name=^$project.$1.1\$"; }
look() { "$engine" inspect --format "{{$2}}" "$(container "$1")"; }
fail() {
    echo "images: $*; see $work/log" >&2
    for name in hub $sites; do "$engine" logs "$(container "$name")" >>log 2>&1; done
    exit 1
}
wait_for() { # WHAT COMMAND …
    what=$1 left=${WAIT:-300}
    shift
    until "$@" >/dev/null 2>&1; do
        left=$((left - 1))
        [ $left -gt 0 ] || fail "$what did not happen"
        sleep 1
    done
}
stop() { # SERVICE CODE: SIGTERM ends it with the code
    "$engine" stop -t 60 "$(container "$1")" >>log
    [ "$(look "$1" .State.ExitCode)" = "$2" ] || fail "$1 ended with $(look "$1" .State.ExitCode), not $2"
    echo "$1: SIGTERM ends it with $2"
}
over() { [ "$(look "$1" .State.Status)" = exited ]; }
closed() { # SERVICE: what it may do, seen from inside
    # shellcheck disable=SC2016
    "$engine" exec "$(container "$1")" sh -c '
        ! touch /opt/prefed/x 2>/dev/null && ! touch /var/x 2>/dev/null && touch /srv/prefed/x /tmp/x && rm /srv/prefed/x &&
        grep -qE "^Uid:(.10001){4}$" /proc/1/status && grep -qE "^Cap(Eff|Bnd):.0+$" /proc/1/status &&
        grep -qE "^NoNewPrivs:.1$" /proc/1/status' || fail "$1 is not closed"
    echo "$1: user 10001, no capabilities, writes only to its volume and /tmp"
}
healthy() {
    [ "$engine" != podman ] || "$engine" healthcheck run "$(container "$1")"
    [ "$(look "$1" .State.Health.Status)" = healthy ]
}

sites="north south east"
printf 'name = "wards"\nhub = "hub"\nport = 8002\nsites = ["north", "south", "east"]\n' >wards.toml
chown 10001:10001 .
run prefed-research demo --method feddpo --out demo
run prefed-hub federation init wards.toml
grep -o '"client": "[^"]*"' demo/train.jsonl | sort -u | for site in $sites; do
    read -r own
    grep -F "$own" demo/train.jsonl >"wards/$site/pairs.jsonl"
    cp -r demo/model "wards/$site"
done
cp -r demo/model wards/hub
printf 'rounds = 6\n[data]\nmax_length = 128\n[model]\nname = "model"\n[method]\nname = "feddpo"\nlr = 3e-3\n[engine]\nthreads = 1\n' \
    >wards/hub/experiment.toml
chown -R 10001:10001 wards/hub wards/north wards/south wards/east
cp "$here/deploy/compose.yaml" .
trap 'compose down' EXIT
compose up --detach --force-recreate
rounds=wards/hub/runs/first/rounds.jsonl
wait_for "round 1" test -s $rounds

closed hub
stop hub 143
[ "$(wc -l <$rounds)" -lt 6 ] || fail "the run was over before SIGTERM"
"$engine" start "$(container hub)" >>log
wait_for "the end of the run" over hub
[ "$(look hub .State.ExitCode) $(wc -l <$rounds)" = "0 6" ] || fail "the hub did not finish its run"
echo "hub: continued its run, $(wc -l <$rounds) rounds"
for name in $sites; do
    closed "$name"
    wait_for "health of $name" healthy "$name"
    echo "$name: healthy"
    stop "$name" 130
done
trap - EXIT
compose down
rm -rf "$work"
