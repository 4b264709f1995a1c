# bash completion of kvcalib, kvsens and kvplan: options and sub-commands are read from the programs' own --help.
_kvcalib_tools() {
  local current=${COMP_WORDS[COMP_CWORD]} command=("${COMP_WORDS[0]}") help
  if [[ $COMP_CWORD -gt 1 && ${COMP_WORDS[1]} =~ ^[a-z]+$ ]]; then
    command+=("${COMP_WORDS[1]}")
  fi
  help=$("${command[@]}" --help 2>/dev/null)
  COMPREPLY=()
  if [[ $current == -* ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$(grep -oE -- '--[a-z][a-z0-9-]*' <<<"$help" | sort -u)" -- "$current")
  elif [[ $COMP_CWORD -eq 1 ]]; then
    # The lines below "Subcommands:" begin with two blanks and a name.
    mapfile -t COMPREPLY < <(compgen -W "$(sed -n '/^Subcommands:/,$s/^  \([a-z][a-z]*\) .*/\1/p' <<<"$help")" -- "$current")
  fi
}
# -o default: file names where nothing above matches.
complete -o default -F _kvcalib_tools kvcalib kvsens kvplan
