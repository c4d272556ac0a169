# shellcheck shell=bash
# What run-in-guest.sh and run-in-uml.sh share: the options, the control folder that the guest reads, how it ends.
# Sourced, with `machine` set. Options, for both:
#   --topology NAME|FILE|none   a script of topologies/ that makes the devices (wire)
#   --timeout S                 what the guest has, boot and all (600)
#   --rw FOLDER                 writable, shared with the host; all else that the guest writes is lost (repeatable)
#   --cwd FOLDER                where the command runs (here)
#   --memory SIZE               (3G)
#   --append 'ARGUMENTS'        more kernel arguments
#   --keep                      leave the control folder with the console's log
#   --help                      print this
# Passed on: PATH HOME USER LANG LC_ALL TERM VIRTUAL_ENV PYTHON* PYTEST* LAB_* and the names in $GUEST_ENV.
# Exit status: the command's; 124 it ran out of time; 125 the guest did not boot, died, or has no topology.

lab=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
topology=wire timeout_s=600 shared=() cwd=$PWD memory=3G append='' keep=0 command=()
control='' guest_pid='' pump_pids=()

fail() {
    echo "lab: $*" >&2
    exit 125
}

parse_option() { # a script's own options; returns how many arguments it took
    return 0
}

show_help() { # the head of the script that was started, and of this file
    local file
    for file in "$0" "${BASH_SOURCE[0]}"; do
        sed -n '/^# shellcheck/d; /^#!/d; /^#/!q; s/^# \{0,1\}//p' "$file"
        echo
    done
    exit 0
}

parse_options() {
    while (($#)); do
        case $1 in
        --topology) topology=$2 && shift 2 ;;
        --timeout) timeout_s=$2 && shift 2 ;;
        --rw) shared+=("$(realpath "$2")") && shift 2 ;;
        --cwd) cwd=$2 && shift 2 ;;
        --memory) memory=$2 && shift 2 ;;
        --append) append=$2 && shift 2 ;;
        --keep) keep=1 && shift ;;
        -h | --help) show_help ;;
        --) shift && break ;;
        --*)
            local taken=0
            parse_option "$@" || taken=$?
            ((taken)) || fail "unknown option $1; $(basename "$0") --help lists them"
            shift "$taken"
            ;;
        *) break ;;
        esac
    done
    (($#)) || fail "usage: $(basename "$0") [OPTION ...] -- COMMAND ...; --help lists the options"
    command=("$@")
    if [[ $topology != none && $topology != */* ]]; then topology=$lab/topologies/$topology.sh; fi
    [[ $topology == none || -f $topology ]] || fail "there is no topology $topology"
}

write_environment() {
    local name
    local passed='^(PATH|HOME|USER|LANG|LC_ALL|TERM|VIRTUAL_ENV|(PYTHON|PYTEST|LAB_).*)$'
    for name in $(compgen -e | grep -E "$passed") ${GUEST_ENV:-}; do
        [[ -z ${!name+x} ]] || printf 'export %s=%q\n' "$name" "${!name}"
    done
    printf 'export LAB_MACHINE=%q LAB_TOPOLOGY=%q\n' "$machine" "$(basename "$topology" .sh)"
}

make_control_folder() { # KEY=VALUE ...: more settings for guest-main.sh
    local setting index
    control=$(mktemp -d "${TMPDIR:-/tmp}/kvxfer-lab.XXXXXX")
    trap clean_up EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    cp "$lab/guest-main.sh" "$control/main.sh"
    write_environment >"$control/environment.sh"
    printf '%q ' "${command[@]}" >"$control/command.sh"
    for setting in "machine=$machine" "topology=$topology" "cwd=$cwd" "$@"; do
        printf '%s=%q\n' "${setting%%=*}" "${setting#*=}"
    done >"$control/settings.sh"
    : >"$control/shared"
    for index in "${!shared[@]}"; do echo "rw$index ${shared[index]}" >>"$control/shared"; done
}

clean_up() {
    trap - EXIT INT TERM
    if [[ -n $guest_pid ]]; then
        kill "$guest_pid" 2>/dev/null || true
        wait "$guest_pid" 2>/dev/null || true
    fi
    if ((${#pump_pids[@]})); then kill "${pump_pids[@]}" 2>/dev/null || true; fi
    if ((keep)); then echo "lab: kept $control" >&2; else rm -rf "$control"; fi
}

end_with_status_of() { # LOG ...: wait for the guest, pass on its answer; it shows the logs where there is none
    local emulator=0 log
    wait "$guest_pid" || emulator=$?
    guest_pid=''
    if ((${#pump_pids[@]})); then wait "${pump_pids[@]}" || true; fi
    pump_pids=()
    [[ ! -s $control/status ]] || exit "$(<"$control/status")"
    for log in "$@"; do
        [[ ! -s $log ]] || { echo "lab: the end of $(basename "$log"):" && tail -n 25 "$log"; } >&2
    done
    if ((emulator == 124)); then
        echo "lab: the guest ran out of its $timeout_s s" >&2
        exit 124
    fi
    fail "the guest died before the command ended; the emulator's status is $emulator"
}
