package cli

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
)

// maxReason limits the reason below a row of the table; `status DRIVER` shows the whole reason.
const maxReason = 400

// maxState limits a state, which is a word.
const maxState = 40

// statusTable formats the table of all drivers. Its last line is a summary.
func statusTable(s status.Document, p page, now time.Time) string {
	var b strings.Builder
	b.WriteString(configErrorText(s.ConfigError, p))
	if len(s.Drivers) == 0 {
		if len(s.InvalidFiles) == 0 {
			b.WriteString("No drivers are configured: add a table [driver.\"NAME\"] to a file in\n/etc/csi-registrar/conf.d.\n")
		}
		degradedText(&b, s, p, now)
		return b.String()
	}
	var rows strings.Builder
	w := tabwriter.NewWriter(&rows, 0, 0, 2, ' ', 0)
	// Without any volume, as on a node without a kubelet, there is no column for them.
	withVolumes := slices.ContainsFunc(s.Drivers, func(d status.Driver) bool { return volumesText(d) != "" })
	row := func(volumes string, columns ...string) {
		if withVolumes {
			columns = append(columns, volumes)
		}
		fmt.Fprintln(w, strings.Join(columns, "\t"))
	}
	row("VOLUMES", "DRIVER", p.paint(bold, "STATE"), "SINCE", "KUBELET")
	for _, d := range s.Drivers {
		since := "-"
		if !d.Since.IsZero() {
			since = age(now.Sub(d.Since))
		}
		row(cmp.Or(volumesText(d), "-"), nameOf(d), p.paint(colourOf(d), stateText(d, now)), since, kubeletColumn(d, now))
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
	degradedText(&b, s, p, now)
	b.WriteString(summaryLine(s, p, now))
	return b.String()
}

func degradedText(b *strings.Builder, s status.Document, p page, now time.Time) {
	for i, text := range degraded(s, now) {
		if i == 0 {
			b.WriteString("\n")
		}
		b.WriteString(p.paint(yellow, strings.Join(wrap(safetext.Clean(text, maxLine), p.columns), "\n")) + "\n")
	}
}

// reasonOf returns what blocks the driver, or will block it after a change or a restart of the
// daemon.
func reasonOf(d status.Driver, now time.Time) string {
	switch {
	case d.State == status.Disabled:
		return "" // the state shows it
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

// degraded lists what limits the whole daemon.
func degraded(s status.Document, now time.Time) (list []string) {
	// in its reason
	said := slices.ContainsFunc(s.Drivers, func(d status.Driver) bool { return s.KubeletEnded(d, now) != "" })
	if ended := s.Kubelet.EndedAt; !ended.IsZero() && !said {
		list = append(list, s.Kubelet.String()+" ended "+age(now.Sub(ended))+" ago; no other has confirmed a registration since")
	}
	if s.Polling != "" {
		list = append(list, "polling files every second, because inotify is not available: "+s.Polling)
	}
	for _, c := range s.Stuck {
		list = append(list, "the file system of "+c.Path.String()+" does not answer (for "+age(now.Sub(c.Since))+")")
	}
	for _, w := range s.Withdrawals {
		list = append(list, "the registration socket "+w.RegistrationSocket.String()+" cannot be withdrawn (for "+age(now.Sub(w.Since))+"): "+w.Error)
	}
	for _, volumes := range s.Unregistered {
		list = append(list, volumes+" in use, and nobody registers the driver: csi-registrar doctor")
	}
	if s.VolumesError != "" {
		list = append(list, "the volumes in use are not known: "+s.VolumesError)
	}
	return list
}

// configErrorText formats the errors in the configuration, which are printed first.
func configErrorText(text string, p page) string {
	if text == "" {
		return ""
	}
	out := p.paint(red, "The configuration has errors and is only partly in force:") + "\n"
	for line := range strings.SplitSeq(strings.TrimSpace(text), "\n") {
		out += p.hanging("  ", 4, safetext.Clean(line, maxLine))
	}
	return out + "\n"
}

// nameOf formats the driver's name. With node-driver-registrar's flags a driver has none until it
// answers.
func nameOf(d status.Driver) string {
	return cmp.Or(safetext.Clean(d.Name, maxLine), "(no name yet)")
}

// kubeletColumn formats the kubelet's last answer.
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

// stateText formats the state, with the driver's own if it is registered but does not serve.
func stateText(d status.Driver, now time.Time) string {
	state := safetext.Clean(d.State, maxState)
	if !d.Down() {
		return state
	}
	driver := safetext.Clean(string(d.Driver), maxState)
	switch d.Driver {
	case status.Absent:
		driver = "down"
	case status.Starting:
		driver = "not ready"
	}
	return fmt.Sprintf("%s, driver %s for %s", state, driver, age(now.Sub(d.DriverSince)))
}

func colourOf(d status.Driver) string {
	if d.Down() {
		return yellow
	}
	colours := map[string]string{
		string(status.Registered): green, status.Disabled: dim, status.Invalid: red,
		string(status.Mismatch): red, string(status.Refused): red, string(status.Conflict): red,
	}
	return cmp.Or(colours[d.State], yellow)
}

// summaryLine formats the last line of the table, next to the prompt.
func summaryLine(s status.Document, p page, now time.Time) string {
	enabled := 0
	for _, d := range s.Drivers {
		if d.State != status.Disabled {
			enabled++
		}
	}
	pending := s.Pending()
	text := fmt.Sprintf("%d of %d drivers registered", enabled-len(pending), enabled)
	down := s.Down()
	if len(down) > 0 {
		text += fmt.Sprintf(", %d serving", enabled-len(pending)-len(down))
	}
	if off := len(s.Drivers) - enabled; off > 0 {
		text += fmt.Sprintf(", %d disabled", off)
	}
	ended := slices.ContainsFunc(s.Drivers, func(d status.Driver) bool { return s.KubeletEnded(d, now) != "" })
	if ended {
		text += ", with a kubelet that has ended " + age(now.Sub(s.Kubelet.EndedAt)) + " ago"
	}
	colour := green
	if ended || len(pending)+len(down) > 0 {
		colour = yellow
	}
	return "\n" + p.paint(colour, text) + "\n"
}

// limitText formats the volume limit that the driver reports, and that of the kubelet if it
// differs.
func limitText(d status.Driver) string {
	limit := func(n int64) string {
		if n == 0 {
			return "none"
		}
		return fmt.Sprint(n)
	}
	switch {
	case d.KubeletMaxVolumes != nil:
		return fmt.Sprintf("%s; the kubelet knows: %s", limit(d.MaxVolumes), limit(*d.KubeletMaxVolumes))
	case d.MaxVolumes > 0:
		return limit(d.MaxVolumes)
	}
	return ""
}

// driverText formats everything that is known about one driver.
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
	fmt.Fprintf(&b, "%-*s%s\n", label, "  state", p.paint(colourOf(d), safetext.Clean(d.State, maxState)))
	line("  since", at(d.Since))
	line("  reason", d.Reason)
	line("  driver", string(d.Driver))
	if d.Down() {
		line("  driver since", at(d.DriverSince))
	}
	if d.DriverRestarts > 0 {
		line("  driver restarts", fmt.Sprintf("%d within %s", d.DriverRestarts, age(status.RestartWindow)))
	}
	line("  driver version", safetext.Claim(d.DriverVersion).String())
	line("  socket", d.Socket.String())
	line("  endpoint", d.Endpoint.String())
	line("  node id", safetext.Claim(d.NodeID).String())
	for _, key := range slices.Sorted(maps.Keys(d.Topology)) {
		line("  topology", safetext.Word(key)+" = "+safetext.Word(d.Topology[key]))
	}
	line("  volume limit", limitText(d))
	line("  volumes", volumesText(d))
	line("  registration", string(d.Registration))
	line("  registration socket", d.RegistrationSocket.String())
	line("  kubelet asked", at(d.LastGetInfoAt))
	line("  kubelet confirmed", at(d.RegisteredAt))
	if d.KubeletError != "" {
		line("  kubelet refused", safetext.Quote(d.KubeletError))
	}
	line("  republished", fmt.Sprintf("%d times", d.Republications))
	line("  not kept", d.NotKept)
	if !d.DampedUntil.IsZero() {
		line("  changes delayed", "until "+clock(d.DampedUntil, now)+" at the latest, because there were too many")
	}
	return b.String()
}
