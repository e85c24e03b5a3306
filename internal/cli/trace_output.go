package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"csi-registrar/internal/tool/trace"
)

// traceWriter prints the calls.
type traceWriter struct {
	rec   *trace.Recorder
	e     *env
	json  bool
	table trace.Table
	file  io.Writer // nil: none
}

// write writes all calls, until the recorder is closed.
func (w traceWriter) write() error {
	if !w.json {
		if _, err := io.WriteString(w.e.stdout, w.table.Header()+"\n"); err != nil {
			return err
		}
	}
	for c := range w.rec.Calls() {
		if err := w.call(c); err != nil {
			return err
		}
	}
	return nil
}

func (w traceWriter) call(c trace.Call) error {
	c.Time = c.Time.In(w.e.now().Location())
	if c.End != trace.Running {
		if w.file != nil {
			if err := writeLine(w.file, c); err != nil {
				return err
			}
		}
		if w.json {
			return writeLine(w.e.stdout, c)
		}
	}
	if w.json {
		return nil
	}
	var b strings.Builder
	b.WriteString(w.table.Row(c) + "\n")
	for _, line := range wrap(trace.Detail(c), w.e.page().columns-4) {
		b.WriteString("    " + line + "\n")
	}
	_, err := io.WriteString(w.e.stdout, b.String())
	return err
}

func writeLine(w io.Writer, c trace.Call) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	return enc.Encode(c)
}

// summary prints the summary: with --json on standard error, so that standard output has only
// calls.
func (w traceWriter) summary() error {
	if w.json {
		return w.rec.WriteSummary(w.e.stderr)
	}
	if _, err := fmt.Fprintln(w.e.stdout); err != nil {
		return err
	}
	return w.rec.WriteSummary(w.e.stdout)
}
