package cli

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"csi-registrar/internal/control"
	"csi-registrar/internal/safetext"
	"csi-registrar/internal/status"
)

// watchStatus shows the status as it changes, until it is interrupted or its output is
// closed; the exit code is that of the last one shown.
func watchStatus(ctx context.Context, e *env, o statusOptions) error {
	updates, stop := startFollowing(ctx, *o.root)
	defer stop()
	show := watcher(appendLines(e, o))
	if p := e.page(); o.json {
		show = appendDocuments(e, o)
	} else if p.tty {
		show = redraw(e, o)
	}
	// Ages on a screen grow while nothing happens, and a reader may leave. This does not
	// reach the daemon.
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	var last update
	for {
		select {
		case u, more := <-updates:
			if !more {
				return last.exitError(o)
			}
			last = u
			if u.err != nil && isPermanent(u.err) {
				return clientError(u.err)
			}
			if err := show(u, true); err != nil {
				return err
			}
		case <-tick.C:
			if readerGone(e.stdout) {
				return last.exitError(o)
			}
			if err := show(last, false); err != nil {
				return err
			}
		}
	}
}

// update is what follow yields: a status, or an error.
type update struct {
	doc    control.Document
	status status.Document
	err    error
}

func (u update) exitError(o statusOptions) error {
	if u.err != nil || u.doc == nil {
		return &exitError{code: exitNotRunning}
	}
	return o.exitError(u.status)
}

// startFollowing runs follow in a goroutine, which stop ends and waits for.
func startFollowing(ctx context.Context, root string) (updates <-chan update, stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	out := make(chan update)
	go func() {
		defer close(out)
		for doc, err := range follow(ctx, root) {
			u := update{doc: doc, err: err}
			if err == nil {
				u.status, u.err = doc.Status()
			}
			select {
			case out <- u:
			case <-ctx.Done():
				return
			}
		}
	}()
	return out, func() {
		cancel()
		for range out {
		}
	}
}

// watcher shows an update; if it is not new, only time has passed.
type watcher func(u update, isNew bool) error

func appendDocuments(e *env, o statusOptions) watcher {
	return func(u update, isNew bool) error {
		switch {
		case !isNew:
			return nil
		case u.err != nil: // there is no document; it continues
			e.report(clientError(u.err))
			return nil
		}
		return printDocument(e, o, u.doc, "")
	}
}

// watchedLine is one line of `status --watch` in a pipe, and what is written when what it is
// about is gone.
type watchedLine struct{ text, gone string }

// appendLines writes a line for each driver that changed, for logs and pipes.
func appendLines(e *env, o statusOptions) watcher {
	shown := map[string]watchedLine{}
	return func(u update, isNew bool) error {
		if !isNew {
			return nil
		}
		lines := map[string]watchedLine{}
		var b strings.Builder
		write := func(text string) {
			fmt.Fprintf(&b, "%s  %s\n", e.now().Format(time.RFC3339), safetext.Clean(text, maxLine))
		}
		add := func(subject, text, gone string) {
			lines[subject] = watchedLine{text, gone}
			if shown[subject].text != text {
				write(text)
			}
		}
		if u.err != nil {
			add("", u.err.Error(), "")
		} else {
			if u.status.ConfigError != "" {
				add("configuration", "configuration  errors: "+strings.ReplaceAll(u.status.ConfigError, "\n", "; "), "configuration  no errors any more")
			}
			for _, d := range u.status.Drivers {
				if o.driver == "" || o.driver == d.Name {
					text := strings.Join([]string{d.Name, d.State, reasonOf(d, e.now())}, "  ")
					add(d.Name, strings.TrimSpace(text), d.Name+"  no longer configured")
				}
			}
			for _, line := range degraded(u.status) {
				add(line.text, line.text, "no longer: "+line.text)
			}
			for _, subject := range slices.Sorted(maps.Keys(shown)) {
				if _, there := lines[subject]; !there && subject != "" {
					write(shown[subject].gone)
				}
			}
		}
		shown = lines
		_, err := fmt.Fprint(e.stdout, b.String())
		return err
	}
}

// redraw shows the text at the top of the terminal, in place of what is there.
func redraw(e *env, o statusOptions) watcher {
	return func(u update, _ bool) error {
		var text string
		switch {
		case u.err != nil:
			text = cleanLines(u.err.Error()) + "\n"
		case u.doc == nil:
			return nil // no answer yet
		case o.checkDriver(u.status) != nil:
			text = cleanLines(o.checkDriver(u.status).Error()) + "\n"
		default:
			text = o.text(u.status, e)
		}
		_, err := fmt.Fprint(e.stdout, "\x1b[H\x1b[J"+fit(text, e.page().rows))
		return err
	}
}

// fit cuts the text to the terminal's height, and says so. The last line is the cursor's.
func fit(text string, rows int) string {
	lines := slices.Collect(strings.Lines(text))
	if len(lines) < rows || rows < 3 {
		return text
	}
	kept := lines[:rows-2]
	return strings.Join(kept, "") + fmt.Sprintf("… %d more lines: csi-registrar status\n", len(lines)-len(kept))
}
