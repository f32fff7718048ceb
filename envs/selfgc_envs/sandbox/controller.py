"""The bash program at the other end of the shell protocol, and the text that carries a shell's state.

Two trusted loops run inside the sandbox for its whole life; the agent's commands never run in them:

* the *controller* reads one command at a time and forks a child for it. The child restores the state (directory,
  variables, functions), runs the command, and writes the state back. So ``exit``, ``exec``, ``set -e`` or a killed
  command end a child and leave the shell intact;
* the *reaper* kills a command's process group and descendants when told to, and the whole sandbox when its pipe
  closes, which is when the process that owns the sandbox closes it or dies.

Pipes (numbers are filled in when the shell starts; a command sees none but its output and the state pipe)::

    0       to the controller    this program (so that it does not fill the process list), then per command
                                 "<nonce> <last exit code> <bytes of state> <bytes of command>\\n<state><command>"
    1, 2    from commands        output, in order
    status  from the controller  "ready" · "start <nonce> <pid>" · "end <nonce> <exit code>"
    state   from the child       bash text that restores the state, then END_OF_STATE
    reap    to the reaper        "<pid>\\n"

The nonce is drawn per command and unset before the command runs: no output, early, late or forged, can pass for an
end. Traps, shell options and aliases do not survive a command; what is exported, set, defined or cd'ed to does.
"""

from __future__ import annotations

END_OF_STATE = b"\n#selfgc:end\n"

BOOT = 'LC_ALL=C read -r -N %d __selfgc_program && eval "$__selfgc_program"'

# Variables a fresh shell brings along; the state says which of them still exist.
RESET = b"builtin unset -v HOME LANG TERM PATH OLDPWD SHLVL\n"

_LETTERS = "_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_ALL_NAMES = " ".join(f'"${{!{letter}@}}"' for letter in _LETTERS)
# Set by bash itself; restoring them fails or means nothing.
_OWN = (
    "__selfgc_*|BASH|BASHOPTS|BASHPID|BASH_*|COMP_*|DIRSTACK|EPOCH*|EUID|FUNCNAME|GROUPS|HISTCMD|HOSTNAME|HOSTTYPE"
    "|LINENO|MACHTYPE|OPTERR|OPTIND|OSTYPE|PIPESTATUS|PPID|PS4|PWD|RANDOM|SECONDS|SHELLOPTS|SRANDOM|UID|_"
)

_SAVE = f"""
if [[ -z $__selfgc_saved ]]; then
  __selfgc_saved=1
  set +efuvx
  __selfgc_names=()
  for __selfgc_name in {_ALL_NAMES}; do
    case $__selfgc_name in {_OWN}) ;; *) __selfgc_names+=("$__selfgc_name") ;; esac
  done
  {{
    builtin printf 'builtin cd -- %q\\n' "$PWD"
    builtin declare -p -- "${{__selfgc_names[@]}}"
    builtin declare -f
    builtin declare -Fx
    builtin printf '\\n#selfgc:end\\n'
  }} >&@state@
fi
"""

_PROGRAM = """
unset __selfgc_program
exec 2>/dev/null
@limits@
__selfgc_save='@save@'
__selfgc_family() {
  local child children
  read -r -a children <"/proc/$1/task/$1/children"
  for child in "${children[@]}"; do family+=("$child"); __selfgc_family "$child"; done
}
(
  exec <&- >/dev/null @status@>&- @state@>&-
  while read -r pid <&@reap@; do
    family=()
    __selfgc_family "$pid"
    kill -KILL -- "-$pid"
    kill -KILL "$pid" "${family[@]}"
  done
  @on_close@
) &
unset -f __selfgc_family
exec @reap@<&-
set -m
echo ready >&@status@
while IFS=' ' read -r __selfgc_nonce __selfgc_last __selfgc_size __selfgc_length; do
  LC_ALL=C IFS= read -r -N "$__selfgc_size" __selfgc_state
  LC_ALL=C IFS= read -r -N "$__selfgc_length" __selfgc_cmd
  (
    exec </dev/null 2>&1 @status@>&-
    @child_limits@
    unset -v __selfgc_nonce
    eval "$__selfgc_state" 2>/dev/null
    unset -v __selfgc_state
    trap '{ eval "$__selfgc_save"; } 2>/dev/null' EXIT
    [[ $__selfgc_last == 0 ]] || eval "(exit $__selfgc_last)"
    eval "$__selfgc_cmd"
    { __selfgc_last=$?; eval "$__selfgc_save"; exit "$__selfgc_last"; } 2>/dev/null
  ) &
  echo "start $__selfgc_nonce $!" >&@status@
  wait "$!"
  echo "end $__selfgc_nonce $?" >&@status@
done
"""


def controller_program(
    *, status: int, state: int, reap: int, limits: str, child_limits: str, on_close: str = "kill -KILL $$"
) -> str:
    """The program that ``BOOT`` reads.

    Args:
        status, state, reap: descriptor numbers of the pipes.
        limits, child_limits: ``ulimit`` lines for the whole shell, and for each command.
        on_close: what the reaper does when its pipe closes.
    """
    program = _PROGRAM.replace("@save@", _SAVE.replace("'", "'\\''"))
    values = {"status": status, "state": state, "reap": reap}
    texts = {"limits": limits, "child_limits": child_limits, "on_close": on_close}
    for name, value in (values | texts).items():
        program = program.replace(f"@{name}@", str(value))
    return program
