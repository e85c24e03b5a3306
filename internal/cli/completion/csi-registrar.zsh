#compdef csi-registrar
# zsh completion for csi-registrar; the program itself knows what may come next.

_csi-registrar() {
    local -a lines candidates
    local line
    lines=("${(@f)$("${words[1]}" __complete -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    case ${lines[1]} in
    :files) _files ;;
    :dirs) _files -/ ;;
    *)
        for line in "${(@)lines[2,-1]}"; do
            candidates+=("${line/$'\t'/:}")
        done
        _describe 'csi-registrar' candidates
        ;;
    esac
}

if [[ ${funcstack[1]} == _csi-registrar ]]; then
    _csi-registrar "$@"
else
    compdef _csi-registrar csi-registrar
fi
