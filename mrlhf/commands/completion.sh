# Completion for bash, and for zsh with bashcompinit. `mrlhf completion` fills in the words in @.
#
# bash takes "=" for a word of its own, zsh does not. A key ends with "=", after which the value
# follows at once, so no blank is added behind it.
[ -z "${ZSH_VERSION:-}" ] || { autoload -Uz compinit bashcompinit; compinit; bashcompinit; }
_mrlhf() {
  local word=${COMP_WORDS[COMP_CWORD]} last=${COMP_WORDS[COMP_CWORD-1]}
  local key= lead= words= command= each
  for each in "${COMP_WORDS[@]:0:$COMP_CWORD}"; do
    each=${each##*/} each=${each%.py} each=${each#mrlhf-} each=${each//_/-}
    each=${each%-checkpoint}
    case $each in torchrun) ;; @commands@) command=$each; break ;; esac
  done
  case $word in
    =) key=$last word= ;;
    [!-]*=*) key=${word%%=*} lead=$key= ;;
    *) [ "$last" != = ] || key=${COMP_WORDS[COMP_CWORD-2]} ;;
  esac
  if [ -n "$key" ]; then
    case $key in @values@
    esac
    words=$(for each in $words; do echo "$lead$each"; done)
  elif [ -n "$command" ]; then
    case $command in @options@
    esac
    words="$words --help --version"
  elif [ "${COMP_WORDS[0]##*/}" = mrlhf ]; then
    words="@names@ --help --version"
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  case ${COMPREPLY[0]} in *=) compopt -o nospace 2>/dev/null ;; esac
}
complete -o default -F _mrlhf mrlhf torchrun @programs@ mrlhf-convert-checkpoint
