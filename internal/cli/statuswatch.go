package cli

import (
	"context"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"csi-registrar/internal/control"
	"csi-registrar/internal/safetext"
	"csi-registrar/internal/status"
)

// watchStatus shows the status as it changes, until it is interrupted or nobody reads it
// any more; its exit code is that of the last one shown.
func watchStatus(ctx context.Context, e *env, o statusOptions) error {
	updates, stop := pump(ctx, *o.root)
	defer stop()
	show := watcher(appendLines(e, o))
	if p := e.page(); o.json {
		show = appendDocuments(e, o)
	} else if p.tty {
		show = redraw(e, o)
	}
	// The ages on a screen grow while nothing happens, and a reader may leave. This asks
	// no daemon.
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	var last update
	for {
		select {
		case u, more := <-updates:
			if !more {
				return last.verdict(o)
			}
			last = u
			if u.err != nil && lasting(u.err) {
				return asked(u.err)
			}
			if err := show(u, true); err != nil {
				return err
			}
		case <-tick.C:
			if unread(e.stdout) {
				return last.verdict(o)
			}
			if err := show(last, false); err != nil {
				return err
			}
		}
	}
}

// update is what follow yields: a status, or why there is none.
type update struct {
	doc    control.Document
	status status.Document
	err    error
}

func (u update) verdict(o statusOptions) error {
	if u.err != nil || u.doc == nil {
		return &exitError{code: exitNotRunning}
	}
	return o.verdict(u.status)
}

// pump follows the daemon in a goroutine, which stop ends and waits for.
func pump(ctx context.Context, root string) (updates <-chan update, stop func()) {
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

// watcher shows an update; if it is not new, only the time has moved on.
type watcher func(u update, isNew bool) error

func appendDocuments(e *env, o statusOptions) watcher {
	return func(u update, isNew bool) error {
		switch {
		case !isNew:
			return nil
		case u.err != nil: // no document; said as `status --json` says it, and the waiting goes on
			e.report(asked(u.err))
			return nil
		}
		return printDocument(e, o, u.doc, "")
	}
}

// appendLines writes a line for each driver that changed, for logs and pipes.
func appendLines(e *env, o statusOptions) watcher {
	shown := map[string]string{}
	return func(u update, isNew bool) error {
		if !isNew {
			return nil
		}
		lines := map[string]string{}
		var order []string
		add := func(name, text string) {
			order = append(order, name)
			lines[name] = text
		}
		if u.err != nil {
			add("", u.err.Error())
		} else {
			if u.status.ConfigError != "" {
				add("configuration", "mistakes: "+strings.ReplaceAll(u.status.ConfigError, "\n", "; "))
			}
			for _, d := range u.status.Drivers {
				if o.driver == "" || o.driver == d.Name {
					add(d.Name, stateLine(d))
				}
			}
			for name := range shown {
				if _, there := lines[name]; !there && name == "configuration" {
					add(name, "no mistakes any more")
				} else if !there && name != "" {
					add(name, "no longer configured")
				}
			}
		}
		var b strings.Builder
		for _, name := range order {
			if shown[name] == lines[name] {
				continue
			}
			fmt.Fprintf(&b, "%s  %s\n", e.now().Format(time.RFC3339), safetext.Clean(strings.TrimLeft(name+"  "+lines[name], " "), maxLine))
		}
		shown = lines
		_, err := fmt.Fprint(e.stdout, b.String())
		return err
	}
}

func stateLine(d status.Driver) string {
	if d.Reason == "" {
		return d.State
	}
	return d.State + "  " + d.Reason
}

// redraw keeps one picture on the terminal, over the last one: what was on the screen
// before stays above it, and the last picture stays when it ends.
func redraw(e *env, o statusOptions) watcher {
	drawn := 0 // lines of the terminal that the last picture takes
	return func(u update, _ bool) error {
		p := e.page()
		var text string
		switch {
		case u.err != nil:
			text = cleanLines(u.err.Error()) + "\n"
		case u.doc == nil:
			return nil // nothing heard yet
		case o.known(u.status) != nil:
			text = cleanLines(o.known(u.status).Error()) + "\n"
		default:
			text = o.text(u.status, e)
		}
		text, rows := fit(text, p)
		back := ""
		if drawn > 0 {
			back = fmt.Sprintf("\x1b[%dA", drawn)
		}
		drawn = rows
		_, err := fmt.Fprint(e.stdout, back+"\r\x1b[J"+text)
		return err
	}
}

// fit leaves out what the terminal has no room for, and says so; rows is how many of the
// terminal's lines the text takes.
func fit(text string, p page) (out string, rows int) {
	lines := strings.SplitAfter(strings.TrimSuffix(text, "\n"), "\n")
	for i, line := range lines {
		n := max((visibleLength(line)+p.width-1)/p.width, 1)
		if room := p.rows - 1; p.rows > 1 && (rows+n > room || rows+n == room && i < len(lines)-1) {
			rest := []rune(fmt.Sprintf("… %d lines more: csi-registrar status", len(lines)-i))
			return out + string(rest[:min(len(rest), p.width)]) + "\n", rows + 1
		}
		out += line
		rows += n
	}
	return out + "\n", rows
}

// visibleLength counts the characters of a line without the colours.
func visibleLength(line string) int {
	n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n"))
	for {
		_, rest, found := strings.Cut(line, "\x1b[")
		if !found {
			return n
		}
		code, after, _ := strings.Cut(rest, "m")
		n -= len("\x1b[") + len(code) + len("m")
		line = after
	}
}
