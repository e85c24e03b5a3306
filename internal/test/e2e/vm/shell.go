package vm

import (
	"encoding/base64"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// shellUnit runs the commands from the second serial line. It is not ordered after other units, so
// that it also serves while the machine starts and stops.
const shellUnit = `[Unit]
DefaultDependencies=no
IgnoreOnIsolate=yes
[Service]
ExecStart=/bin/sh /opt/shell
Restart=always
StandardInput=tty
StandardOutput=tty
StandardError=null
TTYPath=/dev/ttyS1
`

// shell reads lines of a number and a script, and answers each with the number, the exit code and
// the output.
const shell = `stty raw -echo
echo ready
while read -r id script; do
	printf %s "$script" | base64 -d >/run/script
	sh /run/script </dev/null >/run/output 2>&1
	echo "$id $? $(base64 -w0 </run/output)"
done
`

// Try runs a shell script in the machine and returns its output, both streams.
func (m *Machine) Try(script string) (string, error) {
	if err := m.send(script); err != nil {
		return "", err
	}
	for {
		line, err := m.lines.ReadString('\n')
		if err != nil {
			return "", fmt.Errorf("no answer: %w", err)
		}
		fields := strings.Fields(line)
		if len(fields) < 2 || fields[0] != strconv.Itoa(m.calls) {
			continue // "ready", from a shell that was restarted
		}
		var out []byte
		if len(fields) > 2 {
			if out, err = base64.StdEncoding.DecodeString(fields[2]); err != nil {
				return "", err
			}
		}
		if fields[1] != "0" {
			return string(out), fmt.Errorf("exit code %s", fields[1])
		}
		return string(out), nil
	}
}

func (m *Machine) send(script string) error {
	m.calls++
	if err := m.shell.SetDeadline(time.Now().Add(runLimit)); err != nil {
		return err
	}
	_, err := fmt.Fprintf(m.shell, "%d %s\n", m.calls, base64.StdEncoding.EncodeToString([]byte(script)))
	return err
}

// Run is Try for scripts that must succeed.
func (m *Machine) Run(script string) string {
	m.t.Helper()
	out, err := m.Try(script)
	if err != nil {
		m.t.Fatalf("%s: %v\n%s", script, err, out)
	}
	return out
}
