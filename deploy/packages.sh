# The one place that knows which distribution packages Everstep needs; sourced by deploy/quickstart and tests/run.
# everstep_need_packages PHASES INSTALL: PHASES is a list such as "build run"; INSTALL is yes or no. Says each missing
# package and why it is needed, installs it when INSTALL is yes, and returns 1 when something is missing afterwards.

everstep_packages_file="$(dirname -- "${BASH_SOURCE[0]}")/packages.txt"

# Prints "package<TAB>why" for each package of the phases that is not installed.
everstep_missing_packages() {
  local package phase why
  while read -r package phase why; do
    case "$package" in '' | '#'*) continue ;; esac
    case " $1 " in *" $phase "*) ;; *) continue ;; esac
    # A tool that is on the PATH serves as well as its package.
    case "$package" in
      g++ | cmake | mold | ccache | python3) command -v "$package" >/dev/null && continue ;;
      ninja-build) command -v ninja >/dev/null && continue ;;
      pkgconf) command -v pkg-config >/dev/null && continue ;;
    esac
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] && continue
    printf '%s\t%s\n' "$package" "$why"
  done <"$everstep_packages_file"
}

everstep_need_packages() {
  local phases=$1 install=$2 missing names sudo=''
  if ! command -v dpkg-query >/dev/null; then
    echo "packages: dpkg-query is missing: this is not Debian or Ubuntu; install by hand what deploy/packages.txt lists" >&2
    return 1
  fi
  missing=$(everstep_missing_packages "$phases")
  if [ -z "$missing" ]; then
    echo "packages: all present"
    return 0
  fi
  echo "packages: missing, and why they are needed:"
  printf '%s\n' "$missing" | awk -F '\t' '{ printf "  %-24s %s\n", $1, $2 }'
  names=$(printf '%s\n' "$missing" | cut -f1 | tr '\n' ' ')
  if [ "$install" != yes ]; then
    echo "packages: not installed (--no-install); as root: apt-get install -y --no-install-recommends $names" >&2
    return 1
  fi
  if [ "$(id -u)" != 0 ]; then
    if ! command -v sudo >/dev/null; then
      echo "packages: neither root nor sudo; as root: apt-get install -y --no-install-recommends $names" >&2
      return 1
    fi
    sudo=sudo
  fi
  echo "packages: installing with apt-get"
  $sudo env DEBIAN_FRONTEND=noninteractive apt-get update -q || return 1
  # shellcheck disable=SC2086  # a list of names
  $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $names || return 1
  [ -z "$(everstep_missing_packages "$phases")" ]
}
