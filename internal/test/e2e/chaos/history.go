package chaos

import (
	"fmt"
	"strings"
	"time"
)

// deed is an event that can cause a deregistration or a line in the log.
type deed struct {
	at   time.Time
	kind kind
	what string
}

type kind string

const (
	onPath   kind = "path"     // the test touched the registration socket, or its directory
	byDriver kind = "driver"   // the driver was stopped, or its answers changed
	byConfig kind = "config"   // its configuration changed
	asked    kind = "asked"    // reregister
	logged   kind = "log"      // the daemon logged why it removes or recreates a socket
	refusing kind = "refused"  // the kubelet refused
	crashed  kind = "daemon"   // the daemon was killed or frozen
	lost     kind = "deregist" // the kubelet deregistered
	// The daemon logs nothing more about the driver until the next daemon starts.
	muted kind = "muted"
)

// history has the events of each driver. The world's lock guards it.
type history struct {
	deeds map[string][]deed // by driver
}

func (l *history) note(driver string, k kind, what string) {
	l.noteAt(time.Now(), driver, k, what)
}

func (l *history) noteAt(at time.Time, driver string, k kind, what string) {
	l.deeds[driver] = append(l.deeds[driver], deed{at, k, what})
}

// between returns a deed of one of the kinds in the given time, or nil.
func (l *history) between(driver string, from, to time.Time, kinds ...kind) *deed {
	for i, d := range l.deeds[driver] {
		for _, k := range kinds {
			if d.kind == k && !d.at.Before(from) && !d.at.After(to) {
				return &l.deeds[driver][i]
			}
		}
	}
	return nil
}

func (l *history) count(driver string, kinds ...kind) int {
	n := 0
	for _, d := range l.deeds[driver] {
		for _, k := range kinds {
			if d.kind == k {
				n++
			}
		}
	}
	return n
}

// story returns the recent events of a driver, to find the cause of a failure.
func (l *history) story(driver string) string {
	var b strings.Builder
	deeds := l.deeds[driver]
	for _, d := range deeds[max(0, len(deeds)-25):] {
		fmt.Fprintf(&b, "\n    %s %-8s %s", d.at.Format("15:04:05.000"), d.kind, d.what)
	}
	return b.String()
}

// becauseWithin is how long after its cause a log line may appear: an error elsewhere in the
// configuration or a driver that is not ready delays it.
const becauseWithin = 2 * time.Minute

// unfounded returns an error text if the daemon had no reason to remove or recreate a socket.
func (l *history) unfounded(driver string, e entry) string {
	var need []kind
	switch cause := e.fields["cause"]; {
	case cause == "unconfigured":
		need = []kind{byConfig}
	case cause == "removed", cause == "replaced":
		need = []kind{onPath}
	case cause == "changed":
		need = []kind{byDriver, byConfig}
	case cause == "asked":
		need = []kind{asked}
	case cause == "returned":
		need = []kind{refusing}
	case cause == "mismatch", cause == "gone":
		need = []kind{byDriver}
	default:
		return fmt.Sprintf("%s: the log gives a cause that cannot be: %s, cause %q, %s", driver, e.msg, cause, e.fields["reason"])
	}
	if l.between(driver, e.at.Add(-becauseWithin), e.at, need...) == nil {
		return fmt.Sprintf("%s: nothing was done that would be the cause of: %s, cause %q, %s", driver, e.msg, e.fields["cause"], e.fields["reason"])
	}
	return ""
}

// churn returns an error text if the socket was recreated more often than there were reasons.
func (l *history) churn(driver string) string {
	if l.count(driver, muted) > 0 {
		return ""
	}
	causes := l.count(driver, onPath, byDriver, byConfig, asked, refusing, crashed)
	if n := l.count(driver, logged); n > causes {
		return fmt.Sprintf("%s: recreated or withdrawn %d times for %d causes", driver, n, causes)
	}
	if n, most := l.count(driver, lost), l.count(driver, onPath, logged, crashed); n > most {
		return fmt.Sprintf("%s: deregistered %d times for %d causes", driver, n, most)
	}
	return ""
}
