package main

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"
)

// width is the maximum width of the output in columns.
const width = 80

// The second column of the output.
const (
	admin   = "admin"
	daemon  = "daemon"
	driver  = "driver"
	kubelet = "kubelet"
)

// output ends the demo when a write fails, as after `| head -1`.
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

// print prints an event: when, who and what.
func (n *node) print(at time.Time, who, format string, args ...any) {
	lead := fmt.Sprintf("%6.0f ms  %-7s  ", milliseconds(at.Sub(n.began)), who)
	text := strings.ReplaceAll(fmt.Sprintf(format, args...), n.dir+string(filepath.Separator), "")
	for i, line := range wrap(text, width-len(lead)) {
		if i == 1 {
			lead = strings.Repeat(" ", len(lead))
		}
		fmt.Fprintln(n.demo.Out, lead+line)
	}
}

// wrap breaks text at spaces into lines of at most columns characters. A longer word gets its own
// line.
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

func (n *node) printIntroduction() {
	fmt.Fprintf(n.demo.Out, `How a CSI driver is registered with the kubelet, and stays registered.

The driver and the daemon are the real programs; the demo simulates the kubelet
and systemd's descriptor store. It needs no cluster and no root. All files are
in %s
The driver's package ships one file, conf.d/50-sample.toml:

    [driver.%q]
    socket = "driver/csi.sock"

Times are milliseconds since the start.
`, n.dir, driverName)
}
