#compdef csi-registrar
# zsh completion for csi-registrar; the program itself knows what may come next.

_csi-registrar() {
    local -a candidates
    local line
    for line in "${(@f)$("${words[1]}" __complete -- "${(@)words[2,CURRENT]}" 2>/dev/null)}"; do
        [[ -z $line ]] || candidates+=("${line/$'\t'/:}")
    done
    if (( ${#candidates} )); then
        _describe 'csi-registrar' candidates
    else
        _files
    fi
}

if [[ ${funcstack[1]} == _csi-registrar ]]; then
    _csi-registrar "$@"
else
    compdef _csi-registrar csi-registrar
fi
