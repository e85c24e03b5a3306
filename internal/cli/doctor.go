package cli

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"maps"
	"runtime/debug"
	"slices"
	"strings"

	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/tool/doctor"
)

func setupDoctor(fs *flag.FlagSet) runner {
	asJSON := fs.Bool("json", false, "print a JSON document")
	source := sourceFlags(fs)
	return func(ctx context.Context, e *env, args []string) error {
		o := doctor.Options{Source: *source, Drivers: args, Units: doctor.Systemctl{}, Version: build().Version}
		return runDoctor(ctx, e, o, *asJSON)
	}
}

// runDoctor examines the node; the exit code is 1 if there is a problem.
func runDoctor(ctx context.Context, e *env, o doctor.Options, asJSON bool) error {
	// The mounts of all pods are read and dropped again: with a heap of 2 MB, collecting them took
	// a third of the CPU.
	defer debug.SetGCPercent(debug.SetGCPercent(400))
	r := doctor.Run(ctx, o)
	if ctx.Err() != nil {
		return fmt.Errorf("cannot finish: %w", context.Cause(ctx))
	}
	if asJSON {
		if err := writeJSON(e.stdout, r, "  "); err != nil {
			return err
		}
	} else if _, err := fmt.Fprint(e.stdout, doctorText(r, e.page(), len(o.Drivers) > 0)); err != nil {
		return err
	}
	if !r.Healthy {
		return &exitError{code: exitFailed}
	}
	return nil
}

// doctorText formats the checks, then the findings, causes before effects. Healthy drivers have one
// line in all, unless drivers were named on the command line: then it has all lines.
func doctorText(r doctor.Report, p page, named bool) string {
	var b strings.Builder
	checks := map[string][]doctor.Check{}
	for _, c := range r.Checks {
		checks[c.Driver] = append(checks[c.Driver], c)
	}
	var healthy []string
	for _, d := range slices.Sorted(maps.Keys(checks)) { // the node, which has no name, is first
		faulty := slices.ContainsFunc(checks[d], func(c doctor.Check) bool { return c.Result != doctor.OK })
		if !faulty && d != "" && !named {
			healthy = append(healthy, d)
			continue
		}
		b.WriteString(p.paint(bold, cmp.Or(d, "the node")) + "\n")
		for _, c := range checks[d] {
			// The finding has the same text.
			found := func(f doctor.Finding) bool { return f.Driver == c.Driver && f.Step == c.Step && f.Found == c.Says }
			if i := slices.IndexFunc(r.Findings, found); i >= 0 {
				c.Says = fmt.Sprintf("see %d below", i+1)
			}
			checkLine(&b, p, string(c.Step), c)
		}
	}
	if len(healthy) > 0 {
		b.WriteString(p.paint(bold, safetext.Count(len(healthy), "driver")+" without findings") + "\n")
		b.WriteString(p.hanging("  "+p.paint(green, "ok")+"       ", 2+resultWidth, safetext.Some(healthy, 3)))
	}
	b.WriteString("\n" + doctorSummary(r, p) + "\n")
	for i, f := range r.Findings {
		findingText(&b, p, i+1, f)
	}
	if len(r.Findings) == 0 {
		unseenText(&b, p, checks)
	} else {
		b.WriteString("\n" + p.hanging("", 0, "Each id is explained in /usr/share/doc/csi-registrar/findings.md."))
	}
	return b.String()
}

// unseenText names the commands that show what doctor does not look at.
func unseenText(b *strings.Builder, p page, checks map[string][]doctor.Check) {
	drivers := slices.DeleteFunc(slices.Sorted(maps.Keys(checks)), func(d string) bool { return d == "" })
	if len(drivers) == 0 {
		return
	}
	b.WriteString("\n" + p.hanging("", 0, "If volumes still fail, look at what the kubelet logs, or record its calls (trace.md):"))
	b.WriteString("      journalctl --no-pager -n 20 --grep kubernetes.io/csi\n")
	b.WriteString(p.hanging("", 0, "and at what is not visible from this node, where kubectl works. Some drivers also need the controller of their vendor to know the node."))
	fmt.Fprintf(b, "      kubectl get csidriver %s\n", strings.Join(drivers[:min(len(drivers), 3)], " "))
	b.WriteString("      kubectl get csinodes,volumeattachments -o wide\n")
	b.WriteString(p.hanging("", 0, "If this node's CSINode lacks a driver: csi-registrar reregister DRIVER. If its Node was deleted: restart the kubelet."))
}

const (
	resultWidth = len(doctor.Problem) + 2
	stepWidth   = len("descriptor store") + 2
	labelWidth  = len("expected") + 2
)

var resultColours = map[doctor.Result]string{doctor.OK: green, doctor.Problem: red, doctor.Warning: yellow, doctor.Skipped: dim}

func checkLine(b *strings.Builder, p page, step string, c doctor.Check) {
	says := c.Says
	if c.TookMS > 0 {
		says = strings.TrimSpace(fmt.Sprintf("%.2f ms: %s", c.TookMS, says))
	}
	head := "  " + p.paint(resultColours[c.Result], string(c.Result)) + strings.Repeat(" ", resultWidth-len(c.Result)) +
		step + strings.Repeat(" ", max(stepWidth-len(step), 1))
	b.WriteString(p.hanging(head, 2+resultWidth+stepWidth, says))
}

func doctorSummary(r doctor.Report, p page) string {
	problems := 0
	for _, f := range r.Findings {
		if f.Severity == doctor.Problem {
			problems++
		}
	}
	warnings := len(r.Findings) - problems
	switch {
	case len(r.Findings) == 0:
		return p.paint(green, "No problems were found.")
	case problems == 0:
		return p.paint(yellow, "No problem was found, "+safetext.Count(warnings, "warning")+":")
	}
	text := safetext.Count(problems, "problem")
	if warnings > 0 {
		text += ", " + safetext.Count(warnings, "warning")
	}
	if len(r.Findings) == 1 {
		return p.paint(red, text+":")
	}
	return p.paint(red, text+".") + "\nFix the first one, then run doctor again."
}

func findingText(b *strings.Builder, p page, n int, f doctor.Finding) {
	number := fmt.Sprintf("%d. ", n)
	severity := p.paint(resultColours[f.Severity], string(f.Severity))
	fmt.Fprintf(b, "\n%s%s %s: %s\n", number, severity, cmp.Or(f.Driver, "the node"), f.Step)
	width := len(number) + labelWidth
	label := func(s string) string { return fmt.Sprintf("%*s%-*s", len(number), "", labelWidth, s) }
	b.WriteString(label("id") + p.paint(dim, string(f.ID)) + "\n")
	b.WriteString(p.hanging(label("found"), width, f.Found))
	if f.Expected != "" {
		b.WriteString(p.hanging(label("expected"), width, f.Expected))
	}
	if len(f.Fix) > 0 {
		b.WriteString(strings.TrimRight(label("fix"), " ") + "\n")
	}
	const indent = "      " // the same on each line, so that a block of them can be pasted
	for _, line := range f.Fix {
		if line.Command.Name != "" { // never wrapped
			b.WriteString(indent + line.String() + "\n")
			continue
		}
		for _, part := range wrap(line.Comment, max(p.columns-len(indent)-2, 10)) {
			b.WriteString(indent + "# " + part + "\n")
		}
	}
}
