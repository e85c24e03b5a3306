#compdef csi-registrar
# zsh completion for csi-registrar; the program itself knows what may come next.

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
