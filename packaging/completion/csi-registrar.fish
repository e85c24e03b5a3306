# fish completion for csi-registrar; the program itself knows what may come next.

function __csi_registrar_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l lines ($words[1] __complete -- $words[2..-1] "$current" 2>/dev/null)
    if set -q lines[1]
        printf '%s\n' $lines
    else
        __fish_complete_path "$current"
    end
end

complete -c csi-registrar -f -a '(__csi_registrar_complete)'
