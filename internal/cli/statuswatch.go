package cli

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"csi-registrar/internal/node/status"
)

// watchStatus shows the status again at each change, until it is interrupted. Its exit code is that
// of the last status shown.
func watchStatus(ctx context.Context, e *env, o statusOptions) error {
	last := error(&exitError{code: exitNotRunning})
	for s, err := range follow(ctx, *o.root) {
		unread := ""
		switch {
		case err == nil:
			addVolumes(ctx, *o.root, &s)
			unread = notRead(ctx, *o.root, s)
			last = o.exitError(s, unread, e.now())
		case isPermanent(err):
			return clientError(err)
		default:
			last = &exitError{code: exitNotRunning}
		}
		if err := showAgain(e, o, s, unread, err); err != nil {
			return err
		}
	}
	return last
}

// showAgain shows a status, or the error instead of it. On a terminal it replaces the previous one.
// The first line has the time to which the ages refer.
func showAgain(e *env, o statusOptions, s status.Document, unread string, failed error) error {
	switch {
	case o.json && failed != nil:
		e.report(clientError(failed))
		return nil
	case o.json:
		return printDocument(e, o, s)
	case failed == nil:
		failed = o.checkDriver(s)
	}
	text := e.now().Format(time.RFC3339) + "\n"
	if failed != nil {
		text += cleanLines(failed.Error()) + "\n"
	} else {
		text += o.text(s, unread, e)
	}
	if p := e.page(); p.tty {
		text = "\x1b[H\x1b[J" + fit(text, p.rows)
	} else {
		text += "\n"
	}
	_, err := io.WriteString(e.stdout, text)
	return err
}

// fit cuts the text to the terminal's height, and counts the missing lines. The cursor needs the
// last line of the terminal.
func fit(text string, rows int) string {
	lines := slices.Collect(strings.Lines(text))
	if len(lines) < rows || rows < 3 {
		return text
	}
	kept := lines[:rows-2]
	return strings.Join(kept, "") + fmt.Sprintf("… %d more lines: csi-registrar status\n", len(lines)-len(kept))
}
