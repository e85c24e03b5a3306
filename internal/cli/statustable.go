package cli

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"csi-registrar/internal/safetext"
	"csi-registrar/internal/status"
)

// maxReason is how much of a reason the table shows; `status DRIVER` shows all of it.
const maxReason = 400

// statusTable formats the table of all drivers, with a summary as its last line.
func statusTable(s status.Document, p page, now time.Time) string {
	var b strings.Builder
	b.WriteString(configErrorText(s.ConfigError, p))
	if len(s.Drivers) == 0 {
		b.WriteString("No drivers are configured: put a table [driver.\"NAME\"] into a file in\n/etc/csi-registrar/conf.d.\n")
		return b.String()
	}
	t := newTable(s.Drivers, p, now)
	b.WriteString(t.paint(bold, t.head()) + "\n")
	cut := false
	for _, d := range s.Drivers {
		reason := safetext.Clean(reasonOf(d, now), maxLine)
		if short := safetext.Clean(reason, maxReason); short != reason {
			reason, cut = short, true
		}
		t.row(&b, nameOf(d), d.State, sinceColumn(d, now), kubeletColumn(d, now), reason, stateColour(d.State))
	}
	if cut {
		b.WriteString("\n`csi-registrar status DRIVER` shows the reasons that are cut off here.\n")
	}
	for i, d := range degraded(s) {
		if i == 0 {
			b.WriteString("\n")
		}
		for _, l := range wrap(safetext.Clean(d.text+d.duration(now), maxLine), p.columns) {
			b.WriteString(p.paint(yellow, l) + "\n")
		}
	}
	b.WriteString(summaryLine(s, p))
	return b.String()
}

// reasonOf says what is blocking the driver, or what will once it changes or the daemon
// restarts.
func reasonOf(d status.Driver, now time.Time) string {
	switch {
	case d.State == status.Disabled:
		return "" // the state says it
	case d.Reason != "":
		return d.Reason
	case d.NotKept != "":
		return "the registration would not survive a restart of the daemon: " + d.NotKept
	case !d.DampedUntil.IsZero():
		return "changed too often; the next change is made at " + clock(d.DampedUntil, now) + " at the latest"
	}
	return ""
}

func clock(t, now time.Time) string { return t.In(now.Location()).Format("15:04:05") }

// degradation is something that limits the whole daemon.
type degradation struct {
	text  string
	since time.Time // zero: not known
}

func (d degradation) duration(now time.Time) string {
	if d.since.IsZero() {
		return ""
	}
	return " (for " + age(now.Sub(d.since)) + ")"
}

func degraded(s status.Document) (list []degradation) {
	if s.Polling != "" {
		list = append(list, degradation{text: "files are checked each second, because the kernel does not report changes: " + s.Polling})
	}
	for _, c := range s.Stuck {
		list = append(list, degradation{"the file system of " + c.Path + " does not answer", c.Since})
	}
	return list
}

// configErrorText comes before everything else.
func configErrorText(text string, p page) string {
	if text == "" {
		return ""
	}
	out := p.paint(red, "The configuration has errors and is not fully in force:") + "\n"
	for line := range strings.SplitSeq(strings.TrimSpace(text), "\n") {
		out += "  " + strings.Join(wrap(safetext.Clean(line, maxLine), p.columns-4), "\n    ") + "\n"
	}
	return out + "\n"
}

// table holds the widths of its columns.
type table struct {
	page
	driver, state, since, kubelet int
}

func newTable(drivers []status.Driver, p page, now time.Time) table {
	t := table{page: p, driver: len("DRIVER"), state: len("STATE"), since: len("SINCE"), kubelet: len("KUBELET")}
	for _, d := range drivers {
		t.driver = max(t.driver, utf8.RuneCountInString(nameOf(d)))
		t.state = max(t.state, len(d.State))
		t.since = max(t.since, len(sinceColumn(d, now)))
		t.kubelet = max(t.kubelet, len(kubeletColumn(d, now)))
	}
	// A name that is longer has a line of its own.
	t.driver = min(t.driver, max(p.columns-(t.state+t.since+t.kubelet+6), 10))
	return t
}

// head names the columns, without REASON if no reason can be at its place.
func (t table) head() string {
	line := fmt.Sprintf("%-*s  %-*s  %-*s  %-*s  REASON", t.driver, "DRIVER", t.state, "STATE", t.since, "SINCE", t.kubelet, "KUBELET")
	if len(line) > t.columns {
		line = strings.TrimRight(strings.TrimSuffix(line, "REASON"), " ")
	}
	return line
}

// row writes a line; the reason goes to its end if it fits there, else under it.
func (t table) row(b *strings.Builder, driver, state, since, kubelet, reason, colour string) {
	if utf8.RuneCountInString(driver) > t.driver {
		b.WriteString(driver + "\n")
		driver = ""
	}
	pad := func(s string, width int) string {
		return s + strings.Repeat(" ", max(width-utf8.RuneCountInString(s), 0))
	}
	line := pad(driver, t.driver) + "  " + t.paint(colour, state) + pad("", t.state-len(state)) + "  " + pad(since, t.since) + "  "
	used := t.driver + t.state + t.since + t.kubelet + 8
	if reason == "" || used+utf8.RuneCountInString(reason) > t.columns {
		b.WriteString(line + kubelet + "\n")
		for _, l := range wrap(reason, t.columns-4) {
			b.WriteString("    " + l + "\n")
		}
		return
	}
	b.WriteString(line + pad(kubelet, t.kubelet) + "  " + reason + "\n")
}

// nameOf formats the driver's name, also while it has not reported one (`run` with
// node-driver-registrar's flags).
func nameOf(d status.Driver) string {
	return cmp.Or(safetext.Clean(d.Name, maxLine), "(no name yet)")
}

func sinceColumn(d status.Driver, now time.Time) string {
	if d.Since.IsZero() {
		return "-"
	}
	return age(now.Sub(d.Since))
}

// kubeletColumn is the kubelet's last answer.
func kubeletColumn(d status.Driver, now time.Time) string {
	switch {
	case d.KubeletError != "" || d.Registration == status.Refused:
		return "no"
	case !d.RegisteredAt.IsZero():
		return "yes " + age(now.Sub(d.RegisteredAt)) + " ago"
	case !d.LastGetInfoAt.IsZero():
		return "asked " + age(now.Sub(d.LastGetInfoAt)) + " ago"
	}
	return "-"
}

func stateColour(state string) string {
	switch state {
	case string(status.Registered):
		return green
	case string(status.Mismatch), string(status.Refused), string(status.Conflict):
		return red
	case status.Disabled:
		return dim
	}
	return yellow
}

// summaryLine is the last line, the one next to the prompt.
func summaryLine(s status.Document, p page) string {
	enabled := 0
	for _, d := range s.Drivers {
		if d.State != status.Disabled {
			enabled++
		}
	}
	pending := s.Pending()
	text := fmt.Sprintf("%d of %d drivers registered", enabled-len(pending), enabled)
	if off := len(s.Drivers) - enabled; off > 0 {
		text += fmt.Sprintf(", %d disabled", off)
	}
	colour := green
	if len(pending) > 0 {
		colour = yellow
	}
	return "\n" + p.paint(colour, text) + "\n"
}

// said marks what others said as such; empty stays empty.
func said(mark func(string) string, text string) string {
	if text == "" {
		return ""
	}
	return mark(text)
}

// driverText formats all that is known of one driver.
func driverText(d status.Driver, configError string, p page, now time.Time) string {
	var b strings.Builder
	b.WriteString(configErrorText(configError, p))
	const label = 22
	line := func(name, value string) {
		if value == "" {
			return
		}
		for i, l := range wrap(safetext.Clean(value, maxLine), p.columns-label) {
			if i > 0 {
				name = ""
			}
			fmt.Fprintf(&b, "%-*s%s\n", label, name, l)
		}
	}
	at := func(t time.Time) string {
		if t.IsZero() {
			return ""
		}
		return fmt.Sprintf("%s (%s ago)", t.In(now.Location()).Format("2006-01-02 15:04:05 MST"), age(now.Sub(t)))
	}
	b.WriteString(p.paint(bold, safetext.Clean(d.Name, maxLine)) + "\n")
	fmt.Fprintf(&b, "%-*s%s\n", label, "  state", p.paint(stateColour(d.State), d.State))
	line("  since", at(d.Since))
	line("  reason", d.Reason)
	line("  driver", string(d.Driver))
	line("  driver version", said(safetext.Word, d.DriverVersion))
	line("  socket", d.Socket)
	line("  endpoint", d.Endpoint)
	line("  node id", said(safetext.Word, d.NodeID))
	for _, key := range slices.Sorted(maps.Keys(d.Topology)) {
		line("  topology", safetext.Word(key)+" = "+safetext.Word(d.Topology[key]))
	}
	if d.MaxVolumes > 0 {
		line("  volume limit", fmt.Sprint(d.MaxVolumes))
	}
	line("  registration", string(d.Registration))
	line("  registration socket", d.RegistrationSocket)
	line("  kubelet asked", at(d.LastGetInfoAt))
	line("  kubelet confirmed", at(d.RegisteredAt))
	line("  kubelet refused", said(safetext.Quote, d.KubeletError))
	line("  republished", fmt.Sprintf("%d times", d.Republications))
	line("  not kept", d.NotKept)
	if !d.DampedUntil.IsZero() {
		line("  changes delayed", "until "+clock(d.DampedUntil, now)+" at the latest, because there were too many")
	}
	return b.String()
}
