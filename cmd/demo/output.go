package main

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"
)

// width is how many columns the story may take.
const width = 80

// The ones who act in the story.
const (
	admin   = "admin"
	daemon  = "daemon"
	driver  = "driver"
	kubelet = "kubelet"
)

// output ends the story when nobody reads it any more.
type output struct {
	io.Writer
	end context.CancelCauseFunc
}

func (o output) Write(p []byte) (int, error) {
	n, err := o.Writer.Write(p)
	if err != nil {
		o.end(err)
	}
	return n, err
}

// tell prints what somebody did, and when.
func (n *node) print(at time.Time, who, format string, args ...any) {
	lead := fmt.Sprintf("%6.0f ms  %-7s  ", milliseconds(at.Sub(n.began)), who)
	text := fmt.Sprintf(format, args...)
	for i, line := range wrap(n.shorten(text), width-len(lead)) {
		if i == 1 {
			lead = strings.Repeat(" ", len(lead))
		}
		fmt.Fprintln(n.demo.Out, lead+line)
	}
}

// shorten leaves the story's directory out of paths.
func (n *node) shorten(text string) string {
	return strings.ReplaceAll(text, n.dir+string(filepath.Separator), "")
}

// wrap breaks text into lines of at most columns where there are blanks; a longer word
// gets a line of its own.
func wrap(text string, columns int) []string {
	var lines []string
	line := ""
	for word := range strings.FieldsSeq(text) {
		switch {
		case line == "":
			line = word
		case len(line)+1+len(word) <= columns:
			line += " " + word
		default:
			lines, line = append(lines, line), word
		}
	}
	return append(lines, line)
}

// printIntroduction describes the demo.
func (n *node) printIntroduction() {
	fmt.Fprintf(n.demo.Out, `How a CSI driver gets registered with the kubelet, and stays so.

The driver and the daemon are the real programs. The kubelet and systemd's
descriptor store are played by the demo itself. No cluster, no root; all of it
happens in %s
The driver's package ships one file, conf.d/50-sample.toml:

    [driver.%q]
    socket = "driver/csi.sock"

Times are milliseconds since the start.
`, n.dir, driverName)
}
