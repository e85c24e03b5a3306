package daemon

import (
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/node/status"
)

// Every user of the node can read STATUS=.
func TestStatusLineQuotesNoDriver(t *testing.T) {
	line := statusLine(status.Document{Drivers: []status.Driver{
		{Name: "a.example", State: "registered", Driver: status.Ready, Registration: status.Registered},
		{Name: "b.example", State: "refused", Driver: status.Ready, Registration: status.Refused, Reason: "token=hunter2"},
	}})
	if line != "2 drivers: 1 registered, 1 refused (first b.example)" {
		t.Error(line)
	}
	if strings.Contains(line, "hunter2") {
		t.Error("it quotes the driver")
	}
}

// Only root may read the files, whose errors quote values.
func TestStatusLineQuotesNoFile(t *testing.T) {
	line := statusLine(status.Document{ConfigError: "/etc/a.toml:1: driver.\"a\".timeout: \"hunter2\" is not a duration\n/etc/b.toml:2: second"})
	if want := "the configuration has errors; 0 drivers"; line != want {
		t.Errorf("%q, want %q", line, want)
	}
}

// A registered driver that does not serve is in the line, too.
func TestStatusLineOfADriverThatHangs(t *testing.T) {
	line := statusLine(status.Document{Drivers: []status.Driver{
		{Name: "a.example", State: "registered", Registration: status.Registered, Driver: status.Ready, DriverSince: time.Now()},
		{Name: "b.example", State: "registered", Registration: status.Registered, Driver: status.Hanging, DriverSince: time.Now()},
		// not asked yet
		{Name: "adopted.example", State: "registered", Registration: status.Registered, Driver: status.Absent},
	}})
	if want := "3 drivers: 3 registered; 1 registered and not serving (b.example: driver hanging)"; line != want {
		t.Errorf("%q, want %q", line, want)
	}
}
