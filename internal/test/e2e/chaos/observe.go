package chaos

import (
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/test/fake"
)

// heard processes a line of the daemon's log.
func (w *world) heard(line string) {
	fmt.Fprintln(w.log, line)
	e, ok := parse(line)
	w.mu.Lock()
	defer w.mu.Unlock()
	if !ok {
		w.violated("the daemon wrote what is no log line: %s", line)
		return
	}
	name := e.fields["driver"]
	if e.fields["limited"] != "" {
		w.figures["entries are limited"]++
		w.history.noteAt(e.at, name, muted, "until the next daemon starts")
		w.mutedUntil[name] = e.at.Add(24 * time.Hour)
	}
	switch {
	case e.msg == "withdrawing", e.msg == "republishing the registration socket":
		w.figures[e.msg]++
		if w.byName[name] == nil {
			w.violated("a driver that nobody configured: %s", line)
			return
		}
		if why := w.history.unfounded(name, e); why != "" {
			w.violated("%s%s", why, w.history.story(name))
		}
		w.history.noteAt(e.at, name, logged, e.msg+", cause "+e.fields["cause"]+", "+e.fields["reason"])
	case e.msg == "registration socket that nobody serves removed":
		// Of a driver that was disabled or removed before this daemon read the files.
		name, _ = rootdir.DriverName(filepath.Base(e.fields["path"]))
		if w.history.between(name, e.at.Add(-becauseWithin), e.at, byConfig) != nil {
			w.history.noteAt(e.at, name, logged, e.msg)
		}
	case e.level == "ERROR" && e.msg != "error in the configuration":
		w.figures["errors in the log"]++
		w.say("ERROR %s", line)
	case strings.HasPrefix(e.msg, "cannot go on with the registration socket"):
		w.figures["not adopted"]++
		if from, there := w.upAt[name]; there && w.history.between(name, from.Add(-earlier), e.at, onPath, logged) == nil {
			w.violated("%s: not adopted without a cause: %s%s", name, line, w.history.story(name))
		}
		w.history.noteAt(e.at, name, logged, e.msg+": "+e.fields["error"])
	}
}

// happened processes an event of the kubelet.
func (w *world) happened(e fake.Event) {
	if e.What == fake.Reconciled {
		return
	}
	w.say("kubelet: %s %s %s %s", e.What, e.Driver, filepath.Base(e.Socket), e.Reason)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.figures[string(e.What)]++
	name := e.Driver
	if e.What == fake.Registered || e.What == fake.Deregistered {
		w.events[name]++
	}
	switch e.What {
	case fake.Deregistered:
		w.suspects = append(w.suspects, e)
		w.history.noteAt(e.At, name, lost, e.Reason)
	case fake.Unanswered:
		name, _ = rootdir.DriverName(filepath.Base(e.Socket))
		if w.byName[name] != nil && e.At.Sub(w.awayAt) > readWithin && w.foreignAt(e.Socket) == nil &&
			w.history.between(name, e.At.Add(-readWithin), e.At, onPath) == nil {
			w.figures["unanswered without a reason"]++
			w.say("UNANSWERED %s: %s%s", name, e.Reason, w.history.story(name))
		}
	case fake.Refused:
		w.history.noteAt(e.At, name, refusing, e.Reason)
	}
}
