package cli

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"csi-registrar/internal/safetext"
	"csi-registrar/internal/status"
)

// maxReason is how much of a reason is below a row of the table; `status DRIVER` shows all of it.
const maxReason = 400

// statusTable formats the table of all drivers, with a summary as its last line.
func statusTable(s status.Document, p page, now time.Time) string {
	var b strings.Builder
	b.WriteString(configErrorText(s.ConfigError, p))
	if len(s.Drivers) == 0 {
		b.WriteString("No drivers are configured: put a table [driver.\"NAME\"] into a file in\n/etc/csi-registrar/conf.d.\n")
		return b.String()
	}
	var rows strings.Builder
	w := tabwriter.NewWriter(&rows, 0, 0, 2, ' ', 0)
	// A node without volumes, as one without a kubelet, has no column for them.
	withVolumes := slices.ContainsFunc(s.Drivers, func(d status.Driver) bool { return volumesText(d) != "" })
	row := func(volumes string, columns ...string) {
		if withVolumes {
			columns = append(columns, volumes)
		}
		fmt.Fprintln(w, strings.Join(columns, "\t"))
	}
	row("VOLUMES", "DRIVER", p.paint(bold, "STATE"), "SINCE", "KUBELET")
	for _, d := range s.Drivers {
		row(cmp.Or(volumesText(d), "-"), nameOf(d), p.paint(stateColour(d.State), d.State), sinceColumn(d, now), kubeletColumn(d, now))
	}
	w.Flush() // to memory
	lines := slices.Collect(strings.Lines(rows.String()))
	b.WriteString(lines[0])
	for i, d := range s.Drivers {
		b.WriteString(lines[i+1])
		if reason := reasonOf(d, now); reason != "" {
			b.WriteString(p.hanging("    ", 4, safetext.Clean(reason, maxReason)))
		}
	}
	for i, text := range degraded(s, now) {
		if i == 0 {
			b.WriteString("\n")
		}
		b.WriteString(p.paint(yellow, strings.Join(wrap(safetext.Clean(text, maxLine), p.columns), "\n")) + "\n")
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

// degraded says what limits the whole daemon.
func degraded(s status.Document, now time.Time) (list []string) {
	if s.Polling != "" {
		list = append(list, "files are checked each second, because the kernel does not report changes: "+s.Polling)
	}
	for _, c := range s.Stuck {
		list = append(list, "the file system of "+c.Path+" does not answer (for "+age(now.Sub(c.Since))+")")
	}
	if s.VolumesError != "" {
		list = append(list, "the volumes in use are not known: "+s.VolumesError)
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
		out += p.hanging("  ", 4, safetext.Clean(line, maxLine))
	}
	return out + "\n"
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
		if value != "" {
			b.WriteString(p.hanging(fmt.Sprintf("%-*s", label, name), label, safetext.Clean(value, maxLine)))
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
	if d.LinkTarget != "" {
		line("  points to", d.LinkTarget+"; to change endpoint_link registers the driver once more")
	}
	if d.Traced {
		line("  calls", "recorded by csi-registrar trace; the journal has by whom")
	}
	line("  node id", said(safetext.Word, d.NodeID))
	for _, key := range slices.Sorted(maps.Keys(d.Topology)) {
		line("  topology", safetext.Word(key)+" = "+safetext.Word(d.Topology[key]))
	}
	if d.MaxVolumes > 0 {
		line("  volume limit", fmt.Sprint(d.MaxVolumes))
	}
	line("  volumes", volumesText(d))
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
