# Expands words of a script for shell.py, in a shell that can start nothing and write nothing.
# The arguments are pairs: a name and a value, `-` and a name that is unset, `+` and an argument of
# the function that is followed. What shell.py appends below is followed by that alone.
ulimit -t 5 -v 4000000 -u 0 2> /dev/null
__n=0
while (($#)); do
    case $1 in
        -) unset -v "$2" ;;
        +) printf -v "__arguments[__n++]" %s "$2" ;;
        *) printf -v "$1" %s "$2" ;;
    esac
    shift 2
done 2> /dev/null
set -f -- "${__arguments[@]}"
unset -v __n __arguments
PATH=/nonexistent
enable -n . : alias bg bind break builtin caller cd command compgen complete compopt continue \
    declare dirs disown echo eval exec exit export false fc fg getopts hash help history jobs kill \
    let local logout mapfile popd pushd pwd read readarray readonly return shopt source suspend \
    times trap true type typeset ulimit umask unalias unset wait enable
set -r
