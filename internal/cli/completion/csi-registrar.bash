# bash completion for csi-registrar; the program itself knows what may come next.

_csi_registrar() {
    local cur=${COMP_WORDS[COMP_CWORD]} kind='' word
    COMPREPLY=()
    {
        IFS= read -r kind
        while IFS=$'\t' read -r word _; do
            COMPREPLY+=("$word")
        done
    } < <("${COMP_WORDS[0]}" __complete -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    case $kind in
    :files)
        compopt -o filenames 2>/dev/null || :
        mapfile -t COMPREPLY < <(compgen -f -- "$cur")
        ;;
    :dirs)
        compopt -o filenames 2>/dev/null || :
        mapfile -t COMPREPLY < <(compgen -d -- "$cur")
        ;;
    esac
}

complete -F _csi_registrar csi-registrar
