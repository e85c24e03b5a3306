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

// maxWhy is how much of a reason the table shows; `status DRIVER` shows all of it.
const maxWhy = 400

// statusTable is the table of all drivers, with what matters in its last line.
func statusTable(s status.Document, p page, now time.Time) string {
	var b strings.Builder
	b.WriteString(configErrorText(s.ConfigError, p))
	if len(s.Drivers) == 0 {
		b.WriteString("No drivers are configured: put a table [driver.\"NAME\"] into a file in\n/etc/csi-registrar/conf.d.\n")
		return b.String()
	}
	t := layOut(s.Drivers, p, now)
	b.WriteString(t.paint(bold, t.head()) + "\n")
	cut := false
	for _, d := range s.Drivers {
		why := safetext.Clean(d.Reason, maxLine)
		if d.State == status.Disabled {
			why = "" // the state says it
		}
		if short := safetext.Clean(why, maxWhy); short != why {
			why, cut = short, true
		}
		t.row(&b, nameOf(d), d.State, sinceWord(d, now), kubeletWord(d, now), why, stateColour(d.State))
	}
	if cut {
		b.WriteString("\n`csi-registrar status DRIVER` shows the reasons that are cut off here.\n")
	}
	b.WriteString(tallyLine(s, p))
	return b.String()
}

// configErrorText comes before everything else.
func configErrorText(text string, p page) string {
	if text == "" {
		return ""
	}
	var b strings.Builder
	fmt.Fprintln(&b, p.paint(red, "The configuration has mistakes, and is not in force as it is written:"))
	for line := range strings.SplitSeq(strings.TrimSpace(text), "\n") {
		for i, l := range wrap(safetext.Clean(line, maxLine), p.columns-4) {
			if i == 0 {
				b.WriteString("  " + l + "\n")
			} else {
				b.WriteString("    " + l + "\n")
			}
		}
	}
	b.WriteString("\n")
	return b.String()
}

// table knows the widths of its columns.
type table struct {
	page
	driver, state, since, kubelet int
}

func layOut(drivers []status.Driver, p page, now time.Time) table {
	t := table{page: p, driver: len("DRIVER"), state: len("STATE"), since: len("SINCE"), kubelet: len("KUBELET")}
	for _, d := range drivers {
		t.driver = max(t.driver, utf8.RuneCountInString(nameOf(d)))
		t.state = max(t.state, len(d.State))
		t.since = max(t.since, len(sinceWord(d, now)))
		t.kubelet = max(t.kubelet, len(kubeletWord(d, now)))
	}
	// A longer name has a line of its own.
	t.driver = min(t.driver, max(p.columns-(t.state+t.since+t.kubelet+6), 10))
	return t
}

// head names the columns; the reasons' name is left out where no reason could be beside it.
func (t table) head() string {
	line := fmt.Sprintf("%-*s  %-*s  %-*s  %-*s  WHY", t.driver, "DRIVER", t.state, "STATE", t.since, "SINCE", t.kubelet, "KUBELET")
	if len(line) > t.columns {
		line = strings.TrimRight(strings.TrimSuffix(line, "WHY"), " ")
	}
	return line
}

// row writes a line; the reason goes to its end if it fits there, else under it.
func (t table) row(b *strings.Builder, driver, state, since, kubelet, why, colour string) {
	if utf8.RuneCountInString(driver) > t.driver {
		b.WriteString(driver + "\n")
		driver = ""
	}
	pad := func(s string, width int) string {
		return s + strings.Repeat(" ", max(width-utf8.RuneCountInString(s), 0))
	}
	line := pad(driver, t.driver) + "  " + t.paint(colour, state) + pad("", t.state-len(state)) + "  " + pad(since, t.since) + "  "
	used := t.driver + t.state + t.since + t.kubelet + 8
	if why == "" || used+utf8.RuneCountInString(why) > t.columns {
		b.WriteString(line + kubelet + "\n")
		for _, l := range wrap(why, t.columns-4) {
			b.WriteString("    " + l + "\n")
		}
		return
	}
	b.WriteString(line + pad(kubelet, t.kubelet) + "  " + why + "\n")
}

// nameOf is the driver's name for people, also while it has not told one (`run` with
// node-driver-registrar's flags).
func nameOf(d status.Driver) string {
	return cmp.Or(safetext.Clean(d.Name, maxLine), "(no name yet)")
}

func sinceWord(d status.Driver, now time.Time) string {
	if d.Since.IsZero() {
		return "-"
	}
	return age(now.Sub(d.Since))
}

// kubeletWord is the last that the kubelet said of the driver.
func kubeletWord(d status.Driver, now time.Time) string {
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

// tallyLine is the last line: what matters, where the eye is.
func tallyLine(s status.Document, p page) string {
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

// driverText is all that is known of one driver.
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
	line("  why", d.Reason)
	line("  driver", string(d.Driver))
	line("  driver version", d.DriverVersion)
	line("  socket", d.Socket)
	line("  endpoint", d.Endpoint)
	line("  node id", d.NodeID)
	for _, key := range slices.Sorted(maps.Keys(d.Topology)) {
		line("  topology", key+" = "+d.Topology[key])
	}
	if d.MaxVolumes > 0 {
		line("  volumes at most", fmt.Sprint(d.MaxVolumes))
	}
	line("  registration", string(d.Registration))
	line("  registration socket", d.RegistrationSocket)
	line("  kubelet asked", at(d.LastGetInfoAt))
	line("  kubelet confirmed", at(d.RegisteredAt))
	line("  kubelet refused", d.KubeletError)
	line("  republished", fmt.Sprintf("%d times", d.Republications))
	return b.String()
}
