package cli

import (
	"encoding/json"
	"io"
)

// noArgs refuses arguments where a command takes none.
func noArgs(args []string) error {
	if len(args) > 0 {
		return usagef(nil, "unexpected argument %q", args[0])
	}
	return nil
}

// writeJSON prints a document for machines, indented for people.
func writeJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}
